"""The trained model of preference training in a worker: a reward model, or a policy next to its reference."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megaverl.algorithms.losses import TOKENS
from megaverl.algorithms.preference import BASELINE, PREFERRED, PreferenceCounts, log_ratios, of_pairs, pair_metrics
from megaverl.algorithms.registry import algorithm_for
from megaverl.config.derived import micro_batch_tokens
from megaverl.config.schema import Config
from megaverl.data.batch import UNIT, SequenceBatch
from megaverl.data.packing import unit_micro_batches
from megaverl.models.policy import PolicyModel
from megaverl.models.reward_model import RewardModel
from megaverl.workers.update import Update, UpdateReport


class PreferenceRole:
    """Trains on this rank's share of the answers of a step, and measures how a model ranks pairs."""

    def __init__(self, config: Config, policy: PolicyModel | RewardModel) -> None:
        self.config = config
        self.algorithm = algorithm_for(config)
        self.policy = policy
        self.max_tokens = micro_batch_tokens(config, "actor")

    def update(self, batch: SequenceBatch, updates: Sequence[Update]) -> list[UpdateReport]:
        """Runs the updates in order; every rank of the pool runs the same number."""
        reports = []
        for update in updates:
            share = batch.select(update.sequences)
            cut = unit_micro_batches(share.lengths.tolist(), share.per_sequence[UNIT].tolist(), self.max_tokens)
            loss_fn = self.algorithm.loss_fn(update.denominators)
            if isinstance(self.policy, RewardModel):
                result = self.policy.update(share, cut, loss_fn)
            else:
                result = self.policy.update(share, cut, loss_fn, temperature=1.0, with_entropy=False)
            reports.append(UpdateReport.of(result, []))
        return reports

    def baseline_ratios(self, batch: SequenceBatch) -> list[float]:
        """Log-ratios of policy and reference for the answers that stand under another prompt (KTO)."""
        others = batch.select((batch.per_sequence[PREFERRED] == BASELINE).nonzero().flatten().tolist())
        return log_ratios(others, self._log_probs(others)).tolist()

    def measure(self, batch: SequenceBatch, counts: PreferenceCounts) -> dict[str, float]:
        """This rank's share of the metrics of held-out pairs, without gradient."""
        if isinstance(self.policy, RewardModel):
            rewards = self.policy.scores(batch, max_tokens=self.max_tokens).double()
        else:
            rewards = self.config.algorithm.preference.beta * log_ratios(batch, self._log_probs(batch))
        found = pair_metrics(*of_pairs(batch, rewards), counts)
        return {TOKENS: float(batch.response_mask.sum())} | {name: float(value) for name, value in found.items()}

    def _log_probs(self, batch: SequenceBatch) -> Tensor:
        return self.policy.log_probs(batch, temperature=1.0, max_tokens=self.max_tokens, with_entropy=False)[
            "log_probs"
        ]
