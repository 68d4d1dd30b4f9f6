"""Runs a function in several processes of this machine that are joined by gloo, for commands that check layouts."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

from megaverl.errors import MegaverlError, RunError

GRACE_S = 5.0
"""Seconds that the other ranks have to report once one has failed."""


def run_local(fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = 3600.0) -> list[Any]:
    """Calls ``fn(rank, *args)`` in ``world`` processes, each with its share of the cores; returns the results by rank.

    torch.distributed is joined before. ``fn`` must be a function at the top of a module.

    Raises:
        RunError: a rank failed or died, or the time was up. An error of megaverl's own is raised as it was.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [context.Process(target=_rank, args=(fn, r, world, port, results, args), daemon=True) for r in range(world)]
    for process in ranks:
        process.start()
    try:
        return _collect(ranks, results, timeout_s)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()


def _collect(ranks: list[Any], results: Any, timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    values: dict[int, Any] = {}
    errors: dict[int, MegaverlError] = {}
    while len(values) + len(errors) < len(ranks):
        try:
            rank, value, error = results.get(timeout=0.5)
        except queue.Empty:
            reported = values.keys() | errors.keys()
            dead = [f"{r} (exit code {p.exitcode})" for r, p in enumerate(ranks) if r not in reported and p.exitcode]
            if dead:
                raise RunError(f"processes died: rank {', '.join(dead)}") from None
            if time.monotonic() > deadline:
                break
            continue
        if error is None:
            values[rank] = pickle.loads(value)
            continue
        if not errors:  # the others may follow, and one of them may have died of the real cause
            deadline = min(deadline, time.monotonic() + GRACE_S)
        errors[rank] = error
    if errors:
        raise next(iter(errors.values()))
    if len(values) < len(ranks):
        raise RunError(f"no result after {timeout_s:.0f} s")
    for process in ranks:
        process.join(30)
    return [values[rank] for rank in range(len(ranks))]


def _rank(fn: Callable[..., Any], rank: int, world: int, port: int, results: Any, args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    from megaverl.parallel.device import choose_device
    from megaverl.parallel.setup import init_distributed

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world if hasattr(os, "sched_getaffinity") else 1))
    try:
        init_distributed(rank, world, "127.0.0.1", port, choose_device("fp32", "eager", "cpu"))
        value = fn(rank, *args)
        dist.barrier()  # nobody leaves while a neighbour still reads from it
        # As bytes: a queue would send a tensor as a file descriptor of a process that is about to end.
        results.put((rank, pickle.dumps(value), None))
        dist.destroy_process_group()
    except MegaverlError as error:
        _leave(results, rank, error)
    except Exception:  # whatever it is, the parent raises it
        _leave(results, rank, RunError(f"rank {rank} failed:\n{traceback.format_exc()}"))


def _leave(results: Any, rank: int, error: MegaverlError) -> None:
    results.put((rank, None, error))
    results.close()
    results.join_thread()
    os._exit(1)  # the process group may wait for others for ever
