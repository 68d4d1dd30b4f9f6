"""Moments of values that are spread over micro-batches and ranks; parts merge exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Count, mean, sum of squared deviations, largest and smallest of some values; parts merge exactly with ``+``.

    Merging is Chan, Golub and LeVeque's (1979), so it does not cancel where the mean is large against the spread.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    largest: float = -math.inf
    smallest: float = math.inf

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        """Of all elements of a tensor, in float64."""
        if values.numel() == 0:
            return cls()
        values = values.detach().double()
        mean = values.mean()
        squares = (values - mean).square().sum().item()
        return cls(values.numel(), mean.item(), squares, values.max().item(), values.min().item())

    def __add__(self, other: Moments) -> Moments:
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        step = other.mean - self.mean
        return Moments(
            count,
            self.mean + step * other.count / count,
            self.squares + other.squares + step * step * self.count * other.count / count,
            max(self.largest, other.largest),
            min(self.smallest, other.smallest),
        )

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 for fewer than two values."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0


def merge_moments(parts: Sequence[Mapping[str, Moments]]) -> dict[str, Moments]:
    """The moments of all parts together, by name; nothing for no parts."""
    return {name: sum((part[name] for part in parts), Moments()) for name in parts[0]} if parts else {}
