"""What megaverl itself costs: the controller's share of a step, and rollout against bare vLLM.

Part 1, the step: seconds of a pass of the training loop in which no worker works. Work is what a rank spends inside
generate, score, log-probabilities, update and handoff; all else counts as overhead: taking prompts, calls through Ray,
building and moving batches, plans, advantages, metrics, logging. It is computed twice: from each phase's slowest rank,
and strictly from the fastest, which also counts as overhead that ranks do not start or end together.

Part 2, the rollout: tokens/s of the same requests through the worker group (aliased weights, driver's clock, Ray call
and batch included) and through `vllm.LLM.generate` in processes of its own (weights from the checkpoint, own clock).
Engine options, requests, seeds and thread counts are equal; the two take turns, the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: names in this folder would hide installed packages (kernels)
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.common import (
    TINY,
    Result,
    StepRecorder,
    Table,
    bench_config,
    main,
    median_of,
    scratch,
    slowest,
    started,
    tiny_inputs,
    train,
)

WARM_UP = 2
STEP_LIMIT, RATIO_LIMIT = 0.05, 0.95
MODELS = {
    "tiny": {},
    "small": {"hidden": 512, "layers": 6, "heads": 8, "kv_heads": 2, "head_dim": 64, "intermediate": 1408},
}
PROMPTS, SAMPLES, NEW_TOKENS = 16, 8, 64


def measure(arguments: argparse.Namespace) -> Result:
    result = Result({}, [])
    with scratch() as folder:
        if arguments.part in ("all", "step"):
            steps = [step_overhead(folder, tp, batch, arguments) for tp in arguments.tp for batch in arguments.batch]
            result.numbers["step"] = steps
            result.tables.append(_step_table(steps))
            result.ok &= all(s["share"] < STEP_LIMIT for s in steps)
        if arguments.part in ("all", "rollout"):
            found = [rollout_ratio(folder, name, tp, arguments) for name in arguments.models for tp in arguments.tp]
            result.numbers["rollout"] = found
            result.tables.append(_rollout_table(found))
            result.ok &= all(f["ratio"] >= RATIO_LIMIT for f in found)
    return result


# -- part 1 -------------------------------------------------------------------------------------------------------


def step_overhead(folder: Path, tp: int, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the tiny GRPO recipe on two workers and takes its steps apart."""
    where = folder / f"step-{tp}-{batch}"
    words = [*tiny_inputs(where), f"actor.layout.tp={tp}", "trainer.loggers=[file]"]
    words += [f"data.train_batch_size={batch}", *arguments.override]
    config = bench_config(TINY, words, where / "run", arguments.steps + WARM_UP)
    with started(config) as run:
        recorder = StepRecorder(run, probe=lambda: run.workers.call("work_seconds"))
        train(run)
        return {"layout": str(run.prepared.layout), "prompts": batch} | take_apart(recorder.rows[WARM_UP:])


def take_apart(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over steps of the seconds, of the work by phase and of the overhead with its parts."""
    work = [slowest(row["probe"]) for row in rows]
    least = [{name: min(r.get(name, 0.0) for r in row["probe"]) for name in names} for row, names in zip(rows, work)]
    overhead = [row["seconds"] - sum(w.values()) for row, w in zip(rows, work)]
    strict = [row["seconds"] - sum(w.values()) for row, w in zip(rows, least)]
    parts = []
    for row, done in zip(rows, work):
        phases = {n: v for n, v in row.items() if n.startswith("timing_s/") and n != "timing_s/step"}
        part = {name: seconds - done.get(name, 0.0) for name, seconds in phases.items()}
        part["between phases"] = row["timing_s/step"] - sum(phases.values())
        part["logging"] = row["seconds"] - row["timing_s/step"]
        parts.append(part)
    share = [o / row["seconds"] for o, row in zip(overhead, rows)]
    return {
        "steps": len(rows),
        "tokens": statistics.median(row["perf/total_num_tokens"] for row in rows),
        "seconds": statistics.median(row["seconds"] for row in rows),
        "work": median_of(work),
        "overhead": statistics.median(overhead),
        "share": statistics.median(share),
        "strict_share": statistics.median(o / row["seconds"] for o, row in zip(strict, rows)),
        "parts": median_of(parts),
    }


def _step_table(found: list[dict[str, Any]]) -> Table:
    rows = [
        (
            s["layout"],
            s["prompts"],
            s["steps"],
            f"{s['tokens']:.0f}",
            f"{s['seconds'] * 1e3:.0f}",
            f"{sum(s['work'].values()) * 1e3:.0f}",
            f"{s['overhead'] * 1e3:.1f}",
            f"{s['share']:.1%}",
            f"{s['strict_share']:.1%}",
        )
        for s in found
    ]
    columns = ("layout", "prompts", "steps", "tokens/step", "step ms", "work ms", "overhead ms", "overhead", "strictly")
    return Table(f"Controller and bookkeeping, share of a step (limit {STEP_LIMIT:.0%}), medians", columns, rows)


# -- part 2 -------------------------------------------------------------------------------------------------------


def rollout_ratio(folder: Path, model: str, tp: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens/s of both ways, taking turns on the same requests."""
    from benchmarks.bare_vllm import BareVllm
    from megaverl.rollout.engine import Sampling
    from megaverl.trainer.experience import generate

    where = folder / f"rollout-{model}-{tp}"
    words = [*tiny_inputs(where, **MODELS[model]), f"actor.layout.tp={tp}", f"cluster.workers_per_node={tp}"]
    words += ["rollout.engine=vllm", f"data.max_response_length={NEW_TOKENS}", *arguments.override]
    config = bench_config(TINY, words, where / "run", 1)
    sampling = Sampling(SAMPLES, 1.0, 1.0, -1, NEW_TOKENS, seed=0, ignore_end=True)
    with started(config) as run, BareVllm(config, tp) as bare:
        run.workers.call("to_rollout", 0)
        items, keys = [run.prepared.train[i] for i in range(PROMPTS)], list(range(PROMPTS))
        prompts = [item.prompt_ids for item in items]
        tokens = PROMPTS * SAMPLES * NEW_TOKENS
        seconds: dict[str, list[float]] = {"megaverl": [], "engine": [], "bare": []}
        for turn in range(-WARM_UP, arguments.rounds):
            began = time.perf_counter()
            experience = generate(run, items, keys, sampling)
            ours = time.perf_counter() - began
            engine = slowest(run.workers.call("work_seconds"))["timing_s/gen"]
            theirs, generated = bare.generate(prompts, keys, sampling)
            if not sum(experience.response_lengths) == generated == tokens:
                raise RuntimeError(f"unequal work: {sum(experience.response_lengths)} and {generated} tokens")
            if turn >= 0:
                for name, value in (("megaverl", ours), ("engine", engine), ("bare", theirs)):
                    seconds[name].append(value)
        rate = {name: tokens / statistics.median(values) for name, values in seconds.items()}
        ratios = [b / m for m, b in zip(seconds["megaverl"], seconds["bare"])]
        return {
            "model": model,
            "tp": tp,
            "threads": {"megaverl": config.cluster.threads_per_worker, "bare": bare.threads},
            "rounds": arguments.rounds,
            "tokens": tokens,
            "tokens_per_second": rate,
            "ratio": rate["megaverl"] / rate["bare"],
            "median_of_ratios": statistics.median(ratios),
            "ratio_by_round": ratios,
        }


def _rollout_table(found: list[dict[str, Any]]) -> Table:
    rows = [
        (
            f"{f['model']}, TP {f['tp']}",
            f["rounds"],
            f["tokens"],
            *(f"{f['tokens_per_second'][name]:.0f}" for name in ("megaverl", "engine", "bare")),
            f"{f['ratio']:.3f}",
            f"{f['median_of_ratios']:.3f}",
            f"{min(f['ratio_by_round']):.2f} to {max(f['ratio_by_round']):.2f}",
        )
        for f in found
    ]
    columns = (
        "model",
        "rounds",
        "tokens",
        "megaverl tok/s",
        "its engine alone",
        "bare vLLM tok/s",
        "ratio",
        "by round",
        "range",
    )
    return Table(f"Rollout through megaverl against bare vLLM (at least {RATIO_LIMIT}), medians", columns, rows)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options]"
    )
    made.add_argument("--part", choices=("all", "step", "rollout"), default="all", help="which part (all)")
    made.add_argument("--tp", type=int, nargs="+", choices=(1, 2), default=[1, 2], help="tensor parallel sizes (1 2)")
    made.add_argument(
        "--batch", type=int, nargs="+", default=[16, 32], help="prompts a step in part 1, 8 samples each (16 32)"
    )
    made.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS), help="models of part 2 (all)")
    made.add_argument("--steps", type=int, default=12, help=f"measured steps of part 1, after {WARM_UP} more (12)")
    made.add_argument("--rounds", type=int, default=9, help=f"measured rounds of part 2, after {WARM_UP} more (9)")
    made.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="a key of the configuration")
    return made


if __name__ == "__main__":
    sys.exit(main(parser(), measure))
