"""What the driver asks of a role's optimizer updates, and what a rank reports of each."""

from __future__ import annotations

from dataclasses import dataclass, field

from megaverl.algorithms.losses import Denominators
from megaverl.algorithms.moments import Moments
from megaverl.models.packed_model import UpdateResult

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

    @classmethod
    def of(cls, result: UpdateResult, gaps: list[Gap]) -> UpdateReport:
        """In plain numbers, which cross the process border."""
        sums = {name: float(value) for name, value in result.sums.items()}
        return cls(sums, float(result.grad_norm), float(result.lr), result.applied, gaps)
