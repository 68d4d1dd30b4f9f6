"""The reward model in a worker: one score for each response, by frozen weights."""

from __future__ import annotations

from megaverl.config.schema import Config
from megaverl.data.batch import SequenceBatch
from megaverl.models.reward_model import RewardModel


class RewardModelRole:
    """A frozen reward model. With ``reward.model.offload`` its weights are on the GPU only while it scores.

    They never change, so leaving the GPU costs nothing after the first time. On a CPU there is nowhere to move them.
    """

    def __init__(self, config: Config, model: RewardModel) -> None:
        self.config = config
        self.model = model
        self._rest()

    def scores(self, batch: SequenceBatch) -> list[float]:
        """[sequences], read at the last token of each, its end token where it has one."""
        limit = self.config.reward.model.max_tokens_per_micro_batch or self.config.actor.max_tokens_per_micro_batch
        found = self.model.scores(batch, max_tokens=limit).tolist()
        self._rest()
        return found

    def _rest(self) -> None:
        if self.config.reward.model.offload:  # a pass brings the weights back by itself
            self.model.release_for_rollout(optimizer=False, gradients=False, parameters=True)
