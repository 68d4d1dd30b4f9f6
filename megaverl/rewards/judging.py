"""How a process of the pool calls a scorer: one response at a time, many awaited together, or many in one call.

Whatever the scorer does becomes a `Score` for each response: one that fails scores 0 and says why.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Sequence
from typing import Literal

from megaverl.errors import RunError
from megaverl.rewards.registry import ScoreFunction
from megaverl.rewards.scorer import Score, ScoreRequest, arguments, call_function, checked_score, raised

Way = Literal["single", "together", "batch"]


def way_of(function: ScoreFunction, batch: bool) -> Way:
    """``batch`` takes lists, ``together`` is asynchronous, ``single`` anything else."""
    if batch:
        return "batch"
    plain = function.func if isinstance(function, functools.partial) else function
    if inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(type(plain).__call__):
        return "together"
    return "single"


def judge(
    function: ScoreFunction, way: Way, requests: Sequence[ScoreRequest], names: Sequence[str], timeout: float
) -> list[Score]:
    """The scores of the responses, in order.

    Args:
        names: the scorer's name for each response, for messages.
        timeout: seconds for each response where many are awaited together; the pool watches over the rest.
    """
    places = [f"scorer {name}, row {request.key}" for name, request in zip(names, requests, strict=True)]
    if way == "batch":
        return _batch(function, requests, places)
    if way == "together":
        return asyncio.run(_together(function, requests, places, timeout))
    return [_guarded(function, request, name) for request, name in zip(requests, names, strict=True)]


def _guarded(function: ScoreFunction, request: ScoreRequest, name: str) -> Score:
    try:
        return call_function(function, request, name)
    except RunError as error:
        return Score(0.0, {}, "error", str(error))


async def _together(
    function: ScoreFunction, requests: Sequence[ScoreRequest], places: Sequence[str], timeout: float
) -> list[Score]:
    async def one(request: ScoreRequest, where: str) -> Score:
        try:
            async with asyncio.timeout(timeout) as limit:
                result = await function(**arguments(request))
            return checked_score(result, where)
        except RunError as error:
            return Score(0.0, {}, "error", str(error))
        except TimeoutError as error:
            if not limit.expired():  # the function's own
                return Score(0.0, {}, "error", str(raised(error, where)))
            return Score(0.0, {}, "timeout", too_late(where, timeout))
        except Exception as error:  # a user's function may raise anything; it is reported with its place
            return Score(0.0, {}, "error", str(raised(error, where)))

    return list(await asyncio.gather(*(one(r, p) for r, p in zip(requests, places, strict=True))))


def _batch(function: ScoreFunction, requests: Sequence[ScoreRequest], places: Sequence[str]) -> list[Score]:
    try:
        results = function(
            data_sources=[r.data_source for r in requests],
            solution_strs=[r.solution for r in requests],
            ground_truths=[r.ground_truth for r in requests],
            extra_infos=[r.extra_info for r in requests],
        )
        if inspect.isawaitable(results):
            results = asyncio.run(_awaited(results))
        results = list(results)
        if len(results) != len(requests):
            raise ValueError(f"{len(results)} scores came back for {len(requests)} responses")
    except Exception as error:  # a user's function may raise anything; it is reported with its place
        return [Score(0.0, {}, "error", str(raised(error, where))) for where in places]
    scores = []
    for result, where in zip(results, places, strict=True):
        try:
            scores.append(checked_score(result, where))
        except RunError as error:
            scores.append(Score(0.0, {}, "error", str(error)))
    return scores


async def _awaited(results):
    return await results


def too_late(where: str, timeout: float) -> str:
    """The message of a score that did not come in time."""
    return f"{where}: no score in {timeout:g} s (reward.timeout)"
