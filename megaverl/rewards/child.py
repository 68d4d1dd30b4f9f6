"""A process that judges responses. Started by `megaverl.rewards.pool`.

Messages are pickles on standard input and output: the scorer first, answered by ("ready", how it is called) or, where
it cannot be loaded, ("unusable", text); then lists of `ScoreRequest`, each answered by ("scores", list of `Score`).
What the function prints goes to standard error, so that it cannot break the messages.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from typing import Any, BinaryIO

from megaverl.errors import MegaverlError
from megaverl.rewards.custom import CustomFunction
from megaverl.rewards.judging import judge, way_of
from megaverl.rewards.registry import Registry
from megaverl.rewards.scorer import ScoreRequest

PARENT_CHECK_S = 1.0


def main() -> None:
    """Serves until the parent closes the pipe or is gone."""
    incoming, outgoing = _take_pipes()
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        scorer, timeout = pickle.load(incoming)
    except EOFError:
        return
    loaded: CustomFunction | Registry = scorer
    try:
        function = loaded.load()
    except MegaverlError as error:
        _answer(outgoing, ("unusable", str(error)))
        return
    way = way_of(function, getattr(loaded, "batch", False))
    _answer(outgoing, ("ready", way))
    while True:
        try:
            requests: list[ScoreRequest] = pickle.load(incoming)
        except EOFError:
            return
        names = [loaded.label(request.data_source) for request in requests]
        _answer(outgoing, ("scores", judge(function, way, requests, names, timeout)))


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The message pipes under new descriptors; the standard ones become nothing and standard error."""
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return incoming, outgoing


def _answer(outgoing: BinaryIO, reply: tuple[str, Any]) -> None:
    pickle.dump(reply, outgoing)
    outgoing.flush()


def _end_with_parent(parent: int) -> None:
    """A function that never returns must not outlive a parent that was killed."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # the pool gives each child a group of its own


if __name__ == "__main__":
    main()
    sys.exit(0)
