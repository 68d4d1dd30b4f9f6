"""Layouts: the sizes of one grid of ranks and the coordinates of each rank. Pure.

Rank order is Megatron-Core's default ``tp-cp-ep-dp-pp``: TP neighbours are adjacent ranks, then CP, then
DP, and PP is outermost. vLLM numbers its replicas ``dp-pp-tp`` with TP innermost, so TP groups of a train
layout with pp = 1 and a rollout layout with the same tp are the same ranks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coordinates:
    """Where a rank sits in a layout; each field counts from 0."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class Layout:
    """Sizes of one grid of ranks.

    Attributes:
        tp: tensor parallel size.
        pp: pipeline parallel size.
        dp: data parallel size.
        cp: context parallel size.
        ep: expert parallel size; it divides dp and adds no ranks.
        vpp: model chunks a pipeline rank holds (virtual pipeline); 1 is none.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "cp", "ep", "vpp"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"layout size {name} must be a whole number of at least 1, got {size!r}")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp * self.cp

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of ``rank``; raises IndexError outside ``range(world)``."""
        if not 0 <= rank < self.world:
            raise IndexError(f"rank {rank} is outside a layout of {self.world} ranks")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp)

    def rank_of(self, at: Coordinates) -> int:
        """The rank at these coordinates; the inverse of `coordinates`."""
        return ((at.pp * self.dp + at.dp) * self.cp + at.cp) * self.tp + at.tp

    def __str__(self) -> str:
        parts = [f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}"]
        parts += [f"{n}{getattr(self, n)}" for n in ("cp", "ep", "vpp") if getattr(self, n) > 1]
        return "-".join(parts)


def divide_world(world: int, *, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, vpp: int = 1) -> Layout:
    """The layout that fills ``world`` ranks: dp takes what tp, pp and cp leave.

    Raises:
        ValueError: tp * pp * cp does not divide the world.
    """
    model = tp * pp * cp
    if world < model or world % model:
        raise ValueError(
            f"{world} workers cannot hold tp {tp} x pp {pp} x cp {cp} = {model} ranks: "
            f"the number of workers must be a multiple of {model}"
        )
    return Layout(tp=tp, pp=pp, dp=world // model, cp=cp, ep=ep, vpp=vpp)


def stage_layers(layers: int, pp: int = 1, vpp: int = 1) -> list[list[list[int]]]:
    """Which layers each model chunk of each pipeline rank holds, as global numbers: ``[pipeline rank][chunk]``.

    Chunk c of rank r is stage ``c * pp + r``; stages follow each other in the order of the layers. Stages differ by one
    layer at most. What remains after an even division goes, layer by layer, to the rank with the least work so far,
    where the output layer on the last rank counts as one layer and the embedding on the first as half a one: 5 layers
    on 3 ranks are 2, 2, 1 and 4 layers 1, 2, 1.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    stages = pp * vpp
    if layers < stages:
        raise ValueError(f"{layers} layers cannot fill {stages} pipeline stages (pp {pp} x vpp {vpp})")
    even, left = divmod(layers, stages)
    sizes = [even] * stages
    work = [float(even * vpp)] * pp
    work[0] += 0.5
    work[-1] += 1.0
    for _ in range(left):
        stage = min((s for s in range(stages) if sizes[s] == even), key=lambda s: (work[s % pp], s))
        sizes[stage] += 1
        work[stage % pp] += 1
    starts = [sum(sizes[:s]) for s in range(stages)]
    numbers = [list(range(starts[s], starts[s] + sizes[s])) for s in range(stages)]
    return [numbers[r::pp] for r in range(pp)]
