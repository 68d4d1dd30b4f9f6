"""What a handoff of the weights from training to vLLM costs, for any pair of layouts.

    benchmarks/handoff.py --model tiny                                        # a CPU: gloo, fp32
    benchmarks/handoff.py --model 7b --train tp=1 --rollout tp=1              # one GPU: CUDA graphs, sleep mode
    benchmarks/handoff.py --model 1.5b --train pp=2 --rollout tp=2            # one process per rank and GPU

Random weights in the model's shape lie as Megatron's distributed optimizer keeps them; vLLM generates with them. After
random updates in place and handoffs, every weight is compared bit for bit with its source, the model is exported as a
Hugging Face checkpoint, and a plain vLLM in fresh processes loads that: its greedy text must be the same.

* transfer: what is not aliased copied and received; wake: vLLM takes the memory of its KV cache back; commit: the new
  version is served; to_rollout is all of it, to_train puts vLLM to sleep. The slowest rank, median over the handoffs.
* bandwidth: the most that one rank sends or receives over the transfer's seconds, against one rank's stream to another.
* added memory: what the GPU holds more after vLLM has started, its KV cache left out, against plain vLLM's, which loads
  weights of its own.
* GPU busy: torch.profiler's kernels and copies of 32 decode steps, overlapping ones once, per step; median of three.
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
from dataclasses import replace
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
    rows = arguments.rows or (256 if device == "cuda" else 8)
    shape = MODELS[arguments.model]
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
            rows,
            arguments.utilization,
            arguments.eager,
            arguments.bucket_mb,
        )
        ranks = in_processes(with_training_weights, train.world, job, arguments.timeout)
        fresh = in_processes(by_itself, rollout_tp, replace(job, port=_free_port()), arguments.timeout)
    numbers = summary(ranks, fresh)
    numbers |= {"model": arguments.model, "train": str(train), "rollout_tp": rollout_tp, "device": device}
    title = f"Qwen2.5-{arguments.model} shape, {train} -> tp{rollout_tp}, {numbers['dtype']}, {device}"
    ok = numbers["bytes_as_planned"] and numbers["greedy_equal"] == numbers["greedy_rows"] and numbers["texts_differ"]
    return Result(numbers, [Table(title, ("what", "found", "plan or comparison"), table_rows(numbers))], ok=ok)


def summary(ranks: Sequence[Mapping[str, Any]], fresh: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of all ranks put together: bytes are sums, seconds and memory are those of the worst rank."""
    handoffs = range(len(ranks[0]["seconds"]["to_rollout"]))
    worst = {n: [max(r["seconds"][n][i] for r in ranks) for i in handoffs] for n in ranks[0]["seconds"]}
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
        "parameter_bytes_added_by_vllm": max(r["parameter_bytes_added_by_vllm"] for r in ranks),
        "device_added": max(r["device_added"] for r in ranks),
        "device_added_plain": max(r["device_added"] for r in fresh),
        "busy": ours,
        "busy_plain": theirs,
        "busy_ratio": ours["seconds"] / theirs["seconds"] if ours and theirs else None,
        "greedy_equal": equal,
        "greedy_rows": len(text),
        "texts_differ": all(r["texts_differ"] for r in ranks),
        "growth_per_10": max((g for r in ranks for g in r["growth_per_10"]), default=None),
    }


def table_rows(n: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    mib = lambda value: f"{value / MIB:,.1f} MiB"  # noqa: E731
    rows = [
        (name.replace("_", " "), f"{n['moved'][name]:,}", f"{n['planned'][name]:,} planned") for name in n["planned"]
    ]
    rows.append(("lacked by the ranks", f"{n['bytes_received_bound']:,}", "at least to be received"))
    rows += [
        (
            f"{name}, median of {n['handoffs']}",
            f"{seconds * 1e3:.2f} ms",
            f"most {max(n['seconds_all'][name]) * 1e3:.2f} ms",
        )
        for name, seconds in n["seconds"].items()
    ]
    rows.append(("extra memory, peak", mib(n["peak_extra"]), f"{mib(n['planned_peak'])} planned, with staging"))
    if n["bandwidth_share"]:
        share = f"{n['bandwidth_share']:.0%} of {n['peer_bandwidth'] / 1e9:.1f} GB/s"
        rows.append(("transfer bandwidth", f"{n['bandwidth'] / 1e9:.1f} GB/s", share))
    rows.append(("parameter storage of vLLM's own", mib(n["parameter_bytes_added_by_vllm"]), "0 planned"))
    if n["device_added_plain"]:
        plain = f"{mib(n['device_added_plain'])} by plain vLLM, {mib(n['training_bytes'])} of training weights"
        rows.append(("device memory added by vLLM", mib(n["device_added"]), plain))
    if n["busy_ratio"]:
        found = f"{n['busy']['seconds'] * 1e3:.3f} ms, {n['busy']['launches']:.0f} launches"
        plain = f"{n['busy_plain']['seconds'] * 1e3:.3f} ms in plain vLLM, ratio {n['busy_ratio']:.3f}"
        rows.append(("GPU busy in a decode step", found, plain))
    rows.append(("greedy rows equal to a fresh vLLM's", f"{n['greedy_equal']}", f"of {n['greedy_rows']}"))
    if n["growth_per_10"] is not None:
        rows.append(("resident growth per 10 handoffs, most", mib(n["growth_per_10"]), ""))
    return rows


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", choices=tuple(MODELS), default="tiny")
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
    made.add_argument("--timeout", type=float, default=560.0, help="seconds for each of the two parts")
    return made


if __name__ == "__main__":
    sys.exit(main(parser(), measure))
