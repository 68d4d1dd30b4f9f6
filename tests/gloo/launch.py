"""Runs a function in several real processes joined by gloo, for tests.

    results = run_ranks(work, 2, argument)      # work(rank, world, argument) in each process

`work` must be a function at the top of a module (it is pickled by name). The values it returns come back as a list by
rank; the first exception of a rank is raised here as `RankError` with the child's traceback.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

START_VARIABLES = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": "lo"}
PRELOAD = ["torch.distributed", "transformers.models.qwen2.modeling_qwen2", "megaverl.models.policy"]


class RankError(AssertionError):
    """A rank failed; the text is its traceback."""


def free_port() -> int:
    """A TCP port on localhost that nobody listens on right now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_ranks(
    fn: Callable[..., Any], world: int, *args: Any, timeout: float = 240.0, join_world: bool = True, fork: bool = True
) -> list[Any]:
    """Calls ``fn(rank, world, *args)`` in ``world`` processes and returns what they returned, by rank.

    Args:
        timeout: seconds for all of it; whoever still runs then is killed and named.
        join_world: initialise torch.distributed (gloo) before ``fn``; without it only the usual variables
            (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) are set.
        fork: start from a process with the imports done; False where these touch the GPU, which no fork survives.

    Raises:
        RankError: a rank raised, died or was too slow.
    """
    # A server that has imported the big libraries forks the ranks: clean processes without the price of the imports.
    context = multiprocessing.get_context("forkserver" if fork else "spawn")
    context.set_forkserver_preload(PRELOAD)
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        port = free_port()
        ranks = [
            context.Process(target=_rank_main, args=(fn, r, world, port, folder, join_world, results, args))
            for r in range(world)
        ]
        with _started_with(START_VARIABLES):
            for process in ranks:
                process.start()
        try:
            return _collect(ranks, results, timeout)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()


@contextmanager
def _started_with(variables: Mapping[str, str]) -> Iterator[None]:
    """Processes started inside have the variables; tests that come later, in this process, must not."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _collect(ranks: list[Any], results: Any, timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    values: dict[int, Any] = {}
    while len(values) < len(ranks):
        try:
            rank, ok, value = results.get(timeout=0.2)
        except queue.Empty:
            dead = [(r, p.exitcode) for r, p in enumerate(ranks) if r not in values and p.exitcode not in (None, 0)]
            if dead:
                raise RankError(f"rank {dead[0][0]} died with exit code {dead[0][1]}") from None
            if time.monotonic() > deadline:
                missing = sorted(set(range(len(ranks))) - set(values))
                raise RankError(f"ranks {missing} gave no result within {timeout:.0f} s") from None
            continue
        if not ok:
            raise RankError(f"rank {rank} failed:\n{value}")
        values[rank] = value
    for process in ranks:
        process.join(10)
    return [values[r] for r in range(len(ranks))]


def _rank_main(fn, rank, world, port, folder, join_world, results, args) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if join_world:
            store = (Path(folder) / "rendezvous").as_uri()
            dist.init_process_group(
                "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=120)
            )
        value = fn(rank, world, *args)
        results.put((rank, True, value))
        if dist.is_initialized():
            dist.barrier()  # nobody leaves while a neighbour still reads from it
            dist.destroy_process_group()
    except BaseException:  # the parent raises it again, whatever it is
        results.put((rank, False, traceback.format_exc()))
        results.close()
        results.join_thread()
        os._exit(1)
