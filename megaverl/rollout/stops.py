"""Texts that end a response. Engines work on ids alone, so a response is cut after it was generated. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from megaverl.rollout.engine import Completion


def cut_at_stop(completion: Completion, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> Completion:
    """The response up to and with the token that completes the first of ``stops`` in its text.

    Every token draws from its own place of the request's random stream, so what remains is what an engine that had
    stopped there would have given. A response without any of them comes back as it is.

    Args:
        stops: texts, none empty.
        decode: token ids -> text.
    """
    ids = completion.token_ids

    def stopped(length: int) -> bool:
        text = decode(ids[:length])
        return any(stop in text for stop in stops)

    if not ids or not stops or not stopped(len(ids)):
        return completion
    length = bisect_left(range(1, len(ids) + 1), True, key=stopped) + 1
    return replace(completion, token_ids=ids[:length], log_probs=completion.log_probs[:length], finish="stop")
