"""Process groups: joins the world, makes Megatron's groups for a layout, and takes them down again."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megaverl.parallel.device import Device
from megaverl.parallel.layout import Coordinates, Layout


@dataclass(frozen=True)
class Grid:
    """This rank's place in the train layout.

    Attributes:
        at: its coordinates.
        tp, dp, pp: the process groups of ranks that differ from it in that coordinate alone.
    """

    layout: Layout
    rank: int
    at: Coordinates
    tp: dist.ProcessGroup
    dp: dist.ProcessGroup
    pp: dist.ProcessGroup

    @property
    def first_stage(self) -> bool:
        """This rank holds the embedding."""
        return self.at.pp == 0

    @property
    def last_stage(self) -> bool:
        """This rank holds the output layer."""
        return self.at.pp == self.layout.pp - 1


def init_distributed(
    rank: int,
    world: int,
    master_addr: str,
    master_port: int,
    device: Device,
    *,
    local_rank: int = 0,
    timeout_s: float = 600.0,
) -> None:
    """Joins the world of ``world`` ranks; a world that this process already joined is kept if it is the same one.

    Call this before a vLLM engine is made: it finds the world initialised and joins it with groups of its own
    (it reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which are set here).

    Args:
        local_rank: index of this process's GPU among those it sees.
        timeout_s: seconds after which a collective that a rank never joined fails.

    Raises:
        RuntimeError: the process belongs to a world of another size or has another rank in it.
    """
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(local_rank),
        MASTER_ADDR=master_addr,
        MASTER_PORT=str(master_port),
    )
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world):
            raise RuntimeError(
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already, not {rank} of {world}"
            )
    else:
        if device.kind == "cuda":
            torch.cuda.set_device(local_rank)
        dist.init_process_group(
            device.collective_backend,
            init_method=f"tcp://{master_addr}:{master_port}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
    if device.kind == "cpu":
        from megaverl.parallel.cpu_adapter import install

        install()


def init_model_parallel(layout: Layout, seed: int) -> Grid:
    """Makes Megatron's process groups for ``layout`` and seeds its random states; collective over the world.

    Megatron seeds TP ranks apart and DP ranks alike, so that replicas start from the same weights.

    Raises:
        RuntimeError: the layout does not fill the world, or groups for another layout exist.
    """
    from megaverl.parallel.compat_megatron import model_parallel_cuda_manual_seed, parallel_state

    if layout.world != dist.get_world_size():
        raise RuntimeError(f"layout {layout} has {layout.world} ranks, the world {dist.get_world_size()}")
    if parallel_state.model_parallel_is_initialized():
        raise RuntimeError("process groups of a layout exist already; call teardown_model_parallel first")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        create_gloo_process_groups=False,  # only Megatron's own old checkpoint format gathers through them
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return current_grid(layout)


def current_grid(layout: Layout) -> Grid:
    """This rank's `Grid` in the groups that exist."""
    from megaverl.parallel.compat_megatron import parallel_state

    rank = dist.get_rank()
    grid = Grid(
        layout=layout,
        rank=rank,
        at=layout.coordinates(rank),
        tp=parallel_state.get_tensor_model_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
    )
    found = (grid.tp.rank(), grid.dp.rank(), grid.pp.rank())
    if found != (grid.at.tp, grid.at.dp, grid.at.pp):
        raise RuntimeError(f"Megatron put rank {rank} at (tp, dp, pp) {found}, the layout {layout} at {grid.at}")
    return grid


def teardown_model_parallel() -> None:
    """Destroys Megatron's groups; the world stays. Collective over the world.

    Megatron itself only forgets its groups: their connections and threads would stay (dozens of threads per layout).
    """
    from megaverl.parallel.compat_megatron import model_parallel_groups, parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return
    groups = model_parallel_groups()
    parallel_state.destroy_model_parallel()
    dist.barrier()  # nobody closes a connection that a neighbour still reads from
    for group in groups:
        dist.destroy_process_group(group)


def teardown() -> None:
    """Destroys Megatron's groups and leaves the world."""
    from megaverl.parallel.compat_megatron import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
