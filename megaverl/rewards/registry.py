"""Data source -> scorer. What is not listed here needs a custom reward function."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megaverl.errors import Problem, UserError
from megaverl.rewards import gsm8k

ScoreFunction = Callable[..., float | dict[str, Any]]


@dataclass(frozen=True)
class Scoring:
    """How the responses of one data source are judged.

    Attributes:
        compute: ``compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict``.
        check: what is wrong with a ground truth, or None; asked for every row before a run starts.
    """

    compute: ScoreFunction
    check: Callable[[Any], str | None]


_GSM8K = Scoring(gsm8k.compute_score, gsm8k.check_ground_truth)
SCORINGS: Mapping[str, Scoring] = {"openai/gsm8k": _GSM8K, "megaverl/arithmetic": _GSM8K}


def known_sources() -> tuple[str, ...]:
    """The data sources that have a scorer, sorted."""
    return tuple(sorted(SCORINGS))


def ground_truth_checks() -> dict[str, Callable[[Any], str | None]]:
    """Data source -> check of its ground truth."""
    return {source: scoring.check for source, scoring in SCORINGS.items()}


def find_scoring(data_source: str) -> Scoring:
    """The scoring of a data source.

    Raises:
        UserError: there is none; lists the known ones.
    """
    if data_source in SCORINGS:
        return SCORINGS[data_source]
    close = difflib.get_close_matches(str(data_source), known_sources(), n=1, cutoff=0.5)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    fix = f"Known are {', '.join(known_sources())}.{guess} For others set reward.function.path."
    raise UserError(Problem(f"no scorer for data source {data_source!r}", "key data_source", fix))


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float | dict[str, Any]:
    """Scores one response by its data source.

    Raises:
        UserError: no scorer for the data source.
    """
    return find_scoring(data_source).compute(data_source, solution_str, ground_truth, extra_info)
