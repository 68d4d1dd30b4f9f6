"""The critic in a worker: values of this rank's share of the batch, advantages from them, its updates."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megaverl.algorithms.gae import gae, token_rewards
from megaverl.algorithms.kl import kl_penalty
from megaverl.algorithms.moments import Moments
from megaverl.algorithms.registry import algorithm_for
from megaverl.algorithms.value_loss import value_moments
from megaverl.config.derived import micro_batch_tokens
from megaverl.config.schema import Config
from megaverl.data.batch import SequenceBatch
from megaverl.data.packing import micro_batches
from megaverl.models.critic import CriticModel
from megaverl.workers.update import Update, UpdateReport


class CriticRole:
    """Adds columns to the batch of the step, phase by phase, and trains on it."""

    def __init__(self, config: Config, critic: CriticModel) -> None:
        loss_fn = algorithm_for(config).critic_loss_fn
        if loss_fn is None:
            raise ValueError(f"algorithm {config.algorithm.name} has no critic")
        self.config = config
        self.critic = critic
        self.loss_fn = loss_fn
        self.max_tokens = micro_batch_tokens(config, "critic")

    def values(self, batch: SequenceBatch) -> None:
        """Adds the column ``values``: of the state before each response token."""
        batch.columns["values"] = self.critic.values(batch, max_tokens=self.max_tokens)

    def estimate_advantages(self, batch: SequenceBatch, scores: Sequence[float], kl_coef: float) -> dict[str, Moments]:
        """Adds the columns ``advantages`` (not whitened) and ``returns``, from values, scores and the KL penalty.

        Args:
            scores: [sequences], of the responses.
            kl_coef: weight of the KL penalty now.

        Returns:
            Moments over this rank's response tokens, see `value_loss.value_moments`.
        """
        settings, mask, columns = self.config.algorithm, batch.response_mask, batch.columns
        kl = None
        if settings.kl_in_reward:
            kl = kl_penalty(columns["old_log_probs"].double(), columns["ref_log_probs"].double(), settings.kl_estimator)
        rewards = token_rewards(
            torch.tensor(scores, dtype=torch.float64), mask, batch.cu_seqlens, kl=kl, kl_coef=kl_coef
        )
        advantages, returns = gae(
            columns["values"], rewards, mask, batch.cu_seqlens, gamma=settings.gamma, lam=settings.lam
        )
        columns["advantages"], columns["returns"] = advantages.float(), returns.float()
        return value_moments(advantages, returns, columns["values"], mask)

    def update(self, batch: SequenceBatch, updates: Sequence[Update]) -> list[UpdateReport]:
        """Runs the updates in order; every rank of the pool runs the same number."""
        reports = []
        for update in updates:
            share = batch.select(update.sequences)
            result = self.critic.update(
                share, micro_batches(share.lengths.tolist(), self.max_tokens), self.loss_fn(update.denominators)
            )
            reports.append(UpdateReport.of(result, []))
        return reports
