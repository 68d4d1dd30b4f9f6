"""Memory over many steps: the tiny GRPO recipe runs on, and no process may grow.

Resident memory of the driver, the workers and the Ray that the driver starts is read after every step. A process is
flat when its most after step 10 is within 2 % of what it had at step 10. Exit code 1 when a process is not flat.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: names in this folder would hide installed packages (kernels)
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.common import (
    MIB,
    TINY,
    ProcessMemory,
    Result,
    StepRecorder,
    Table,
    bench_config,
    main,
    process_memory,
    scratch,
    started,
    tiny_inputs,
    train,
)

BASE_STEP, LIMIT = 10, 0.02


def measure(arguments: argparse.Namespace) -> Result:
    with scratch() as folder:
        words = [*tiny_inputs(folder), "trainer.loggers=[file]", *arguments.override]
        config = bench_config(TINY, words, folder / "run", arguments.steps)
        with started(config) as run:
            pids = [info["pid"] for info in run.worker_info]
            recorder = StepRecorder(run, probe=lambda: process_memory(pids))
            train(run)
            layout = str(run.prepared.layout)
    samples = [row["probe"] for row in recorder.rows]
    found = drifts(samples)
    numbers = {"layout": layout, "steps": arguments.steps, "processes": found}
    if arguments.series:
        numbers["series"] = [{f"{p.name} {p.pid}": p.resident for p in sample} for sample in samples]
    return Result(numbers, [_table(found, arguments.steps, layout)], [summary(found)], ok=all(f["flat"] for f in found))


def summary(found: Sequence[Mapping[str, Any]]) -> str:
    """The verdicts in one line; names whoever is not within the limit."""
    beyond = [f"{f['name']} ({f['growth']:+.1%})" for f in found if not f["flat"]]
    return f"within {LIMIT:.0%}: " + ("every process" if not beyond else f"all but {', '.join(beyond)}")


def drifts(samples: Sequence[Sequence[ProcessMemory]]) -> list[dict[str, Any]]:
    """Compares each process that lived from step `BASE_STEP` to the end with what it had then.

    Args:
        samples: by step, from step 1 on.
    """
    half = (BASE_STEP + len(samples)) // 2
    first, middle, last = ({p.pid: p for p in samples[at]} for at in (BASE_STEP - 1, half - 1, -1))
    most: dict[int, int] = {}
    for sample in samples[BASE_STEP - 1 :]:
        for process in sample:
            most[process.pid] = max(most.get(process.pid, 0), process.resident)
    found = []
    for pid in (pid for pid in first if pid in last):
        base = first[pid].resident
        found.append(
            {
                "name": last[pid].name,
                "pid": pid,
                "base": base,
                "end": last[pid].resident,
                "drift": last[pid].resident / base - 1,
                "second_half": last[pid].resident / middle.get(pid, last[pid]).resident - 1,
                "growth": most[pid] / base - 1,
                "flat": most[pid] <= base * (1 + LIMIT),
            }
        )
    return found


def _table(found: Sequence[Mapping[str, Any]], steps: int, layout: str) -> Table:
    rows = [
        (
            f["name"],
            f"{f['base'] / MIB:.1f}",
            f"{f['end'] / MIB:.1f}",
            f"{f['drift']:+.2%}",
            f"{f['growth']:+.2%}",
            f"{f['second_half']:+.2%}",
            "flat" if f["flat"] else "GROWS",
        )
        for f in found
    ]
    columns = ("process", f"MiB at step {BASE_STEP}", f"MiB at step {steps}", "drift", "most", "second half", "verdict")
    return Table(f"Resident memory over {steps} steps of {TINY.name}, {layout}", columns, rows)


def _steps(text: str) -> int:
    value = int(text)
    if value <= BASE_STEP:
        raise argparse.ArgumentTypeError(f"must be more than {BASE_STEP}, the step that is compared with")
    return value


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--steps", type=_steps, default=100, help="steps to run (100)")
    made.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="a key of the configuration")
    made.add_argument("--series", action="store_true", help="put every sample into the JSON document")
    return made


if __name__ == "__main__":
    sys.exit(main(parser(), measure))
