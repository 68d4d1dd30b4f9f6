"""Seconds by phase, under verl's names: ``timing_s/gen``, ``timing_s/update_actor``, ..."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Name of a phase -> what a person calls it. The names are verl's where verl has the phase.
PHASES = {
    "start": "starting",
    "step": "step",
    "gen": "generating",
    "reward": "scoring",
    "distribute": "distributing the batch",
    "old_log_prob": "log-probabilities of the actor",
    "ref": "log-probabilities of the reference",
    "values": "values of the critic",
    "adv": "advantages",
    "update_critic": "updating the critic",
    "update_actor": "updating the actor",
    "update_weights": "handing the weights over",
    "save_checkpoint": "saving a checkpoint",
    "testing": "validating",
    "export": "exporting the checkpoint",
}


class PhaseTimer:
    """Adds up wall seconds by phase until `metrics` is called. Phases may nest; a phase may come several times.

    Args:
        on_phase: called with the words for a phase when it begins, and with those of the phase around it when it ends
            (such as `Heartbeat.phase`).
    """

    def __init__(self, on_phase: Callable[[str], None] | None = None) -> None:
        self._on_phase = on_phase
        self._open: list[str] = []
        self.seconds: dict[str, float] = {}
        self.total: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block, also when it raises."""
        self._enter(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)
            self._leave()

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds measured elsewhere."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.total[name] = self.total.get(name, 0.0) + seconds

    def metrics(self) -> dict[str, float]:
        """``timing_s/<phase>`` for each phase since the last call, then starts anew; `total` goes on."""
        metrics = {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()}
        self.seconds = {}
        return metrics

    def _enter(self, name: str) -> None:
        self._open.append(name)
        self._tell()

    def _leave(self) -> None:
        self._open.pop()
        if self._open:
            self._tell()

    def _tell(self) -> None:
        if self._on_phase is not None:
            name = self._open[-1]
            self._on_phase(PHASES.get(name, name.replace("_", " ")))
