"""What a handoff of the weights from training to vLLM costs, for any pair of layouts.

    benchmarks/handoff.py --model tiny                                        # a CPU: gloo, fp32
    benchmarks/handoff.py --model 0.5b 1.5b 7b                                # one GPU: CUDA graphs, sleep mode
    benchmarks/handoff.py --model 1.5b --train pp=2 --rollout tp=2            # one process per rank and GPU

Random weights in the model's shape lie as Megatron's distributed optimizer keeps them; vLLM generates with them. After
random updates in place and handoffs, every weight is compared bit for bit with its source, the model is exported as a
Hugging Face checkpoint, and a plain vLLM in fresh processes loads that: its greedy text must be the same.

* wake_weights: vLLM takes the memory of its buffers and own weights back; transfer: what is not aliased copied and
  received; wake: it takes its KV cache's; commit: the new version is served; to_rollout is all of it, to_train puts
  vLLM to sleep. The slowest rank, median over the handoffs. handover is to_rollout without the two wakes.
* bandwidth: the most that one rank sends or receives over the transfer's seconds, against one rank's stream to another.
* added memory: what the GPU holds more after vLLM has started, its KV cache left out, against plain vLLM's, which loads
  weights of its own. Second copy: by how much it is more than plain vLLM's without those weights.
* GPU busy: torch.profiler's kernels and copies of 32 decode steps, overlapping ones once, per step; median of three.

Exit code 1 when a limit in the last column is missed; limits on seconds and on the GPU's work hold on a GPU only. With
several models each table is also shown on standard error as soon as it is there, and a part that fails or is over its
``--timeout`` ends that model alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: names in this folder would hide installed packages (kernels)
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.common import MIB, Result, Table, main, scratch
from benchmarks.handoff_rank import Job, by_itself, serve, with_training_weights
from benchmarks.kernels import MODELS as KERNEL_MODELS
from megaverl.commands.plan import TRAIN_SIZES, parse_sizes
from megaverl.errors import Problem, Problems, RunError, UserError
from megaverl.models.shape import ModelShape
from megaverl.parallel.layout import Layout

MODELS = {
    **KERNEL_MODELS,
    "7b": replace(
        KERNEL_MODELS["1.5b"],
        hidden=3584,
        heads=28,
        kv_heads=4,
        intermediate=18944,
        vocab=152064,
        tied=False,
    ),
}
"""Qwen2.5's shapes (config.json of each), and a small one."""
SECONDS = ("transfer", "wake_weights", "wake", "commit", "handover", "to_rollout", "to_train")
HANDOVER_LIMIT = 0.005
"""Seconds, where nothing moves, on a GPU."""
BUSY_LIMIT = 1.02
GROWTH_LIMIT = 2 * MIB
"""Resident memory per 10 handoffs; the first 10 to 20 are warm-up."""
PEAK_SLACK = 2 * MIB
"""Torch hands out device memory in blocks."""


def hf_config(shape: ModelShape, dtype: str) -> dict[str, Any]:
    """The config.json of a Qwen2 of this shape."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "torch_dtype": dtype,
    }


def in_processes(function: Callable[..., Any], world: int, job: Job, timeout: float) -> list[dict[str, Any]]:
    """``function(rank, world, job)`` in ``world`` fresh processes; what they return, by rank.

    Raises:
        RunError: a rank failed, died or gave no answer in time; with its traceback.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    processes = [context.Process(target=serve, args=(function, r, world, job, results)) for r in range(world)]
    for process in processes:
        process.start()
    found: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(found) < world:
            try:
                rank, value, failure = results.get(timeout=1.0)
            except queue.Empty:
                dead = [r for r, p in enumerate(processes) if r not in found and p.exitcode is not None]
                if dead or time.monotonic() > deadline:
                    what = f"ranks {dead} died" if dead else f"no result within {timeout:.0f} s"
                    raise RunError(f"{function.__name__}: {what}") from None
                continue
            if failure:
                raise RunError(f"{function.__name__}, rank {rank}:\n{failure}")
            found[rank] = value
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [found[rank] for rank in range(world)]


def measure(arguments: argparse.Namespace) -> Result:
    import torch

    problems = Problems()
    train = Layout(**parse_sizes(arguments.train, TRAIN_SIZES, "--train", problems))
    rollout_tp = parse_sizes(arguments.rollout, ("tp",), "--rollout", problems).get("tp", 1)
    problems.raise_if_any()
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and torch.cuda.device_count() < train.world:
        what = f"{train} needs {train.world} GPUs, and {torch.cuda.device_count()} are visible"
        raise UserError(Problem(what, "--train", "smaller sizes, or --device cpu"))
    models, tables, failures = {}, [], []
    for model in arguments.model:
        try:
            models[model] = measure_model(model, train, rollout_tp, device, arguments)
        except RunError as error:  # the other models are worth having
            failures.append(f"{model}: {error}")
            print(failures[-1], file=sys.stderr, flush=True)
            continue
        tables.append(table_of(models[model]))
        if len(arguments.model) > 1:
            tables[-1].show()
            sys.stdout.flush()
    if not models:
        raise RunError("\n".join(failures))
    missed = [f"{model}: {row.what} is {row.found}" for model, n in models.items() for row in n["rows"] if not row.met]
    numbers = {model: {k: v for k, v in n.items() if k != "rows"} for model, n in models.items()}
    lines = [f"missed: {line}" for line in missed] + [f"failed: {line}" for line in failures]
    only = numbers[arguments.model[0]] if len(arguments.model) == 1 else {"models": numbers}
    return Result({**only, "missed": missed, "failed": failures}, tables, lines, ok=not lines)


def measure_model(
    model: str, train: Layout, rollout_tp: int, device: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    """`summary` of one model, with what it is of and the ``rows`` of its table."""
    shape = MODELS[model]
    precision = {"auto": "bf16" if device == "cuda" else "fp32"}.get(arguments.precision, arguments.precision)
    with scratch() as folder:
        config = hf_config(shape, {"bf16": "bfloat16", "fp32": "float32"}[precision])
        (folder / "config").mkdir()
        (folder / "config" / "config.json").write_text(json.dumps(config))
        job = Job(
            folder,
            _free_port(),
            shape,
            train,
            rollout_tp,
            precision,
            device,
            arguments.handoffs,
            arguments.updates,
            arguments.rows or (256 if device == "cuda" else 8),
            arguments.utilization,
            arguments.eager,
            arguments.bucket_mb,
        )
        ranks = in_processes(with_training_weights, train.world, job, arguments.timeout)
        fresh = in_processes(by_itself, rollout_tp, replace(job, port=_free_port()), arguments.timeout)
    numbers = summary(ranks, fresh)
    numbers |= {"model": model, "train": str(train), "rollout_tp": rollout_tp, "device": device}
    return numbers | {"rows": rows_of(numbers)}


def summary(ranks: Sequence[Mapping[str, Any]], fresh: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of all ranks put together: bytes are sums, seconds and memory are those of the worst rank."""
    handoffs = range(len(ranks[0]["seconds"]["to_rollout"]))
    for rank in ranks:
        spent = rank["seconds"]
        parts = zip(spent["to_rollout"], spent["wake_weights"], spent["wake"], strict=True)
        spent["handover"] = [whole - weights - cache for whole, weights, cache in parts]
    worst = {n: [max(r["seconds"][n][i] for r in ranks) for i in handoffs] for n in SECONDS}
    names = ("bytes_aliased", "bytes_copied", "bytes_received")
    text = fresh[0]["texts"]
    equal = min(sum(a == b for a, b in zip(r["texts"], text, strict=True)) for r in ranks)
    busiest = max(max(r["moved"]["bytes_received"], r["bytes_sent"]) for r in ranks)
    transfer, peer = statistics.median(worst["transfer"]), ranks[0]["bandwidth"]
    ours, theirs = ranks[0]["busy"], fresh[0]["busy"]
    return {
        "dtype": ranks[0]["dtype"],
        "moved": {n: sum(r["moved"][n] for r in ranks) for n in names},
        "planned": {n: sum(r["planned"][n] for r in ranks) for n in names},
        "bytes_received_bound": sum(r["bytes_received_bound"] for r in ranks),
        "bytes_as_planned": all(r["moved"] == r["planned"] for r in ranks),
        "handoffs": len(handoffs),
        "seconds": {n: statistics.median(values) for n, values in worst.items()},
        "seconds_all": worst,
        "peak_extra": max(r["peak_extra"] for r in ranks),
        "planned_peak": max(r["planned_peak"] for r in ranks),
        "staging_peak": max(r["staging_peak"] for r in ranks),
        "bandwidth": busiest / transfer if busiest else None,
        "peer_bandwidth": peer,
        "bandwidth_share": busiest / transfer / peer if busiest and peer else None,
        "training_bytes": max(r["training_bytes"] for r in ranks),
        "rollout_bytes": max(r["rollout_bytes"] for r in ranks),
        "parameter_bytes_added_by_vllm": max(r["parameter_bytes_added_by_vllm"] for r in ranks),
        "device_added": max(r["device_added"] for r in ranks),
        "device_added_plain": max(r["device_added"] for r in fresh),
        "busy": ours,
        "busy_plain": theirs,
        "busy_ratio": ours["seconds"] / theirs["seconds"] if ours and theirs else None,
        "greedy_equal": equal,
        "greedy_rows": len(text),
        "texts_differ": all(r["texts_differ"] for r in ranks),
        "growth_per_10": max((g for r in ranks for g in r["growth_per_10"][1:]), default=None),
        "growth_all": [r["growth_per_10"] for r in ranks],
        "seconds_of_parts": {"handoffs": max(r["part_seconds"] for r in ranks), "plain": fresh[0]["part_seconds"]},
    }


@dataclass(frozen=True)
class Row:
    """One line of the table; ``met`` is None where there is no limit."""

    what: str
    found: str
    against: str
    within: bool | None = None

    @property
    def met(self) -> bool:
        return self.within is not False

    def cells(self) -> tuple[str, str, str, str]:
        return self.what, self.found, self.against, {None: "", True: "met", False: "MISSED"}[self.within]


def table_of(n: Mapping[str, Any]) -> Table:
    title = f"Qwen2.5-{n['model']} shape, {n['train']} -> tp{n['rollout_tp']}, {n['dtype']}, {n['device']}"
    return Table(title, ("what", "found", "plan, limit or comparison", "limit"), [row.cells() for row in n["rows"]])


def rows_of(n: Mapping[str, Any]) -> list[Row]:
    """The table's lines, with their limits."""
    moved, planned, gpu = n["moved"], n["planned"], n["device"] == "cuda"
    rows = [
        Row(name.replace("_", " "), f"{moved[name]:,}", f"{planned[name]:,} planned", moved[name] == planned[name])
        for name in planned
    ]
    lacked = n["bytes_received_bound"]
    rows.append(Row("lacked by the ranks", f"{lacked:,}", "all that is received", moved["bytes_received"] == lacked))
    nothing_moves = not planned["bytes_copied"] + planned["bytes_received"]
    for name, seconds in n["seconds"].items():
        against, within = f"most {max(n['seconds_all'][name]) * 1e3:.2f} ms", None
        if name == "handover" and gpu and nothing_moves:
            against, within = f"{against}; limit {HANDOVER_LIMIT * 1e3:.0f} ms", seconds < HANDOVER_LIMIT
        rows.append(Row(f"{name}, median of {n['handoffs']}", f"{seconds * 1e3:.2f} ms", against, within))
    return rows + _memory_rows(n) + _rollout_rows(n)


def _memory_rows(n: Mapping[str, Any]) -> list[Row]:
    peak = Row(
        "extra memory, peak",
        _mib(n["peak_extra"]),
        f"{_mib(n['planned_peak'])} planned, with staging",
        n["peak_extra"] <= n["planned_peak"] + PEAK_SLACK,
    )
    own = n["parameter_bytes_added_by_vllm"]
    rows = [peak, Row("parameter storage of vLLM's own", _mib(own), "0", own == 0)]
    if n["bandwidth_share"]:
        share = f"{n['bandwidth_share']:.0%} of {n['peer_bandwidth'] / 1e9:.1f} GB/s"
        rows.append(Row("transfer bandwidth", f"{n['bandwidth'] / 1e9:.1f} GB/s", share))
    if n["device_added_plain"]:
        plain = f"{_mib(n['device_added_plain'])} by plain vLLM, {_mib(n['rollout_bytes'])} of it weights"
        rows.append(Row("device memory added by vLLM", _mib(n["device_added"]), plain))
        planned = n["planned"]["bytes_copied"] + n["planned"]["bytes_received"]
        second = n["device_added"] - (n["device_added_plain"] - n["rollout_bytes"])
        if not planned:
            limit = n["rollout_bytes"] // 10
            rows.append(Row("second copy of the weights", _mib(second), f"limit {_mib(limit)}", second <= limit))
    if n["growth_per_10"] is not None:
        growth, limit = n["growth_per_10"], f"limit {_mib(GROWTH_LIMIT)}"
        rows.append(Row("resident growth per 10 handoffs, most", _mib(growth), limit, growth <= GROWTH_LIMIT))
    return rows


def _rollout_rows(n: Mapping[str, Any]) -> list[Row]:
    rows = []
    if n["busy_ratio"]:
        found = f"{n['busy']['seconds'] * 1e3:.3f} ms, {n['busy']['launches']:.0f} launches"
        plain = f"{n['busy_plain']['seconds'] * 1e3:.3f} ms, {n['busy_plain']['launches']:.0f} launches in plain vLLM"
        rows.append(Row("GPU busy in a decode step", found, plain))
        limit, ratio = f"limit {BUSY_LIMIT}", n["busy_ratio"]
        rows.append(Row("GPU busy, ratio to plain vLLM", f"{ratio:.3f}", limit, ratio <= BUSY_LIMIT))
    equal, count = n["greedy_equal"], n["greedy_rows"]
    rows.append(Row("greedy rows equal to a fresh vLLM's", f"{equal}", f"of {count}", equal == count))
    differ = "yes" if n["texts_differ"] else "no"
    return [*rows, Row("text changes with every update", differ, "yes", n["texts_differ"])]


def _mib(value: float) -> str:
    return f"{value / MIB:,.1f} MiB"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", choices=tuple(MODELS), nargs="+", default=["tiny"], help="one after the other")
    made.add_argument("--train", default="tp=1", help="training layout: tp=2,pp=2,dp=1")
    made.add_argument("--rollout", default="tp=1", help="rollout layout: tp=2")
    made.add_argument("--precision", choices=("auto", "bf16", "fp32"), default="auto")
    made.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    made.add_argument("--handoffs", type=int, default=50)
    made.add_argument("--updates", type=int, default=3, help="random updates in place before the text is compared")
    made.add_argument("--rows", type=int, help="sequences of a decode step; 256 on a GPU, 8 on a CPU")
    made.add_argument("--utilization", type=float, default=0.5, help="share of the GPU that vLLM may use")
    made.add_argument("--bucket-mb", type=int, default=64, help="staging memory")
    made.add_argument("--eager", action="store_true", help="vLLM without CUDA graphs")
    made.add_argument("--timeout", type=float, default=280.0, help="seconds for each of the two parts of a model")
    return made


if __name__ == "__main__":
    sys.exit(main(parser(), measure))
