"""vLLM as its users run it: `LLM.generate` with weights from the checkpoint, in processes of its own, nothing of ours.

Only what would make the comparison unfair is set: the engine runs in the process that calls it, with the same options,
threads and requests (a seed each, log-probs of the sampled tokens, no detokenizing) as the rollout it is compared with.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from megaverl.config.schema import Config
from megaverl.rollout.engine import Sampling
from megaverl.rollout.requests import request_seed

START_TIMEOUT, CALL_TIMEOUT = 300.0, 300.0


@dataclass(frozen=True)
class Plan:
    """What each rank is told."""

    tp: int
    port: int
    threads: int
    device: str
    model: str
    engine: dict[str, Any]


class BareVllm:
    """``tp`` processes with one vLLM; a context, ends them when left."""

    def __init__(self, config: Config, tp: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        cpu = config.cluster.device == "cpu"
        cache = {"kv_cache_memory_bytes": int(config.rollout.cpu_cache_gb * 2**30), "enforce_eager": True}
        gpu = {
            "gpu_memory_utilization": config.rollout.gpu_memory_utilization,
            "enforce_eager": config.rollout.enforce_eager,
        }
        engine = {
            "max_model_len": config.data.max_prompt_length + config.data.max_response_length,
            "max_num_seqs": config.rollout.max_num_seqs,
            "max_num_batched_tokens": config.rollout.max_num_batched_tokens,
            "dtype": "float32" if cpu else "auto",
            **(cache if cpu else gpu),
        }
        self._plan = Plan(
            tp, port, config.cluster.threads_per_worker, "cpu" if cpu else "cuda", config.model.path, engine
        )
        self.threads = 0

    def __enter__(self) -> BareVllm:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(self._plan.tp)]
        self._ends = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(self._plan, rank, theirs)) for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        try:
            self.threads = max(self._receive(START_TIMEOUT))
        except BaseException:
            self.__exit__()
            raise
        return self

    def generate(self, prompts: Sequence[Sequence[int]], keys: Sequence[int], sampling: Sampling) -> tuple[float, int]:
        """Answers the requests; returns the seconds of the slowest rank inside `LLM.generate` and the tokens made."""
        for end in self._ends:
            end.send((prompts, keys, sampling))
        found = self._receive(CALL_TIMEOUT)
        return max(seconds for seconds, _ in found), found[0][1]

    def _receive(self, timeout: float) -> list[Any]:
        found = []
        for rank, end in enumerate(self._ends):
            if not end.poll(timeout):
                raise RuntimeError(f"bare vLLM, rank {rank}: no answer within {timeout:.0f} s")
            value = end.recv()
            if isinstance(value, str):
                raise RuntimeError(f"bare vLLM, rank {rank}:\n{value}")
            found.append(value)
        return found

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(plan: Plan, rank: int, end: Connection) -> None:
    try:
        llm = _start(plan, rank)
        import torch

        end.send(torch.get_num_threads())
        while True:
            end.send(_answer(llm, *end.recv()))
    except EOFError:  # the benchmark ended
        return
    except BaseException:  # whatever it is, the benchmark raises it
        end.send(traceback.format_exc())


def _start(plan: Plan, rank: int) -> Any:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS=str(plan.threads),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(plan.port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(plan.tp),
    )
    import torch

    torch.set_num_threads(plan.threads)
    warnings.simplefilter("ignore")
    spread, surroundings = {}, contextlib.nullcontext()
    if plan.tp > 1:
        import torch.distributed as dist

        from megaverl.rollout.compat_vllm import starting

        dist.init_process_group(backend=None if torch.cuda.is_available() else "gloo")
        # A name of its own for the shared memory, which a bare vLLM would name alike in every run and leave behind.
        spread, surroundings = {"distributed_executor_backend": "external_launcher"}, starting(plan.device)
    with surroundings:
        from vllm import LLM

        return LLM(
            model=plan.model,
            skip_tokenizer_init=True,
            generation_config="vllm",
            tensor_parallel_size=plan.tp,
            seed=0,
            use_tqdm_on_load=False,
            **spread,
            **plan.engine,
        )


def _answer(llm: Any, prompts: Sequence[Sequence[int]], keys: Sequence[int], sampling: Sampling) -> tuple[float, int]:
    from vllm import SamplingParams

    requests = [{"prompt_token_ids": list(p)} for p in prompts for _ in range(sampling.n)]
    params = [
        SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            seed=request_seed(sampling.seed, key, sample),
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
        )
        for key in keys
        for sample in range(sampling.n)
    ]
    llm.reset_prefix_cache()  # as after every update of the weights
    began = time.perf_counter()
    outputs = llm.generate(requests, params, use_tqdm=False)
    return time.perf_counter() - began, sum(len(o.outputs[0].token_ids) for o in outputs)
