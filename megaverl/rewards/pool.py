"""A pool of processes for custom reward functions: a time-out per response, and nothing a function does ends the run.

The processes are plain children over pipes (not multiprocessing, which would import the main module of a Ray worker
anew in each). A response that takes too long, raises, or kills its process scores 0 and is counted; the process is
replaced. Children end when the pool is closed, and by themselves when their parent is gone.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from megaverl.errors import RunError
from megaverl.rewards.scorer import Score, ScoreRequest

START_S = 300.0  # a user's file may import torch on a busy machine


class ScorerPool:
    """Judges responses with the function ``name`` of the file ``path`` in ``workers`` processes.

    Args:
        timeout: seconds for one response.
    """

    def __init__(self, path: str, name: str, workers: int, timeout: float) -> None:
        self.path, self.name, self.workers, self.timeout = path, name, workers, timeout
        self._children: list[_Child] = []

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Scores in the order of the requests; ``failure`` of a score says what went wrong with it.

        Raises:
            RunError: the function cannot be loaded in a process.
        """
        scores: list[Score | None] = [None] * len(requests)
        todo = list(reversed(range(len(requests))))
        while todo or any(child.busy for child in self._children):
            self._children = [child for child in self._children if not child.gone]
            idle = sum(not child.busy for child in self._children)
            for _ in range(min(self.workers - len(self._children), len(todo) - idle)):
                self._children.append(_Child(self.path, self.name))
            for child in self._children:
                if child.ready and not child.busy and todo:
                    number = todo.pop()
                    child.send(number, requests[number], time.monotonic() + self.timeout)
            self._collect(scores, requests)
        return [score for score in scores if score is not None]

    def close(self) -> None:
        """Ends the processes at once."""
        for child in self._children:
            child.kill()
        self._children = []

    def _collect(self, scores: list[Score | None], requests: Sequence[ScoreRequest]) -> None:
        """Waits for the next answer or the next time-out, and takes what there is."""
        awaited = [child for child in self._children if child.busy or not child.ready]
        remaining = min(child.deadline for child in awaited) - time.monotonic()
        answered = set(wait([child.output for child in awaited], max(0.0, remaining)))
        now = time.monotonic()
        for child in awaited:
            number = child.number
            if child.output in answered:
                kind, value = child.receive()
                if kind == "unusable" or (kind == "died" and not child.ready):
                    self.close()
                    raise RunError(f"the reward function cannot be used: {value}")
                if kind == "ready":
                    child.ready = True
                    continue
                where = f"scorer {self.path}, row {requests[number].key}"
                failed = {"error": value, "died": f"{where}: {value}"}
                scores[number] = value if kind == "score" else Score(0.0, {}, "error", failed[kind])
            elif now >= child.deadline:
                child.kill()
                if number is None:
                    self.close()
                    raise RunError(f"{self.path}: the reward function's file was not imported in {START_S:g} s")
                text = (
                    f"scorer {self.path}, row {requests[number].key}: no score in {self.timeout:g} s (reward.timeout)"
                )
                scores[number] = Score(0.0, {}, "timeout", text)
            else:
                continue
            child.number = None


class _Child:
    """One process and what it is working on."""

    def __init__(self, path: str, name: str) -> None:
        search = os.pathsep.join(entry for entry in sys.path if entry)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megaverl.rewards.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": search},
            start_new_session=True,  # so that what the function started ends with it
        )
        self.ready = self.gone = False
        self.number: int | None = None
        self.deadline = time.monotonic() + START_S
        self._write((path, name))

    @property
    def busy(self) -> bool:
        return self.number is not None

    @property
    def output(self) -> Any:
        return self.process.stdout

    def send(self, number: int, request: ScoreRequest, deadline: float) -> None:
        self.number, self.deadline = number, deadline
        self._write(request)

    def receive(self) -> tuple[str, Any]:
        """The next answer; ("died", how) when the process has ended instead."""
        try:
            return pickle.load(self.output)
        except (EOFError, pickle.UnpicklingError):
            self.kill()
            return "died", f"the function ended its process (exit code {self.process.returncode})"

    def kill(self) -> None:
        self.gone = True
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):  # what was not yet flushed to a process that has ended
                pipe.close()

    def _write(self, message: Any) -> None:
        with suppress(BrokenPipeError):  # it has ended; `receive` finds that out and says how
            pickle.dump(message, self.process.stdin)
            self.process.stdin.flush()
