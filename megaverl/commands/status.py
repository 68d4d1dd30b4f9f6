"""``megaverl status RUN``: where a run stands, from its folder, on whatever machine sees that."""

from __future__ import annotations

import time

from megaverl.commands.output import print_json, print_table
from megaverl.observe.console import CLIP, ENTROPY, KL, LOSS, REWARD, THROUGHPUT, short
from megaverl.observe.metrics import first_of
from megaverl.observe.status import Status, read_status

NUMBERS = {"reward": REWARD, "loss": LOSS, "KL": KL, "entropy": ENTROPY, "clip fraction": CLIP, "tokens/s": THROUGHPUT}


def run(run_dir: str, *, as_json: bool) -> int:
    """Prints it; exit code 1 when the run has failed or died."""
    status = read_status(run_dir)
    if as_json:
        print_json(status.document())
    else:
        print_table("", ("what", "is"), list(_lines(status).items()))
    return 1 if status.state in ("failed", "died") else 0


def _lines(status: Status) -> dict[str, str]:
    total = f"/{status.total_steps}" if status.total_steps else ""
    going = status.state in ("starting", "running")
    lines = {"state": status.state, "step": f"{status.step}{total}"}
    if status.phase:
        lines["phase"] = status.phase + (f", for {_span(time.time() - status.phase_since)}" if going else "")
    lines["last progress"] = f"{_span(time.time() - status.progress)} ago"
    lines["started"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.started))
    lines["driver"] = f"process {status.pid} on {status.host}"
    lines["folder"] = status.run_dir
    if status.error:
        lines["error"] = status.error
    for label, names in NUMBERS.items():
        value = first_of(status.metrics, names)
        if value is not None:
            lines[label] = short(value, None)
    return lines


def _span(seconds: float) -> str:
    """Seconds, minutes, hours or days, two of them at most."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
