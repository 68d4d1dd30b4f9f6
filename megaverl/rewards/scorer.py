"""Scoring of responses in a worker: the registry or a custom function, with every result checked."""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from megaverl.errors import RunError
from megaverl.rewards.custom import load_function
from megaverl.rewards.registry import ScoreFunction, compute_score

if TYPE_CHECKING:
    from megaverl.rewards.pool import ScorerPool


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
        extra: other entries of its result, for logs: numbers as they are, anything else as text.
        failure: ``error`` or ``timeout`` where the function gave no score (the value is 0 then), else None.
        reason: what went wrong, and where.
    """

    value: float
    extra: dict[str, Any] = field(default_factory=dict)
    failure: Literal["error", "timeout"] | None = None
    reason: str = ""


class Scorer:
    """Judges responses. Pickles as its settings; function and processes live where it is used.

    The scorers of the registry are arithmetic on short texts and run in this process, where a process pool would cost
    more than they do. A custom function may do anything, so it runs in processes of its own (`ScorerPool`).

    Args:
        path: file of a custom function (``reward.function.path``); None takes the registry by data source.
        name: name of the function in that file.
        workers: processes for a custom function.
        timeout: seconds that a custom function has for one response.
    """

    def __init__(
        self, path: str | None = None, name: str = "compute_score", workers: int = 2, timeout: float = 30.0
    ) -> None:
        self.path, self.name, self.workers, self.timeout = path, name, workers, timeout
        self._pool: ScorerPool | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}

    @property
    def custom(self) -> bool:
        """Whether a custom function is set, which takes every data source."""
        return self.path is not None

    def load(self) -> ScoreFunction:
        """Loads the function; called before a run starts, so that a bad one is refused early.

        Raises:
            UserError: the custom function cannot be used.
        """
        return load_function(self.path, self.name) if self.path is not None else compute_score

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Scores all responses, in order.

        A custom function that raises, takes too long, ends its process or gives no finite number scores 0, and the
        score says so.

        Raises:
            RunError: a scorer of the registry raised, or the custom function cannot be loaded.
        """
        if self.path is None:
            return [call_function(compute_score, request, f"of {request.data_source}") for request in requests]
        if self._pool is None:
            from megaverl.rewards.pool import ScorerPool

            self._pool = ScorerPool(self.path, self.name, self.workers, self.timeout)
        return self._pool.score(requests)

    def close(self) -> None:
        """Ends the processes of a custom function."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def call_function(function: ScoreFunction, request: ScoreRequest, name: str) -> Score:
    """The score of one response; an asynchronous function is run to its end.

    Args:
        name: the scorer's, for messages.

    Raises:
        RunError: the function raised, or its result is not a finite number or a dict with one under ``score``.
    """
    where = f"scorer {name}, row {request.key}"
    try:
        result = function(
            data_source=request.data_source,
            solution_str=request.solution,
            ground_truth=request.ground_truth,
            extra_info=request.extra_info,
        )
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
    except Exception as error:  # a user's function may raise anything; it is reported with its place
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
        extra = {str(key): _plain(entry) for key, entry in result.items() if key != "score"}
    if not isinstance(value, Real) or not math.isfinite(value):
        raise RunError(f"{where}: the score must be a finite number, this is {value!r}")
    return Score(float(value), extra)


def _plain(entry: Any) -> Any:
    """Numbers as Python's own, anything else as text: what can be logged and sent between processes."""
    if entry is None or isinstance(entry, bool | int | str):
        return entry
    return float(entry) if isinstance(entry, Real) else str(entry)
