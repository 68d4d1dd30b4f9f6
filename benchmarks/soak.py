"""Memory over many steps: the tiny GRPO recipe runs on, and no process may grow.

Resident memory of the driver, the workers and the Ray that the driver starts is read after every step. A process is
flat when its most after step 10 is within 2 % of what it had at step 10. Exit code 1 when a process is not flat.

With ``--save-every N`` a checkpoint is written every N steps (the two newest are kept). File handles, threads and the
bytes in Ray's object store are read as well: none may be more at the end than at any step up to `BASE_STEP`, but for
`COUNT_SLACK`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray

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
COUNT_SLACK, BYTES_SLACK = 4, MIB


def measure(arguments: argparse.Namespace) -> Result:
    with scratch() as folder:
        words = [*tiny_inputs(folder), "trainer.loggers=[file]", *arguments.override]
        config = bench_config(TINY, words, folder / "run", arguments.steps)
        config.trainer.save_every, config.trainer.keep_last = arguments.save_every, 2
        with started(config) as run:
            pids = [info["pid"] for info in run.worker_info]
            recorder = StepRecorder(run, probe=lambda: (process_memory(pids), counts(pids)))
            train(run)
            layout = str(run.prepared.layout)
    samples = [row["probe"][0] for row in recorder.rows]
    found, held = drifts(samples), rises([row["probe"][1] for row in recorder.rows])
    numbers = {"layout": layout, "steps": arguments.steps, "processes": found, "counts": held}
    if arguments.series:
        numbers["series"] = [{f"{p.name} {p.pid}": p.resident for p in sample} for sample in samples]
    tables = [_table(found, arguments.steps, layout), _counts_table(held)]
    ok = all(f["flat"] for f in found) and all(h["flat"] for h in held)
    return Result(numbers, tables, [summary(found)], ok=ok)


def counts(worker_pids: Sequence[int]) -> dict[str, int]:
    """File handles and threads of the driver and the workers, and bytes in the object store."""
    found = {}
    processes = {"driver": os.getpid(), **{f"worker {rank}": pid for rank, pid in enumerate(worker_pids)}}
    for name, pid in processes.items():
        process = psutil.Process(pid)
        found[f"{name}: file handles"] = process.num_fds()
        found[f"{name}: threads"] = process.num_threads()
    total, free = ray.cluster_resources(), ray.available_resources()
    found["object store, bytes"] = int(total["object_store_memory"] - free.get("object_store_memory", 0))
    return found


def rises(samples: Sequence[Mapping[str, int]]) -> list[dict[str, Any]]:
    """By count: the most of the first `BASE_STEP` steps, the end, and whether that is no more."""
    found = []
    for name in samples[0]:
        base, end = max(s[name] for s in samples[:BASE_STEP]), samples[-1][name]
        slack = BYTES_SLACK if name.endswith("bytes") else COUNT_SLACK
        found.append({"name": name, "base": base, "end": end, "flat": end <= base + slack})
    return found


def _counts_table(found: Sequence[Mapping[str, Any]]) -> Table:
    rows = [(f["name"], f["base"], f["end"], "flat" if f["flat"] else "GROWS") for f in found]
    return Table("What is held", ("count", f"most until step {BASE_STEP}", "at the end", "verdict"), rows)


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
    made.add_argument("--save-every", type=int, default=0, help="write a checkpoint every so many steps (0: never)")
    made.add_argument("--series", action="store_true", help="put every sample into the JSON document")
    return made


if __name__ == "__main__":
    sys.exit(main(parser(), measure))
