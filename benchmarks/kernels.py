"""How fast each kernel backend trains: forward and backward of one pack, against the machine's matrix-product rate.

    python -m benchmarks.kernels                                 # every backend that the machine has, a process each
    python -m benchmarks.kernels --kernels flash --model 0.5b
    MEGAVERL_CAPABILITY=6.1 python -m benchmarks.kernels         # as an old card would: eager, fp32

A step is what an update does up to its gradients: the pack goes to the GPU, the gradient buffer is cleared, the model
runs forward, a policy loss is taken from log-probabilities and entropies of all tokens, the backward pass adds float32
gradients into Megatron's buffer. The optimizer's step is left out.

* busy: time in which at least one kernel or copy runs (torch.profiler), per step; wall: median of steps that start and
  end with an idle GPU.
* share: the step's matrix-product operations, counted once (6 per weight and token, 6 head_dim heads L^2 for causal
  attention over a sequence of L tokens; what is computed again does not count), at the machine's rate, over busy.
* rate: products of random matrices of 8192^3 (fp32: 4096^3) in the same process. A GPU at its power limit lowers its
  clock within tenths of a second, so the rate that a step can be held against is that of products which run on for a
  second, before and after the measured steps. That of a few products on a rested GPU is given beside it ("rested").
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, Result, Table, main
from megaverl.models.shape import ModelShape


def _qwen2(layers: int, hidden: int, heads: int, head_dim: int, intermediate: int, vocab: int = 151936) -> ModelShape:
    return ModelShape(
        family="qwen2",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=2,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=vocab,
        max_positions=32768,
        norm_eps=1e-6,
        rope_theta=1e6,
        tied=True,
        qkv_bias=True,
    )


MODELS = {
    "1.5b": _qwen2(28, 1536, 12, 128, 8960),
    "0.5b": _qwen2(24, 896, 14, 64, 4864),
    "tiny": _qwen2(2, 256, 4, 64, 512, vocab=1024),
}
BACKENDS = ("te", "flash", "eager")
WARM_UP, TIMED, PROFILED = 3, 10, 2


def sequence_lengths(tokens: int) -> list[int]:
    """16 sequences whose lengths rise evenly from half to one and a half times the mean; together ``tokens``."""
    n = 16
    lengths = [round(tokens / n * (0.5 + i / (n - 1))) for i in range(n)]
    lengths[-1] += tokens - sum(lengths)
    return lengths


def matmul_flop(shape: ModelShape, lengths: list[int], scored: int) -> float:
    """Operations of all matrix products of a forward and a backward pass, each counted once."""
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim * shape.hidden
    layer = qkv + shape.heads * shape.head_dim * shape.hidden + 3 * shape.hidden * shape.intermediate
    attention = sum(2 * n * n * shape.heads * shape.head_dim for n in lengths)  # two products, half of each is masked
    forward = 2 * sum(lengths) * layer * shape.layers + attention * shape.layers
    return 3.0 * (forward + 2 * scored * shape.hidden * shape.vocab)


def matmul_rate(dtype: Any, size: int, seconds: float) -> float:
    """Operations per second of a square product of random matrices, run without a pause for ``seconds``.

    The median of the second half of groups of ten products; ten products after three with ``seconds`` 0.
    """
    import torch

    a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    for _ in range(3):
        torch.mm(a, b)
    torch.cuda.synchronize()
    marks, began = [torch.cuda.Event(enable_timing=True)], time.perf_counter()
    marks[0].record()
    while len(marks) == 1 or time.perf_counter() - began < seconds:
        for _ in range(10):
            torch.mm(a, b)
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        if len(marks) > 3:
            marks[-3].synchronize()  # the host stays two groups ahead, so that the clock above means something
    torch.cuda.synchronize()
    times = [x.elapsed_time(y) / 1e4 for x, y in itertools.pairwise(marks)]  # seconds of one product
    return 2 * size**3 / statistics.median(times[len(times) // 2 :])


def measure_one(kernels: str, precision: str, model: str, tokens: int) -> dict[str, Any]:
    """Runs in a process of its own: what the backend needs, in seconds, bytes and operations."""
    import torch

    from megaverl.config.schema import OptimizerConfig
    from megaverl.data.batch import SequenceBatch
    from megaverl.models.policy import PolicyModel
    from megaverl.parallel.device import SHORT, choose_device
    from megaverl.parallel.layout import Layout
    from megaverl.parallel.optimizer import StepResult
    from megaverl.parallel.setup import init_distributed, init_model_parallel, teardown

    device = choose_device(precision=precision, kernels=kernels, device="cuda")
    init_distributed(0, 1, "127.0.0.1", _free_port(), device)
    init_model_parallel(Layout(), seed=0)
    shape, lengths = MODELS[model], sequence_lengths(tokens)
    policy = PolicyModel(shape, Layout(), device, trainable=True)
    policy.prepare_training(OptimizerConfig(), total_updates=1)
    policy.optimizer.step = lambda: StepResult(grad_norm=0.0, lr=0.0, applied=False)  # not what is measured
    draw = torch.randint(0, shape.vocab, (tokens,), generator=torch.Generator().manual_seed(0)).split(lengths)
    batch = SequenceBatch.from_lists([d[:1].tolist() for d in draw], [d[1:].tolist() for d in draw])
    scored = tokens - len(lengths)

    def loss(batch: Any, log_probs: Any, entropy: Any) -> tuple[Any, dict[str, Any]]:
        value = -log_probs.sum() / scored
        return value, {"loss": value, "entropy": entropy.sum() / scored}

    def step() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        found.append(policy.update(batch, [list(range(len(lengths)))], loss, temperature=1.0).sums)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    found: list[dict[str, Any]] = []
    fp32 = device.dtype != SHORT
    product = (device.dtype, 4096 if fp32 else 8192)
    rested = matmul_rate(*product, 0.0)
    for _ in range(WARM_UP):
        step()
    rates = [matmul_rate(*product, 1.0)]
    torch.cuda.reset_peak_memory_stats()
    wall = [step() for _ in range(TIMED if not fp32 else 3)]
    peak = torch.cuda.max_memory_allocated()
    busy, count, top = _profile(step)
    rates.append(matmul_rate(*product, 1.0))
    flop, rate = matmul_flop(shape, lengths, scored), statistics.mean(rates)
    teardown()
    return {
        "kernels": device.backend,
        "dtype": str(device.dtype).removeprefix("torch."),
        "reason": device.reason,
        "loss": float(found[-1]["loss"]),
        "wall_s": statistics.median(wall),
        "wall_all_s": wall,
        "busy_s": busy,
        "launches": count,
        "tokens_per_s": tokens / statistics.median(wall),
        "matmul_flop": flop,
        "matmul_rates": rates,
        "share_of_rate": flop / rate / busy,
        "rested_matmul_rate": rested,
        "share_of_rested_rate": flop / rested / busy,
        "peak_bytes": peak,
        "top_kernels": top,
    }


def _profile(step: Any) -> tuple[float, int, list[tuple[str, float, int]]]:
    """Seconds per step in which the GPU worked, launches per step, and the kernels that took longest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(PROFILED):
            step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    busy, until = 0.0, float("-inf")
    for event in sorted(work, key=lambda e: e["ts"]):  # microseconds; overlapping ones count once
        end = event["ts"] + event["dur"]
        busy += max(end - max(event["ts"], until), 0.0)
        until = max(until, end)
    time_of, count_of = Counter(), Counter()
    for event in work:
        time_of[event["name"]] += event["dur"]
        count_of[event["name"]] += 1
    top = [(n, t / 1e6 / PROFILED, count_of[n] // PROFILED) for n, t in time_of.most_common(40)]
    return busy / 1e6 / PROFILED, len(work) // PROFILED, top


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def in_process(kernels: str, precision: str, model: str, tokens: int) -> dict[str, Any]:
    """`measure_one` in a fresh process: the backends must not share what is loaded or allocated."""
    command = [sys.executable, "-m", "benchmarks.kernels", "--one", "--kernels", kernels, "--precision", precision]
    command += ["--model", model, "--tokens", str(tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ, cwd=ROOT)
    if done.returncode:
        return {"kernels": kernels, "failed": f"exit code {done.returncode}, see above"}
    return json.loads(done.stdout.splitlines()[-1])


def row(found: dict[str, Any]) -> list[Any]:
    if "failed" in found:
        return [found["kernels"], found["failed"], *[""] * (len(COLUMNS) - 2)]
    rate = statistics.mean(found["matmul_rates"])
    return [
        found["kernels"],
        found["dtype"],
        f"{found['tokens_per_s']:,.0f}",
        f"{found['wall_s'] * 1e3:.1f}",
        f"{found['busy_s'] * 1e3:.1f}",
        f"{found['wall_s'] / found['busy_s']:.3f}",
        f"{rate / 1e12:.0f}",
        f"{found['share_of_rate']:.1%}",
        f"{found['rested_matmul_rate'] / 1e12:.0f}",
        f"{found['share_of_rested_rate']:.1%}",
        f"{found['peak_bytes'] / 2**30:.1f}",
        found["launches"],
    ]


COLUMNS = ("kernels", "dtype", "tokens/s", "wall ms", "busy ms", "wall/busy", "matmul TFLOP/s", "share of it")
COLUMNS += ("rested TFLOP/s", "share of it", "peak GiB", "launches")
TARGETS = {"te": 0.68, "flash": 0.56}


def measure(arguments: argparse.Namespace) -> Result:
    wanted = [arguments.kernels] if arguments.kernels else list(BACKENDS)
    if os.environ.get("MEGAVERL_CAPABILITY") and not arguments.kernels:
        wanted = ["auto"]
    found = [in_process(k, arguments.precision, arguments.model, arguments.tokens) for k in wanted]
    title = f"Qwen2.5-{arguments.model} shape, {arguments.tokens} packed tokens, forward and backward"
    good = [f for f in found if "failed" not in f]
    reached = all(
        f["share_of_rate"] >= TARGETS[f["kernels"]] and f["wall_s"] <= 1.1 * f["busy_s"]
        for f in good
        if f["kernels"] in TARGETS and arguments.model == "1.5b"
    )
    lines = [f"{f['kernels']}: {f['reason']}; loss {f['loss']:.4f}" for f in good]
    numbers = {"model": arguments.model, "tokens": arguments.tokens, "backends": found}
    return Result(numbers, [Table(title, COLUMNS, [row(f) for f in found])], lines, reached and len(good) == len(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernels", choices=("auto", *BACKENDS), help="one backend; all that there are when not given")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument("--model", choices=tuple(MODELS), default="1.5b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    if "--one" in sys.argv:
        known, _ = parser.parse_known_args()
        print(json.dumps(measure_one(known.kernels or "auto", known.precision, known.model, known.tokens)))
    else:
        sys.exit(main(parser, measure))
