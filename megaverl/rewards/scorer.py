"""Scoring of responses in a worker: the registry or a custom function, with every result checked."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from megaverl.errors import RunError
from megaverl.rewards.custom import CustomFunction
from megaverl.rewards.registry import Registry, ScoreFunction

if TYPE_CHECKING:
    from megaverl.config.schema import RewardConfig
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

    Most scorers of the registry are arithmetic on short texts and run in this process, where a process pool would cost
    more than they do. A custom function may do anything, and comparing formulas may take for ever, so they run in
    processes of their own (`ScorerPool`).

    Args:
        function: a custom function, which takes every data source; None takes the registry by data source.
        registry: the scorers by data source.
        workers: processes of the pool.
        timeout: seconds that a scorer in the pool has for one response.
    """

    def __init__(
        self,
        function: CustomFunction | None = None,
        registry: Registry | None = None,
        *,
        workers: int = 2,
        timeout: float = 30.0,
    ) -> None:
        self.function, self.registry = function, registry or Registry()
        self.workers, self.timeout = workers, timeout
        self._pool: ScorerPool | None = None

    @classmethod
    def of(cls, config: RewardConfig) -> Scorer:
        """The scorer of a configuration.

        Raises:
            UserError: rules of ``reward.sources`` that cannot be read.
        """
        custom = config.function
        function = None
        if custom.path is not None:
            function = CustomFunction(custom.path, custom.name, tuple(custom.arguments), custom.batch)
        return cls(function, Registry.of(config), workers=config.workers, timeout=config.timeout)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}

    def load(self) -> ScoreFunction:
        """Loads the function; called before a run starts, so that a bad one is refused early.

        Raises:
            UserError: the custom function cannot be used.
        """
        return (self.function or self.registry).load()

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Scores all responses, in order.

        A scorer in the pool that raises, takes too long, ends its process or gives no finite number scores 0, and the
        score says so.

        Raises:
            RunError: a scorer in this process raised, or the custom function cannot be loaded.
        """
        if self.function is not None:
            return self._apart(requests)
        apart = [i for i, r in enumerate(requests) if self.registry.find(r.data_source).isolated]
        scores: dict[int, Score] = dict(zip(apart, self._apart([requests[i] for i in apart]), strict=True))
        for i, request in enumerate(requests):
            if i not in scores:
                name = self.registry.label(request.data_source)
                scores[i] = call_function(self.registry.compute_score, request, name)
        return [scores[i] for i in range(len(requests))]

    def close(self) -> None:
        """Ends the processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _apart(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        if not requests:
            return []
        if self._pool is None:
            from megaverl.rewards.pool import ScorerPool

            self._pool = ScorerPool(self.function or self.registry, self.workers, self.timeout)
        return self._pool.score(requests)


def call_function(function: ScoreFunction, request: ScoreRequest, name: str) -> Score:
    """The score of one response.

    Args:
        name: the scorer's, for messages.

    Raises:
        RunError: the function raised, or its result is not a finite number or a dict with one under ``score``.
    """
    where = f"scorer {name}, row {request.key}"
    try:
        result = function(**arguments(request))
    except Exception as error:  # a user's function may raise anything; it is reported with its place
        raise raised(error, where) from error
    return checked_score(result, where)


def arguments(request: ScoreRequest) -> dict[str, Any]:
    """What a scorer of single responses is called with."""
    return {
        "data_source": request.data_source,
        "solution_str": request.solution,
        "ground_truth": request.ground_truth,
        "extra_info": request.extra_info,
    }


def raised(error: BaseException, where: str) -> RunError:
    """What a scorer raised, with the line that did."""
    frames = traceback.extract_tb(error.__traceback__)
    line = f"{frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name}" if frames else "an unknown line"
    return RunError(f"{where}: {type(error).__name__}: {error}\n    -> raised at {line}")


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
