"""The policy on this rank: a part of the model with its log-probabilities and updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from megaverl.data.batch import SequenceBatch
from megaverl.models.gpt import Recompute
from megaverl.models.log_probs import vocab_parallel_log_probs
from megaverl.models.packed_model import Pack, PackedModel, UpdateResult
from megaverl.models.shape import ModelShape
from megaverl.parallel.compat_megatron import gather_from_sequence_parallel_region
from megaverl.parallel.device import Device
from megaverl.parallel.layout import Layout

LossFn = Callable[[SequenceBatch, Tensor, Tensor | None], tuple[Tensor, dict[str, Tensor]]]


class PolicyModel(PackedModel):
    """This rank's part of a policy (or, not trainable, of a frozen reference). All ranks call every method alike."""

    def __init__(
        self,
        shape: ModelShape,
        layout: Layout,
        device: Device,
        *,
        trainable: bool,
        sequence_parallel: bool = False,
        logprob_chunk: int | None = None,
        recompute: Recompute = "none",
    ) -> None:
        """Builds the part for this rank, randomly initialised; `init_model_parallel` must have run.

        Args:
            logprob_chunk: tokens whose logits exist at the same time; None lets the memory decide.
            recompute: activations that the backward pass computes again.
        """
        super().__init__(
            shape, layout, device, trainable=trainable, sequence_parallel=sequence_parallel, recompute=recompute
        )
        self.logprob_chunk = logprob_chunk

    def log_probs(
        self, batch: SequenceBatch, *, temperature: float, max_tokens: int, with_entropy: bool
    ) -> dict[str, Tensor]:
        """Log-probabilities of the response tokens, without gradient, on every rank of the replica.

        Args:
            temperature: divides the logits.
            max_tokens: tokens to put through the model at once.

        Returns:
            ``log_probs`` and, if asked, ``entropy`` (nats): float32 [tokens] on the CPU, aligned with the batch; 0 at
            tokens outside the response mask and at the first token of a sequence.
        """
        names = ["log_probs", "entropy"] if with_entropy else ["log_probs"]

        def score(hidden: Tensor, pack: Pack) -> tuple[Tensor, Tensor | None]:
            return self._score(hidden, pack, temperature, with_entropy, False)

        return self._evaluate(batch, names, max_tokens, score)

    def update(
        self,
        batch: SequenceBatch,
        micro_batches: Sequence[Sequence[int]],
        loss_fn: LossFn,
        *,
        temperature: float,
        with_entropy: bool = True,
        entropy_grad: bool = False,
    ) -> UpdateResult:
        """One optimizer update with this rank's share of a mini-batch.

        Args:
            batch: this rank's share.
            micro_batches: sequence numbers of each micro-batch; their number may differ between DP ranks.
            loss_fn: (micro-batch, log_probs [tokens], entropy [tokens] or None) -> (loss, sums). The loss must be
                divided by global denominators already: it is summed over micro-batches and DP ranks as it is.
                Log-probabilities are 0, without gradient, where `log_probs` says.
            with_entropy: hand the entropy to the loss function.
            entropy_grad: let the loss differentiate through the entropy, at some cost.

        Raises:
            ValueError: there is no micro-batch on this rank.
        """

        def loss(hidden: Tensor, pack: Pack) -> tuple[Tensor, dict[str, Tensor]]:
            log_probs, entropy = self._score(hidden, pack, temperature, with_entropy, entropy_grad)
            return loss_fn(pack.batch, log_probs, entropy)

        return self._train(batch, micro_batches, loss)

    def _score(
        self, hidden: Tensor, pack: Pack, temperature: float, with_entropy: bool, entropy_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Final hidden states -> log-probabilities and entropy, [tokens] each, zero where nothing is scored."""
        if self.sequence_parallel:
            # Each rank's gradient of the joined hidden states is whole already: the way back takes a slice, no sum.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        hidden = hidden.squeeze(1)
        tokens, weight = pack.batch.tokens, self.model.output_weight
        fast = self.device.backend != "eager"
        scored = vocab_parallel_log_probs(
            hidden.index_select(0, pack.rows - 1),  # the hidden state before a token predicts it
            weight,
            tokens.index_select(0, pack.rows),
            vocab=self.shape.vocab,
            temperature=temperature,
            chunk=self.logprob_chunk,
            tp_group=self.grid.tp,
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
            fused=fast,
            main_grad=getattr(weight, "main_grad", None) if fast else None,  # Megatron's, after `prepare_training`
        )
        log_probs, entropy = scored
        return pack.place(log_probs), None if entropy is None else pack.place(entropy)
