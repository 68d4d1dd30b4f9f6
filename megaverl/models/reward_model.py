"""A reward model on this rank: Megatron's body with a score head, read at the last token of each sequence.

It is what transformers calls a sequence classification with one label: the head has no bias. The score of a sequence
stands for the whole of it, so there is one number per sequence and none per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from megaverl.data.batch import SequenceBatch
from megaverl.models.critic import PackedValueModel
from megaverl.models.packed_model import Pack, PackedModel, UpdateResult
from megaverl.parallel.compat_megatron import gather_from_sequence_parallel_region

ScoreLossFn = Callable[[SequenceBatch, Tensor], tuple[Tensor, dict[str, Tensor]]]


class PackedScoreModel(PackedValueModel):
    """A decoder that maps packed tokens to scores; the last pipeline stage has the head."""

    HEAD_BIAS = False


class RewardModel(PackedModel):
    """This rank's part of a reward model. All ranks call every method alike."""

    MODEL = PackedScoreModel

    def scores(self, batch: SequenceBatch, *, max_tokens: int) -> Tensor:
        """Scores of whole sequences, without gradient, on every rank of the replica.

        Args:
            max_tokens: tokens to put through the model at once.

        Returns:
            float32 [sequences] on the CPU.
        """

        def score(output: Tensor, pack: Pack) -> tuple[Tensor]:
            scores = self._scores(output, pack)
            return (scores.new_zeros(pack.batch.tokens.numel()).index_copy(0, _last_tokens(pack.batch), scores),)

        return self._evaluate(batch, ["scores"], max_tokens, score)["scores"][_last_tokens(batch)]

    def update(
        self, batch: SequenceBatch, micro_batches: Sequence[Sequence[int]], loss_fn: ScoreLossFn
    ) -> UpdateResult:
        """One optimizer update with this rank's share of a mini-batch.

        Args:
            batch: this rank's share.
            micro_batches: sequence numbers of each micro-batch; their number may differ between DP ranks when pp is 1.
            loss_fn: (micro-batch, scores [sequences]) -> (loss, sums). The loss must be divided by global denominators
                already: it is summed over micro-batches and DP ranks as it is.

        Raises:
            ValueError: there is no micro-batch on this rank.
        """
        return self._train(batch, micro_batches, lambda output, pack: loss_fn(pack.batch, self._scores(output, pack)))

    def _scores(self, output: Tensor, pack: Pack) -> Tensor:
        """The model's output -> [sequences]."""
        if self.sequence_parallel:
            # Each rank's gradient of the joined scores is whole already: the way back takes a slice, no sum.
            output = gather_from_sequence_parallel_region(output, tensor_parallel_output_grad=False)
        return output.flatten().index_select(0, _last_tokens(pack.batch))


def _last_tokens(batch: SequenceBatch) -> Tensor:
    """int64 [sequences], where each sequence ends."""
    return batch.cu_seqlens[1:].long() - 1
