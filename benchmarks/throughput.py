"""Throughput of a training configuration: tokens/s per worker, seconds and share by phase, peak memory, one table row.

Runs the configuration's own loop for some steps, without validation, checkpoints and export, in a temporary run folder.
Seconds are those of a whole pass of the loop, logging included; all numbers are medians over steps.

    benchmarks/throughput.py configs/yaml/grpo_tiny.yaml --tiny
    benchmarks/throughput.py configs/yaml/grpo_gsm8k.yaml model.path=Qwen2.5-0.5B-Instruct cluster.workers_per_node=1
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: names in this folder would hide installed packages (kernels)
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.common import (
    ProcessMemory,
    Result,
    StepRecorder,
    Table,
    bench_config,
    main,
    median_of,
    process_memory,
    scratch,
    started,
    tiny_inputs,
    train,
)
from megaverl.config.load import load_config
from megaverl.config.schema import Config

WARM_UP = 2
GIB = 1 << 30
MARKDOWN = ("configuration", "layout", "device", "tokens/step", "s/step", "tokens/s per worker", "share by phase")
MARKDOWN += ("peak memory per worker",)


def measure(arguments: argparse.Namespace) -> Result:
    with scratch() as folder:
        words = list(arguments.override)
        if arguments.tiny:
            sft = load_config(arguments.config, words).algorithm.name == "sft"
            words = [*tiny_inputs(folder, sft=sft), *words]
        steps = arguments.steps + WARM_UP
        config = bench_config(arguments.config, [*words, "trainer.loggers=[file]"], folder / "run", steps)
        with started(config) as run:
            recorder = StepRecorder(run)
            train(run)
            memory = memory_by_process(run)
            device = run.workers.spec.device
            numbers = {
                "config": arguments.config,
                "overrides": list(arguments.override),
                "layout": str(run.prepared.layout),
                "device": device,
                "model": model_words(run.prepared),
                "batch": batch_words(config),
                **summarise(recorder.rows[WARM_UP:], run.prepared.layout.world),
                "memory": memory,
            }
    return Result(numbers, [_phase_table(numbers), _memory_table(memory)], ["\n".join(markdown(numbers))])


def model_words(prepared: Any) -> str:
    """The model in a few words."""
    shape = prepared.shape
    return f"{shape.family}, {shape.layers} layers x {shape.hidden}, vocabulary {shape.vocab}"


def batch_words(config: Config) -> str:
    """What a step takes in, in a few words."""
    if config.algorithm.name == "sft":
        return f"{config.data.train_batch_size} rows"
    lengths = f"{config.data.max_prompt_length}+{config.data.max_response_length} tokens at most"
    return f"{config.data.train_batch_size} prompts x {config.rollout.n}, {lengths}"


def summarise(rows: Sequence[Mapping[str, Any]], world: int) -> dict[str, Any]:
    """Medians over steps: tokens/s per worker, and seconds and share by phase (with ``other`` they make the step)."""
    by_phase = []
    for row in rows:
        named = {n.removeprefix("timing_s/"): v for n, v in row.items() if n.startswith("timing_s/")}
        named.pop("step")
        by_phase.append(named | {"other": row["seconds"] - sum(named.values())})
    seconds = statistics.median(row["seconds"] for row in rows)
    shares = [{name: value / row["seconds"] for name, value in p.items()} for row, p in zip(rows, by_phase)]
    return {
        "steps": len(rows),
        "tokens_per_step": statistics.median(row["perf/total_num_tokens"] for row in rows),
        "seconds_per_step": seconds,
        "tokens_per_second_per_worker": statistics.median(
            row["perf/total_num_tokens"] / row["seconds"] / world for row in rows
        ),
        "phases": median_of(by_phase),
        "shares": median_of(shares),
    }


def memory_by_process(run: Any) -> list[dict[str, Any]]:
    """Bytes by process, workers first. Workers on other machines tell what they hold now, their peak is not known."""
    reports = run.workers.call("memory")
    local = {p.name: p for p in process_memory([info["pid"] for info in run.worker_info])}
    found = []
    for rank, report in enumerate(reports):
        now = int(report["perf/cpu_memory_used_gb"] * GIB)
        process = local.pop(f"worker {rank}", None) or ProcessMemory(run.worker_info[rank]["pid"], "", now, now)
        gpu = report.get("perf/max_memory_allocated_gb")
        found.append({**process.as_dict(), "name": f"worker {rank}", "gpu_peak": None if gpu is None else gpu * GIB})
    return found + [{**p.as_dict(), "gpu_peak": None} for p in local.values()]


def _phase_table(n: Mapping[str, Any]) -> Table:
    rows = [(name, f"{seconds:.3f}", f"{n['shares'][name]:.1%}") for name, seconds in n["phases"].items()]
    rows.append(("step", f"{n['seconds_per_step']:.3f}", ""))
    title = (
        f"{n['config']}: {n['model']}; {n['batch']}; {n['layout']} on {n['device']}\n"
        f"{n['tokens_per_second_per_worker']:.0f} tokens/s per worker, {n['tokens_per_step']:.0f} tokens a step, "
        f"medians of {n['steps']} steps"
    )
    return Table(title, ("phase", "seconds", "share"), rows)


def _memory_table(memory: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        (m["name"], f"{m['resident'] / GIB:.2f}", f"{m['peak'] / GIB:.2f}", _gib(m["gpu_peak"]))
        for m in sorted(memory, key=lambda m: -m["peak"])
    ]
    return Table("Memory, GiB", ("process", "resident at the end", "resident, peak", "GPU, peak"), rows)


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value / GIB:.2f}"


def markdown(n: Mapping[str, Any]) -> list[str]:
    """The result as a row of a markdown table, under its head."""
    shares = sorted(((name, share) for name, share in n["shares"].items() if share >= 0.005), key=lambda item: -item[1])
    workers = [m for m in n["memory"] if m["name"].startswith("worker ")]
    memory = f"{max(m['peak'] for m in workers) / GIB:.2f} GiB"
    if n["device"] == "cuda":
        memory += f", GPU {max(m['gpu_peak'] for m in workers) / GIB:.2f} GiB"
    cells = (
        " ".join([f"`{Path(n['config']).name}`", *(f"`{word}`" for word in n["overrides"])])
        + f" ({n['model']}; {n['batch']})",
        n["layout"],
        n["device"],
        f"{n['tokens_per_step']:.0f}",
        f"{n['seconds_per_step']:.2f}",
        f"{n['tokens_per_second_per_worker']:.0f}",
        ", ".join(f"{name} {share:.0%}" for name, share in shares),
        memory,
    )
    return [f"| {' | '.join(MARKDOWN)} |", "|---" * len(MARKDOWN) + "|", f"| {' | '.join(cells)} |"]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("config", metavar="CONFIG", help="YAML file of a training configuration")
    made.add_argument("override", nargs="*", metavar="key=value", help="keys of the configuration")
    made.add_argument("--steps", type=int, default=10, help=f"measured steps, after {WARM_UP} that are not (10)")
    made.add_argument("--tiny", action="store_true", help="make a tiny model and its data, for the tiny recipes")
    return made


if __name__ == "__main__":
    sys.exit(main(parser(), measure))
