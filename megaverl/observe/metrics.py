"""Metric dictionaries: flattening, reducing over workers or micro-batches, finding numbers that are none. Pure.

Names are verl's. What the reduction of a name is, its last part says: ``critic/score/max`` is a maximum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Metrics = dict[str, float]
MACHINE = ("timing_s/", "perf/", "memory/", "handoff/seconds")
"""How the names of metrics begin that the clock and the machine decide; all others repeat with the seed."""


def repeatable(metrics: Mapping[str, float]) -> Metrics:
    """The metrics that the same run gives again, bit for bit on one machine."""
    return {name: value for name, value in metrics.items() if not name.startswith(MACHINE)}


def flatten(nested: Mapping[str, Any], separator: str = "/") -> Metrics:
    """Nested dictionaries as one, names joined: ``{"actor": {"lr": 1}}`` -> ``{"actor/lr": 1}``.

    Scalars of numpy and torch become Python numbers.

    Raises:
        ValueError: two paths give the same name.
    """
    flat: Metrics = {}
    for name, value in nested.items():
        items = flatten(value, separator) if isinstance(value, Mapping) else {"": number(value)}
        for rest, item in items.items():
            joined = f"{name}{separator}{rest}" if rest else str(name)
            if joined in flat:
                raise ValueError(f"two metrics are named {joined}")
            flat[joined] = item
    return flat


def number(value: Any) -> float:
    """A Python int or float from a Python, numpy or torch scalar.

    Raises:
        TypeError: the value is no single number.
    """
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, (int, float)):
        raise TypeError(f"a metric must be a number, got {type(value).__name__} {value!r}")
    return value


def reduce_metrics(parts: Sequence[Mapping[str, float]], weights: Sequence[float] | None = None) -> Metrics:
    """One dictionary from several (micro-batches, workers); a name may be missing in some.

    Names that end in ``max`` or ``min`` (after a slash or an underscore) take the largest or smallest, ``sum`` the
    sum, all others the mean, weighted by ``weights`` [parts] (such as tokens) when given.

    Raises:
        ValueError: the number of weights is not the number of parts, or the weights of a name sum to 0.
    """
    if weights is None:
        weights = [1.0] * len(parts)
    if len(weights) != len(parts):
        raise ValueError(f"{len(weights)} weights for {len(parts)} metric dictionaries")
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _reduce(name, [(part[name], w) for part, w in zip(parts, weights) if name in part]) for name in names}


def _reduce(name: str, values: list[tuple[float, float]]) -> float:
    numbers = [value for value, _ in values]
    kind = name.replace("_", "/").rsplit("/", 1)[-1]
    if kind == "max":
        return max(numbers)
    if kind == "min":
        return min(numbers)
    if kind == "sum":
        return math.fsum(numbers)
    total = math.fsum(weight for _, weight in values)
    if total == 0:
        raise ValueError(f"the weights of {name} sum to 0")
    return math.fsum(value * weight for value, weight in values) / total


def spread(prefix: str, values: Iterable[float]) -> Metrics:
    """``prefix/mean``, ``prefix/max`` and ``prefix/min``; nothing for no values."""
    values = [float(value) for value in values]
    if not values:
        return {}
    return {
        f"{prefix}/mean": math.fsum(values) / len(values),
        f"{prefix}/max": max(values),
        f"{prefix}/min": min(values),
    }


def non_finite(metrics: Mapping[str, float]) -> list[str]:
    """Names of the metrics that are nan or infinite."""
    return [name for name, value in metrics.items() if not math.isfinite(value)]


def first_of(metrics: Mapping[str, float], names: Iterable[str]) -> float | None:
    """The value of the first of ``names`` that there is."""
    for name in names:
        if name in metrics:
            return metrics[name]
    return None
