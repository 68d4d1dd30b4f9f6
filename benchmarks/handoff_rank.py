"""What each rank of `benchmarks/handoff.py` does: the training weights, vLLM on them, handoffs; or a vLLM by itself."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaverl.models.shape import ModelShape
from megaverl.parallel.layout import Layout
from megaverl.rollout.engine import Sampling

SPREAD = 0.02
"""Standard deviation of the start weights; of an update it is a tenth."""
PROMPT_TOKENS = 64
DECODE_STEPS = 32
SPENT = ("transfer", "wake_weights", "wake", "commit", "to_rollout", "to_train")


@dataclass(frozen=True)
class Job:
    """What all ranks are told.

    Attributes:
        folder: holds ``config/config.json``; the checkpoint is exported to ``export``.
        rows: sequences that a decode step works on.
    """

    folder: Path
    port: int
    shape: ModelShape
    train: Layout
    rollout_tp: int
    precision: str
    device: str
    handoffs: int
    updates: int
    rows: int
    utilization: float
    eager: bool
    bucket_mb: int

    @property
    def config(self) -> Any:
        """The rollout section of the configuration."""
        from megaverl.config.schema import RolloutConfig

        return RolloutConfig(
            gpu_memory_utilization=self.utilization,
            cpu_cache_gb=0.25,
            max_num_seqs=max(self.rows, 16),
            enforce_eager=self.eager,
        )

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus response."""
        return PROMPT_TOKENS + DECODE_STEPS + 1

    def sampling(self, new_tokens: int) -> Sampling:
        """Greedy, whatever is generated."""
        return Sampling(1, 0.0, 1.0, -1, new_tokens, seed=0, ignore_end=True)

    @property
    def prompts(self) -> list[list[int]]:
        """Random prompts, the same everywhere."""
        import torch

        g = torch.Generator().manual_seed(1)
        return torch.randint(0, self.shape.vocab, (self.rows, PROMPT_TOKENS), generator=g).tolist()


def join(job: Job, rank: int, world: int) -> Any:
    """The device of this rank, which has joined the world."""
    from megaverl.parallel.device import choose_device
    from megaverl.parallel.setup import init_distributed

    device = choose_device(precision=job.precision, device=job.device, kernels="eager")
    init_distributed(rank, world, "127.0.0.1", job.port, device, local_rank=rank)
    return device


def with_training_weights(rank: int, world: int, job: Job) -> dict[str, Any]:
    """Everything that is measured on the rank of a run."""
    import torch.distributed as dist

    from megaverl.checkpoint.hf_export import ModelRanks, export_hf
    from megaverl.models.family import weight_map
    from megaverl.models.policy import PolicyModel
    from megaverl.parallel.offload import GradientBuffers
    from megaverl.parallel.optimizer import wrap_data_parallel
    from megaverl.parallel.setup import init_model_parallel
    from megaverl.resharding.hybrid_engine import HybridEngine
    from megaverl.resharding.planner import make_plan
    from megaverl.resharding.transfer import Transfer
    from megaverl.rollout.vllm_engine import VllmEngine

    device = join(job, rank, world)
    grid = init_model_parallel(job.train, seed=0)
    policy = PolicyModel(job.shape, job.train, device, trainable=True)
    # As training has them: parameters in the flat buffer of the distributed optimizer. Nothing trains, so no optimizer.
    chunks = [wrap_data_parallel(chunk, distributed_optimizer=True) for chunk in policy.chunks]
    GradientBuffers(chunks).free()
    params = {name: p.detach() for name, p in policy.parameters_by_name().items()}
    write_weights(job, params, grid.at.tp, 0)
    table = weight_map(job.shape)
    plan = make_plan(table, job.train, job.rollout_tp, element_bytes=device.dtype.itemsize)
    own = plan.ranks[rank]

    before = used_memory(job)
    engine = VllmEngine(
        job.folder / "config",
        job.shape,
        plan,
        params,
        job.train,
        job.config,
        job.max_model_len,
        device.torch_device,
    )
    found: dict[str, Any] = {
        "dtype": str(device.dtype).removeprefix("torch."),
        "bytes_received_bound": own.bytes_received_bound,
        "bytes_sent": sum(part.bytes * len(c.layers) for _, c, _, part in plan.sent_by(rank)),
        "planned": {n: getattr(own, n) for n in ("bytes_aliased", "bytes_copied", "bytes_received")},
        "planned_peak": own.peak_extra_bytes + (job.bucket_mb << 20 if plan.bytes_received else 0),
        "training_bytes": sum(p.numel() * p.element_size() for p in params.values()),
        "rollout_bytes": sum(t.numel() * t.element_size() for t in engine.weights.values()),
        "parameter_bytes_added_by_vllm": engine.binding.bytes_added,
        "device_added": used_memory(job) - before - cache_bytes(engine._llm),
    }
    transfer = Transfer(plan, rank, params, engine.weights, job.bucket_mb << 20, "off")
    hybrid = HybridEngine(engine, own, transfer)
    texts = []
    for update in range(1, job.updates + 1):
        write_weights(job, params, grid.at.tp, update)
        hybrid.to_rollout(update)
        transfer.check("full")
        texts.append([c.token_ids for c in engine.generate(job.prompts, range(job.rows), job.sampling(DECODE_STEPS))])
        hybrid.to_train()
    found["texts"], found["texts_differ"] = texts[-1], all(a != b for a, b in itertools.pairwise(texts))
    found |= repeat_handoffs(job, hybrid, engine, params)
    found["bandwidth"] = bandwidth(job, rank, world, device)
    hybrid.to_rollout(job.updates + job.handoffs + 1)
    found["busy"] = decode_busy(job, lambda n: engine.generate(job.prompts, range(job.rows), job.sampling(n)))
    engine.check_binding()
    if not grid.at.dp:
        kind = {"float32": "F32", "bfloat16": "BF16"}[found["dtype"]]
        ranks = ModelRanks(job.train.tp, grid.at.tp, grid.tp, job.train.pp, grid.at.pp, grid.pp)
        types = dict.fromkeys(table.hf_names(), kind)
        export_hf(params, table, job.folder / "export", ranks, source=job.folder / "config", types=types)
    dist.barrier()
    return found


def repeat_handoffs(job: Job, hybrid: Any, engine: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """There and back ``job.handoffs`` times: seconds by phase, bytes, peak of extra memory, growth of the process."""
    import psutil
    import torch.distributed as dist

    spent: dict[str, list[float]] = {n: [] for n in SPENT}
    ours = {t.untyped_storage().data_ptr() for t in params.values()}
    extra = sum(t.numel() * t.element_size() for t in engine.weights.values() if _storage(t) not in ours)
    timed(job, hybrid.transfer, "run", spent["transfer"])
    timed(job, engine, "wake_weights", spent["wake_weights"])
    timed(job, engine, "wake", spent["wake"])
    timed(job, engine, "serve_version", spent["commit"])
    resident, peaks, report = [], [], {}
    for number in range(job.handoffs):
        synchronize(job)
        start = reset_peak(job)
        dist.barrier()
        began = time.perf_counter()
        report = hybrid.to_rollout(job.updates + number + 1)
        synchronize(job)
        spent["to_rollout"].append(time.perf_counter() - began)
        peaks.append(extra + (peak_of(job) - start if job.device == "cuda" else report["handoff/staging_peak"]))
        engine.generate(job.prompts, range(job.rows), job.sampling(1))  # leaves prefixes in the KV cache
        began = time.perf_counter()
        hybrid.to_train()
        synchronize(job)
        spent["to_train"].append(time.perf_counter() - began)
        if number % 10 == 9:
            resident.append(psutil.Process().memory_info().rss)
    return {
        "seconds": {name: list(values) for name, values in spent.items()},  # later handoffs are not of these
        "moved": {n: int(report[f"handoff/{n}"]) for n in ("bytes_aliased", "bytes_copied", "bytes_received")},
        "peak_extra": max(peaks),
        "staging_peak": int(report["handoff/staging_peak"]),
        "growth_per_10": [b - a for a, b in itertools.pairwise(resident)],
    }


def timed(job: Job, owner: Any, name: str, into: list[float]) -> None:
    """Every later call of ``owner.name`` adds its seconds, the GPU's work included, to ``into``."""
    plain = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        began = time.perf_counter()
        value = plain(*arguments)
        synchronize(job)
        into.append(time.perf_counter() - began)
        return value

    setattr(owner, name, call)


def write_weights(job: Job, params: Mapping[str, Any], tp_rank: int, update: int) -> None:
    """Start weights (update 0), or a random change of all weights in place: the same in every layout."""
    import torch

    from megaverl.models.family import weight_map

    table = weight_map(job.shape)
    device = next(iter(params.values())).device
    for row in table.expand():
        if row.megatron not in params:
            continue
        param = params[row.megatron]
        if not update:
            param.zero_()
        for piece in table.pieces(row, job.train.tp, tp_rank):
            g = torch.Generator(device).manual_seed(zlib.crc32(f"{update}/{piece.hf}".encode()))
            shape = table.hf_shape(piece.hf)
            change = torch.randn(shape, generator=g, device=device, dtype=param.dtype)[piece.source]
            change *= SPREAD if not update else SPREAD / 10
            if not update and "norm" in piece.hf:
                change += 1.0
            param[piece.target] += change


def bandwidth(job: Job, rank: int, world: int, device: Any) -> float | None:
    """Bytes per second of one rank's stream to another, one way, rank 0 to 1; None with one rank."""
    import torch
    import torch.distributed as dist

    if world == 1:
        return None
    size = (256 if job.device == "cuda" else 16) << 20
    data = torch.zeros(size, dtype=torch.uint8, device=device.torch_device)
    seconds = []
    for _ in range(8):
        dist.barrier()
        synchronize(job)
        began = time.perf_counter()
        if rank < 2:
            (dist.isend(data, 1) if rank == 0 else dist.irecv(data, 0)).wait()
        synchronize(job)
        seconds.append(time.perf_counter() - began)
    found = torch.tensor([statistics.median(seconds[2:])], dtype=torch.float64, device=device.torch_device)
    dist.broadcast(found, src=1)
    return size / found.item()


def by_itself(rank: int, world: int, job: Job) -> dict[str, Any]:
    """Plain vLLM on the exported checkpoint: its greedy text, the GPU's time in a decode step, the memory it takes."""
    from megaverl.rollout import compat_vllm, compat_vllm_sampler

    device = join(job, rank, world)
    compat_vllm.prepare_environment()
    before = used_memory(job)
    cuda = {"gpu_memory_utilization": job.utilization, "enforce_eager": job.eager, "enable_sleep_mode": True}
    cpu = {"enforce_eager": True, "kv_cache_memory_bytes": int(job.config.cpu_cache_gb * (1 << 30))}
    with compat_vllm.starting(device.kind):
        from vllm import LLM, SamplingParams

        llm = LLM(
            model=str(job.folder / "export"),
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype=str(device.dtype).removeprefix("torch."),
            tensor_parallel_size=world,
            distributed_executor_backend="external_launcher",
            max_model_len=job.max_model_len,
            max_num_seqs=job.config.max_num_seqs,
            logprobs_mode=compat_vllm_sampler.logprobs_mode(device.kind),
            seed=0,
            **(cpu if device.kind == "cpu" else cuda),
        )
    compat_vllm.keep_world(llm)
    compat_vllm_sampler.tune_sampler(llm, device.kind)
    added = used_memory(job) - before - cache_bytes(llm)

    def generate(new_tokens: int) -> list[list[int]]:
        llm.reset_prefix_cache()
        how = SamplingParams(
            temperature=0.0,
            max_tokens=new_tokens,
            seed=0,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
        )
        outputs = llm.generate([{"prompt_token_ids": p} for p in job.prompts], how, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]

    return {"texts": generate(DECODE_STEPS), "device_added": added, "busy": decode_busy(job, generate)}


def decode_busy(job: Job, generate: Callable[[int], Any]) -> dict[str, float] | None:
    """Seconds in which the GPU works, and launches, per decode step: the difference that 32 more steps make."""
    if job.device != "cuda":
        return None
    for new_tokens in (DECODE_STEPS + 1, 1):
        generate(new_tokens)
    rounds = []
    for _ in range(3):
        long, short = (_profile(lambda n=n: generate(n)) for n in (DECODE_STEPS + 1, 1))
        rounds.append([(a - b) / DECODE_STEPS for a, b in zip(long, short, strict=True)])
    return {"seconds": statistics.median(r[0] for r in rounds), "launches": statistics.median(r[1] for r in rounds)}


def _profile(work: Callable[[], Any]) -> tuple[float, int]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        work()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    events = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    busy, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda e: e["ts"]):  # microseconds; overlapping ones count once
        end = event["ts"] + event["dur"]
        busy += max(end - max(event["ts"], until), 0.0)
        until = max(until, end)
    return busy / 1e6, len(events)


def cache_bytes(llm: Any) -> int:
    """Device memory of the KV cache; 0 on a CPU."""
    caches = llm.llm_engine.model_executor.driver_worker.worker.model_runner.kv_caches
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in caches if t.is_cuda}
    return sum(storages.values())


def used_memory(job: Job) -> int:
    """Bytes of the GPU in use, torch's unused blocks given back first; 0 on a CPU."""
    if job.device != "cuda":
        return 0
    import gc

    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def synchronize(job: Job) -> None:
    if job.device == "cuda":
        import torch

        torch.cuda.synchronize()


def reset_peak(job: Job) -> int:
    """Bytes allocated now; `peak_of` is the most from here on."""
    if job.device != "cuda":
        return 0
    import torch

    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak_of(job: Job) -> int:
    import torch

    return torch.cuda.max_memory_allocated() if job.device == "cuda" else 0


def _storage(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr()


def serve(function: Callable[..., Any], rank: int, world: int, job: Job, results: Any) -> None:
    """Runs ``function`` in a process of its own and puts (rank, value, traceback or None)."""
    import traceback

    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    import torch

    torch.set_num_threads(1)
    began = time.perf_counter()
    try:
        value = function(rank, world, job)
        results.put((rank, {**value, "part_seconds": time.perf_counter() - began}, None))
    except BaseException:  # the parent raises it again
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)  # nothing is left to do, and an interpreter with a world in it may hang when it ends
