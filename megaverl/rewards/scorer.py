"""Scoring of responses in a worker: the registry or a custom function, with every result checked."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from megaverl.errors import RunError
from megaverl.rewards.custom import load_function
from megaverl.rewards.registry import ScoreFunction, compute_score


@dataclass(frozen=True)
class ScoreRequest:
    """One response to be judged.

    Attributes:
        data_source: picks the scorer.
        solution: the response's text without special tokens, whole.
        ground_truth: the right answer.
        extra_info: the row's own.
        key: the row's number, for messages.
    """

    data_source: str
    solution: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    key: int = -1


@dataclass(frozen=True)
class Score:
    """What a scorer said.

    Attributes:
        value: the reward, finite.
        extra: other entries of its result, for logs.
    """

    value: float
    extra: dict[str, Any] = field(default_factory=dict)


class Scorer:
    """Judges responses. Pickles as its two settings; the function is loaded where it is used.

    Args:
        path: file of a custom function (``reward.function.path``); None takes the registry by data source.
        name: name of the function in that file.
    """

    def __init__(self, path: str | None = None, name: str = "compute_score") -> None:
        self.path, self.name = path, name
        self._function: ScoreFunction | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "name": self.name, "_function": None}

    @property
    def custom(self) -> bool:
        """Whether a custom function is set, which takes every data source."""
        return self.path is not None

    def load(self) -> ScoreFunction:
        """Loads the function; called before a run starts, so that a bad one is refused early.

        Raises:
            UserError: the custom function cannot be used.
        """
        if self._function is None:
            self._function = load_function(self.path, self.name) if self.path is not None else compute_score
        return self._function

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Scores all responses, in order.

        Raises:
            RunError: a scorer raised, or its result is not a finite number or a dict with one under ``score``.
        """
        function = self.load()
        return [self._score(function, request) for request in requests]

    def _score(self, function: ScoreFunction, request: ScoreRequest) -> Score:
        where = f"scorer {self.path or 'of ' + request.data_source}, row {request.key}"
        try:
            result = function(
                data_source=request.data_source,
                solution_str=request.solution,
                ground_truth=request.ground_truth,
                extra_info=request.extra_info,
            )
        except Exception as error:  # a user's function may raise anything; the run ends and says where
            last = traceback.extract_tb(error.__traceback__)[-1]
            line = f"{last.filename}, line {last.lineno}, in {last.name}"
            raise RunError(f"{where}: {type(error).__name__}: {error}\n    -> raised at {line}") from error
        return checked_score(result, where)


def checked_score(result: Any, where: str) -> Score:
    """A scorer's result as a `Score`.

    Raises:
        RunError: it is neither a finite number nor a dict with one under ``score``.
    """
    extra: dict[str, Any] = {}
    value = result
    if isinstance(result, dict):
        if "score" not in result:
            raise RunError(f"{where}: the result has no entry 'score', only {', '.join(map(str, result)) or 'nothing'}")
        value = result["score"]
        extra = {key: entry for key, entry in result.items() if key != "score"}
    if not isinstance(value, Real) or not math.isfinite(value):
        raise RunError(f"{where}: the score must be a finite number, this is {value!r}")
    return Score(float(value), extra)
