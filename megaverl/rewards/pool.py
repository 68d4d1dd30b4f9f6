"""A pool of processes for scorers that may do anything: a time-out per response, and none of them ends the run.

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
from megaverl.rewards.custom import CustomFunction
from megaverl.rewards.judging import too_late
from megaverl.rewards.registry import Registry
from megaverl.rewards.scorer import Score, ScoreRequest

START_S = 300.0  # a user's file may import torch on a busy machine
TOGETHER = 32  # responses that one process awaits together, where the function is asynchronous
GRACE_S = 5.0  # for the process to give up by itself those that take too long


class ScorerPool:
    """Judges responses in ``workers`` processes.

    Args:
        scorer: a custom function, or the registry.
        timeout: seconds for one response; a function that takes many at once has as much for each of them.
    """

    def __init__(self, scorer: CustomFunction | Registry, workers: int, timeout: float) -> None:
        self.scorer, self.workers, self.timeout = scorer, workers, timeout
        self._children: list[_Child] = []

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Scores in the order of the requests; ``failure`` of a score says what went wrong with it.

        Raises:
            RunError: the function cannot be loaded in a process.
        """
        scores: list[Score | None] = [None] * len(requests)
        todo = list(range(len(requests)))
        while todo or any(child.busy for child in self._children):
            self._children = [child for child in self._children if not child.gone]
            idle = sum(not child.busy for child in self._children)
            for _ in range(min(self.workers - len(self._children), len(todo) - idle)):
                self._children.append(_Child(self.scorer, self.timeout))
            for child in self._children:
                if child.ready and not child.busy and todo:
                    numbers = self._take(todo, child.way, len(requests))
                    child.send(
                        numbers, [requests[i] for i in numbers], time.monotonic() + self._limit(child.way, numbers)
                    )
            self._collect(scores, requests)
        return [score for score in scores if score is not None]

    def close(self) -> None:
        """Ends the processes at once."""
        for child in self._children:
            child.kill()
        self._children = []

    def _take(self, todo: list[int], way: str, total: int) -> list[int]:
        """The next responses for one process, taken off ``todo``."""
        share = -(-total // self.workers)
        count = {"single": 1, "together": min(TOGETHER, share), "batch": share}[way]
        taken = todo[:count]
        del todo[:count]
        return taken

    def _limit(self, way: str, numbers: Sequence[int]) -> float:
        return self.timeout + GRACE_S if way == "together" else self.timeout * len(numbers)

    def _collect(self, scores: list[Score | None], requests: Sequence[ScoreRequest]) -> None:
        """Waits for the next answer or the next time-out, and takes what there is."""
        awaited = [child for child in self._children if child.busy or not child.ready]
        remaining = min(child.deadline for child in awaited) - time.monotonic()
        answered = set(wait([child.output for child in awaited], max(0.0, remaining)))
        now = time.monotonic()
        for child in awaited:
            if child.output in answered:
                kind, value = child.receive()
                if kind == "unusable" or (kind == "died" and not child.ready):
                    self.close()
                    raise RunError(f"the reward function cannot be used: {value}")
                if kind == "ready":
                    child.ready, child.way = True, value
                    continue
                found = value
                if kind == "died":
                    found = [Score(0.0, {}, "error", f"{self._place(requests[i])}: {value}") for i in child.numbers]
            elif now >= child.deadline:
                child.kill()
                if not child.busy:
                    self.close()
                    raise RunError(f"the reward function was not loaded in {START_S:g} s")
                found = [
                    Score(0.0, {}, "timeout", too_late(self._place(requests[i]), self.timeout)) for i in child.numbers
                ]
            else:
                continue
            for number, score in zip(child.numbers, found, strict=True):
                scores[number] = score
            child.numbers = []

    def _place(self, request: ScoreRequest) -> str:
        return f"scorer {self.scorer.label(request.data_source)}, row {request.key}"


class _Child:
    """One process and what it is working on: the numbers of responses."""

    def __init__(self, scorer: CustomFunction | Registry, timeout: float) -> None:
        search = os.pathsep.join(entry for entry in sys.path if entry)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megaverl.rewards.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": search},
            start_new_session=True,  # so that what the function started ends with it
        )
        self.ready = self.gone = False
        self.way = "single"
        self.numbers: list[int] = []
        self.deadline = time.monotonic() + START_S
        self._write((scorer, timeout))

    @property
    def busy(self) -> bool:
        return bool(self.numbers)

    @property
    def output(self) -> Any:
        return self.process.stdout

    def send(self, numbers: list[int], requests: list[ScoreRequest], deadline: float) -> None:
        self.numbers, self.deadline = numbers, deadline
        self._write(requests)

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
