"""What can be said of a worker that died, or does not come back from a phase."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaverl.errors import RunError
from megaverl.workers.beats import Answer

LOG_LINES = 8
FATAL = re.compile(r"Fatal Python error: (Segmentation fault|Aborted|Bus error|Floating-point exception|Illegal \w+)")
SIGNALS = {"Segmentation fault": "SIGSEGV", "Aborted": "SIGABRT", "Bus error": "SIGBUS"}


class WorkersLost(RunError):
    """Workers died or do not answer: starting the pool anew may help (``trainer.max_restarts``)."""


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank runs: address of its node, process id there, port of its `beats.Pulse`, numbers of its GPUs."""

    node: str
    pid: int
    port: int = 0
    gpus: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"node {self.node}, pid {self.pid}"


def died(rank: int, place: Whereabouts | None, roles: Sequence[str], phase: str, cause: str, log: Path) -> WorkersLost:
    """The error for a rank whose process is gone; ``cause`` is what Ray knows of it."""
    how = end_of_process(cause, log)
    return WorkersLost(f"{_who(rank, place, roles)} died in phase {phase}: {how}\n{last_lines(log)}")


def end_of_process(cause: str, log: Path) -> str:
    """How a process ended: its exit code where Ray has it, the signal that its log shows, else what Ray says."""
    code = re.search(r"exit code[ :=]+(-?\d+)", cause)
    if code and "connection error code" not in cause:
        return f"exit code {code.group(1)}: {cause}"
    fatal = FATAL.search(_tail(log))
    if fatal:
        return f"signal {SIGNALS.get(fatal.group(1), fatal.group(1))}: {cause}"
    if "connection error code 2" in cause or not cause:
        return f"it left no trace in its log, as after SIGKILL (kill -9, or the kernel out of memory): {cause}".rstrip(
            ": "
        )
    return cause


def stuck(
    missing: Sequence[int],
    places: Sequence[Whereabouts],
    roles: Sequence[str],
    phase: str,
    limit: str,
    logs: Path,
    answers: Mapping[int, Answer | None] | None = None,
) -> WorkersLost:
    """The error for ranks that did not come back from a phase in time.

    One that is stopped is named first, then one that is elsewhere than in a collective: the others wait for it.

    Args:
        limit: which bound was passed, e.g. ``within 20 s (cluster.heartbeat_timeout)``.
        answers: the last that each rank said of itself, where it is known.
    """
    answers = answers or {}
    states = {rank: process_state(places[rank]) if places else "" for rank in missing}

    def order(rank: int) -> tuple[bool, bool, int]:
        answer = answers.get(rank)
        return (states[rank] != "stopped", answer is not None and answer.waits, rank)

    lines = [f"{len(missing)} worker(s) did not finish phase {phase} {limit}:"]
    ranks = sorted(missing, key=order)
    for rank in ranks:
        state = f": its process is {states[rank]}" if states[rank] else ""
        lines.append(f"  {_who(rank, places[rank] if places else None, roles)}{state}{_doing(answers.get(rank))}")
    lines.append(last_lines(logs / f"rank_{ranks[0]}.log"))
    return WorkersLost("\n".join(lines))


def _doing(answer: Answer | None) -> str:
    if answer is None or not answer.place:
        return ""
    return f", {'waits for its peers' if answer.waits else 'works'} at {answer.place}"


def process_state(place: Whereabouts) -> str:
    """``stopped``, ``sleeping``, ``running``, ``gone``, ... of a worker on this node; empty for one elsewhere."""
    import psutil
    import ray

    if place.node != ray.util.get_node_ip_address():
        return ""
    try:
        return psutil.Process(place.pid).status()
    except psutil.NoSuchProcess:
        return "gone"


def last_lines(log: Path, count: int = LOG_LINES) -> str:
    """The end of a worker's log, indented; or where to look when it cannot be read from here."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-count:]
    except OSError:
        return f"    -> its last lines are in {log} on its node"
    shown = "".join(f"\n    | {line}" for line in lines)
    return f"    -> the end of {log}:{shown or ' nothing was written'}"


def _tail(log: Path, size: int = 16384) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _who(rank: int, place: Whereabouts | None, roles: Sequence[str]) -> str:
    return f"rank {rank} ({', '.join(filter(None, [str(place or ''), '+'.join(roles)]))})"
