"""The actor in a worker: this rank's share of the batch, its log-probabilities, its updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megaverl.algorithms.advantages import to_tokens
from megaverl.algorithms.losses import Denominators, LossFn
from megaverl.algorithms.registry import algorithm_for
from megaverl.algorithms.rewards import Moments, rollout_difference, sequence_kl
from megaverl.config.schema import Config
from megaverl.data.batch import SequenceBatch
from megaverl.data.packing import micro_batches
from megaverl.models.policy import PolicyModel

Gap = dict[str, Moments]
"""Moments of the difference between rollout and training log-probabilities; parts merge with ``+``."""


@dataclass(frozen=True)
class Update:
    """One optimizer update, as this rank sees it.

    Attributes:
        sequences: positions in this rank's batch.
        denominators: what the losses are divided by, over all ranks.
    """

    sequences: list[int]
    denominators: Denominators


@dataclass(frozen=True)
class UpdateReport:
    """What one update did.

    Attributes:
        sums: this rank's share; they add up over data parallel ranks.
        grad_norm: global gradient norm before clipping.
        lr: learning rate of the update.
        applied: False when the gradient was not finite and the weights were left alone.
        gaps: one per micro-batch, when the gap to the rollout is measured in this update.
    """

    sums: dict[str, float]
    grad_norm: float
    lr: float
    applied: bool
    gaps: list[Gap] = field(default_factory=list)


class ActorRole:
    """Holds the batch of the step; columns are added to it phase by phase."""

    def __init__(self, config: Config, policy: PolicyModel, reference: PolicyModel | None) -> None:
        self.config = config
        self.algorithm = algorithm_for(config)
        self.policy = policy
        self.reference = reference
        self.batch: SequenceBatch | None = None

    @property
    def temperature(self) -> float:
        """Temperature of the log-probabilities: the one that the responses were sampled at."""
        return 1.0 if self.algorithm.advantages is None else self.config.rollout.temperature

    def load(self, batch: SequenceBatch) -> None:
        """Takes this rank's share of the step's batch."""
        self.batch = batch

    def _loaded(self) -> SequenceBatch:
        if self.batch is None:
            raise RuntimeError("no batch was loaded in this step")
        return self.batch

    def old_log_probs(self) -> list[Gap]:
        """Adds the column ``old_log_probs``; returns how far the rollout's log-probabilities are from them."""
        batch = self._loaded()
        limit = self.config.actor.max_tokens_per_micro_batch
        found = self.policy.log_probs(batch, temperature=self.temperature, max_tokens=limit, with_entropy=False)
        batch.columns["old_log_probs"] = found["log_probs"]
        return [rollout_difference(batch.columns["rollout_log_probs"], found["log_probs"], batch.response_mask)]

    def reference_log_probs(self) -> Tensor | None:
        """Adds the column ``ref_log_probs``.

        Returns:
            [sequences], the KL penalty summed over each response, when ``algorithm.kl_in_reward``; else None.
        """
        batch = self._loaded()
        if self.reference is None:
            raise RuntimeError("the reference role is not hosted by this pool")
        limit = self.config.reference.max_tokens_per_micro_batch or self.config.actor.max_tokens_per_micro_batch
        found = self.reference.log_probs(batch, temperature=self.temperature, max_tokens=limit, with_entropy=False)
        batch.columns["ref_log_probs"] = found["log_probs"]
        if not self.config.algorithm.kl_in_reward:
            return None
        return sequence_kl(
            batch.columns["old_log_probs"],
            found["log_probs"],
            batch.response_mask,
            batch.cu_seqlens,
            self.config.algorithm.kl_estimator,
        )

    def set_advantages(self, advantages: Sequence[float]) -> None:
        """Gives every response token of sequence i the advantage ``advantages[i]``."""
        batch = self._loaded()
        values = torch.tensor(advantages, dtype=torch.float32)
        batch.columns["advantages"] = to_tokens(values, batch.cu_seqlens, batch.response_mask)

    def update(self, updates: Sequence[Update]) -> list[UpdateReport]:
        """Runs the updates in order; every rank of the pool runs the same number."""
        entropy = self.algorithm.advantages is not None
        reports = []
        for update in updates:
            share = self._loaded().select(update.sequences)
            gaps: list[Gap] = []
            result = self.policy.update(
                share,
                micro_batches(share.lengths.tolist(), self.config.actor.max_tokens_per_micro_batch),
                _measuring(self.algorithm.loss_fn(update.denominators), gaps),
                temperature=self.temperature,
                with_entropy=entropy,
                entropy_grad=entropy and self.config.actor.entropy_coef != 0,
            )
            sums = {name: float(value) for name, value in result.sums.items()}
            reports.append(UpdateReport(sums, float(result.grad_norm), float(result.lr), result.applied, gaps))
        return reports

    def clear(self) -> None:
        """Drops the batch at the end of a step."""
        self.batch = None


def _measuring(loss_fn: LossFn, gaps: list[Gap]) -> LossFn:
    """``loss_fn`` that also measures the gap to the rollout where no separate pass has done so."""

    def measured(micro: SequenceBatch, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        if "rollout_log_probs" in micro.columns and "old_log_probs" not in micro.columns:
            gaps.append(rollout_difference(micro.columns["rollout_log_probs"], log_probs, micro.response_mask))
        return loss_fn(micro, log_probs, entropy)

    return measured
