"""The actor in a worker: log-probabilities of this rank's share of the batch, and its updates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megaverl.algorithms.advantages import to_tokens
from megaverl.algorithms.gae import whiten
from megaverl.algorithms.kl import kl_penalty
from megaverl.algorithms.losses import LossFn
from megaverl.algorithms.moments import Moments
from megaverl.algorithms.registry import algorithm_for
from megaverl.algorithms.returns import return_advantages
from megaverl.algorithms.rollout_correction import mismatch_moments
from megaverl.algorithms.value_loss import ADVANTAGES, RETURNS
from megaverl.config.derived import micro_batch_tokens
from megaverl.config.schema import Config
from megaverl.data.batch import SequenceBatch
from megaverl.data.packing import micro_batches
from megaverl.models.policy import PolicyModel
from megaverl.workers.update import Gap, Update, UpdateReport


class ActorRole:
    """Adds columns to the batch of the step, phase by phase, and trains on it."""

    def __init__(self, config: Config, policy: PolicyModel) -> None:
        self.config = config
        self.algorithm = algorithm_for(config)
        self.policy = policy
        self.max_tokens = micro_batch_tokens(config, "actor")

    @property
    def temperature(self) -> float:
        """Temperature of the log-probabilities: the one that the responses were sampled at."""
        return 1.0 if self.algorithm.supervised else self.config.rollout.temperature

    def old_log_probs(self, batch: SequenceBatch) -> list[Gap]:
        """Adds the column ``old_log_probs``; returns how far the rollout's log-probabilities are from them."""
        found = self.policy.log_probs(
            batch, temperature=self.temperature, max_tokens=self.max_tokens, with_entropy=False
        )
        batch.columns["old_log_probs"] = found["log_probs"]
        return [self._gap(batch, found["log_probs"])]

    def set_advantages(self, batch: SequenceBatch, advantages: Sequence[float]) -> None:
        """Gives every response token of sequence i the advantage ``advantages[i]``, as the column ``advantages``."""
        values = torch.tensor(advantages, dtype=torch.float32)
        batch.columns["advantages"] = to_tokens(values, batch.cu_seqlens, batch.response_mask)

    def estimate_returns(
        self, batch: SequenceBatch, scores: Sequence[float], baselines: Sequence[float] | None, kl_coef: float
    ) -> dict[str, Moments]:
        """Adds the column ``advantages``: of each token the reward still to come, less the response's baseline.

        Args:
            scores: [sequences].
            baselines: [sequences]; None for none.
            kl_coef: weight of the KL penalty now.

        Returns:
            Moments of advantages and returns over this rank's response tokens.
        """
        settings, mask, columns = self.config.algorithm, batch.response_mask, batch.columns
        kl = None
        if settings.kl_in_reward:
            kl = kl_penalty(columns["old_log_probs"].double(), columns["ref_log_probs"].double(), settings.kl_estimator)
        advantages, returns = return_advantages(
            torch.tensor(scores, dtype=torch.float64),
            mask,
            batch.cu_seqlens,
            gamma=settings.gamma,
            kl=kl,
            kl_coef=kl_coef,
            baselines=None if baselines is None else torch.tensor(baselines, dtype=torch.float64),
        )
        columns["advantages"] = advantages.float()
        return {ADVANTAGES: Moments.of(advantages[mask]), RETURNS: Moments.of(returns[mask])}

    def whiten_advantages(self, batch: SequenceBatch, moments: Moments) -> None:
        """Whitens the column ``advantages`` by the moments of all ranks together."""
        batch.columns["advantages"] = whiten(batch.columns["advantages"], batch.response_mask, moments)

    def update(self, batch: SequenceBatch, updates: Sequence[Update]) -> list[UpdateReport]:
        """Runs the updates in order; every rank of the pool runs the same number."""
        entropy = not self.algorithm.supervised
        reports = []
        for update in updates:
            share = batch.select(update.sequences)
            gaps: list[Gap] = []
            result = self.policy.update(
                share,
                micro_batches(share.lengths.tolist(), self.max_tokens),
                self._measuring(self.algorithm.loss_fn(update.denominators), gaps),
                temperature=self.temperature,
                with_entropy=entropy,
                entropy_grad=entropy and self.config.actor.entropy_coef != 0,
            )
            reports.append(UpdateReport.of(result, gaps))
        return reports

    def _measuring(self, loss_fn: LossFn, gaps: list[Gap]) -> LossFn:
        """``loss_fn`` that also measures the gap to the rollout where no separate pass has done so."""

        def measured(
            micro: SequenceBatch, log_probs: Tensor, entropy: Tensor | None
        ) -> tuple[Tensor, dict[str, Tensor]]:
            if "rollout_log_probs" in micro.columns and "old_log_probs" not in micro.columns:
                gaps.append(self._gap(micro, log_probs))
            return loss_fn(micro, log_probs, entropy)

        return measured

    def _gap(self, batch: SequenceBatch, log_probs: Tensor) -> Gap:
        """How far the rollout's log-probabilities are from these."""
        return mismatch_moments(
            self.config.actor.rollout_correction,
            batch.columns["rollout_log_probs"],
            log_probs,
            batch.response_mask,
            batch.cu_seqlens,
        )
