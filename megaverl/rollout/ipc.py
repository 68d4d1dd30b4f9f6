"""Whether the GPUs of a rollout replica can map each other's memory: containers without ptrace and WSL2 forbid it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def ipc_refusal(
    ranks: Sequence[int],
    export: Callable[[], Any] | None = None,
    map_first_byte: Callable[[Any], int] | None = None,
) -> str | None:
    """Why CUDA IPC does not work between the ranks of a replica; None if it does. Collective over the whole world.

    Each rank exports a small piece of its memory, and the next rank of its replica maps it and reads a byte.

    Args:
        ranks: the global ranks of this rank's replica.
        export: makes something that another process can map (CUDA's handle).
        map_first_byte: reads the first byte behind it.
    """
    rank, kept = dist.get_rank(), []
    handle: Any = None
    try:
        handle = export() if export else _export(kept)
    except Exception as error:
        handle = error if isinstance(error, (RuntimeError, OSError)) else RuntimeError(str(error))
    handles: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(handles, handle)
    neighbour = ranks[(list(ranks).index(rank) + 1) % len(ranks)]
    why = None
    if isinstance(handles[neighbour], Exception):
        why = f"rank {neighbour}: {handles[neighbour]}"
    elif neighbour != rank:
        try:
            found = (map_first_byte or _map_first_byte)(handles[neighbour])
            why = None if found == BYTE else f"rank {rank} read {found} from rank {neighbour} instead of {BYTE}"
        except (RuntimeError, OSError) as error:
            why = f"rank {rank}: {error}"
    answers: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, why)  # all replicas do the same
    return next((a for a in answers if a), None)


BYTE = 77


def custom_all_reduce_off(ranks: Sequence[int], device: str, **probe: Any) -> bool:
    """Whether vLLM has to do without its own all-reduce, which maps the neighbours' memory; says so once if it has."""
    if device != "cuda" or len(ranks) == 1:
        return False
    why = ipc_refusal(ranks, **probe)
    if why and dist.get_rank() == 0:
        logging.getLogger(__name__).warning(
            "CUDA IPC does not work here (%s): vLLM's all-reduce goes through NCCL", why
        )
    return why is not None


def _export(kept: list[torch.Tensor]) -> Any:
    kept.append(torch.full((1 << 20,), BYTE, dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    return kept[0].untyped_storage()._share_cuda_()


def _map_first_byte(handle: Any) -> int:
    storage = torch.UntypedStorage._new_shared_cuda(*handle)
    return int(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[handle[3]].item())
