"""What can be said of a worker that died, or does not come back from a phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LOG_LINES = 8


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank runs: address of its node, process id there."""

    node: str
    pid: int

    def __str__(self) -> str:
        return f"node {self.node}, pid {self.pid}"


def died(rank: int, place: Whereabouts | None, roles: Sequence[str], phase: str, cause: str, log: Path) -> str:
    """The message for a rank whose process is gone."""
    return f"{_who(rank, place, roles)} died in phase {phase}: {cause}\n{last_lines(log)}"


def stuck(
    missing: Sequence[int], places: Sequence[Whereabouts], roles: Sequence[str], phase: str, seconds: float, logs: Path
) -> str:
    """The message for ranks that did not come back from a phase in time; one that is stopped is named first."""
    states = {rank: process_state(places[rank]) if places else "" for rank in missing}
    order = sorted(missing, key=lambda rank: (states[rank] != "stopped", rank))
    lines = [f"{len(missing)} worker(s) did not finish phase {phase} within {seconds:g} s (cluster.phase_timeout):"]
    for rank in order:
        state = f": its process is {states[rank]}" if states[rank] else ""
        lines.append(f"  {_who(rank, places[rank] if places else None, roles)}{state}")
    lines.append(last_lines(logs / f"rank_{order[0]}.log"))
    return "\n".join(lines)


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


def _who(rank: int, place: Whereabouts | None, roles: Sequence[str]) -> str:
    return f"rank {rank} ({', '.join(filter(None, [str(place or ''), '+'.join(roles)]))})"
