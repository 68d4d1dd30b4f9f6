"""The critic on this rank: Megatron's body with a value head in place of the output layer.

The value at index t of a batch is that of the state *before* token t was emitted: the head reads the hidden state of
token t - 1, the one that also gives token t its log-probability. So values, log-probabilities and rewards of a token
stand at the same index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaverl.data.batch import SequenceBatch
from megaverl.models.gpt import PackedGPTModel
from megaverl.models.packed import PackLayout
from megaverl.models.packed_model import Pack, PackedModel, UpdateResult
from megaverl.models.shape import ModelShape
from megaverl.parallel.compat_megatron import TransformerConfig, gather_from_sequence_parallel_region

ValueLossFn = Callable[[SequenceBatch, Tensor], tuple[Tensor, dict[str, Tensor]]]


class ValueHead(nn.Module):
    """A linear layer from hidden states to one number, in float32 whatever the body's type; replicated over TP.

    Its gradient is the same on all TP ranks. With sequence parallelism each rank sees other tokens, so the parameters
    are marked for Megatron to sum it, as the norms' are.
    """

    def __init__(self, config: TransformerConfig, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(1)) if bias else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> float32 [..., 1]."""
        return F.linear(hidden.float(), self.weight, self.bias)


class PackedValueModel(PackedGPTModel):
    """A decoder that maps packed tokens to values; the last pipeline stage has the head.

    There is no output layer, so an embedding that a language model ties to it is on the first stage alone.
    """

    HEAD_BIAS = True

    def __init__(
        self,
        shape: ModelShape,
        config: TransformerConfig,
        *,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None = None,
    ) -> None:
        untied = replace(shape, tied=False)  # else Megatron would look for the embedding on the last stage
        super().__init__(untied, config, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
        if post_process:
            del self.output_layer
            self.value_head = ValueHead(config, self.HEAD_BIAS)

    def forward(self, tokens: Tensor, layout: PackLayout) -> Tensor:
        """[1, tokens] -> float32 [tokens, 1, 1] on the last stage (this rank's part with sequence parallelism)."""
        hidden = super().forward(tokens, layout)
        return self.value_head(hidden) if self.post_process else hidden


class CriticModel(PackedModel):
    """This rank's part of a critic. All ranks call every method alike."""

    MODEL = PackedValueModel

    def values(self, batch: SequenceBatch, *, max_tokens: int) -> Tensor:
        """Values of the states before the response tokens, without gradient, on every rank of the replica.

        Args:
            max_tokens: tokens to put through the model at once.

        Returns:
            float32 [tokens] on the CPU, aligned with the batch; 0 at tokens outside the response mask and at the first
            token of a sequence.
        """
        return self._evaluate(batch, ["values"], max_tokens, lambda output, pack: (self._values(output, pack),))[
            "values"
        ]

    def update(
        self, batch: SequenceBatch, micro_batches: Sequence[Sequence[int]], loss_fn: ValueLossFn
    ) -> UpdateResult:
        """One optimizer update with this rank's share of a mini-batch.

        Args:
            batch: this rank's share.
            micro_batches: sequence numbers of each micro-batch; their number may differ between DP ranks when pp is 1.
            loss_fn: (micro-batch, values [tokens]) -> (loss, sums). The loss must be divided by global denominators
                already: it is summed over micro-batches and DP ranks as it is.

        Raises:
            ValueError: there is no micro-batch on this rank.
        """
        return self._train(batch, micro_batches, lambda output, pack: loss_fn(pack.batch, self._values(output, pack)))

    def _values(self, output: Tensor, pack: Pack) -> Tensor:
        """The model's output -> [tokens], zero where there is no value."""
        if self.sequence_parallel:
            # Each rank's gradient of the joined values is whole already: the way back takes a slice, no sum.
            output = gather_from_sequence_parallel_region(output, tensor_parallel_output_grad=False)
        return pack.place(output.flatten().index_select(0, pack.rows - 1))
