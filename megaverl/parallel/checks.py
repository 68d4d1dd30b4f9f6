"""Whether a model can be divided as a layout asks. Pure; run before any process starts."""

from __future__ import annotations

from megaverl.errors import Problems
from megaverl.models.shape import ModelShape
from megaverl.parallel.layout import Layout


def working_tp(shape: ModelShape, limit: int = 64) -> list[int]:
    """Tensor parallel sizes up to ``limit`` that divide heads and the MLP's columns, and that divide the KV heads or
    are a multiple of them (each KV head is then held by several ranks)."""
    return [tp for tp in range(1, limit + 1) if not _undivided(shape, tp)]


def check_layout(
    shape: ModelShape,
    layout: Layout,
    rollout_tp: int | None,
    problems: Problems,
    sequence_parallel: bool = False,
    world: int | None = None,
) -> None:
    """Adds to ``problems`` everything that keeps ``shape`` from being trained in ``layout``.

    Args:
        rollout_tp: tensor parallel size of the rollout, None without a rollout.
        world: number of workers, when it was not derived from the layout.
    """
    _check_tp(shape, layout.tp, "actor.layout.tp", problems)
    if rollout_tp is not None:
        _check_tp(shape, rollout_tp, "rollout.tp", problems)
        if layout.world % rollout_tp:
            problems.add(
                f"{layout.world} workers cannot be divided into rollout replicas of {rollout_tp}",
                where="rollout.tp",
                fix=f"use a divisor of {layout.world}",
            )
    if layout.pp * layout.vpp > shape.layers:
        stages = f"{layout.pp * layout.vpp} pipeline stages"
        problems.add(
            f"{shape.layers} layers cannot fill {stages}" + (f" (pp x vpp {layout.vpp})" if layout.vpp > 1 else ""),
            where="actor.layout.pp",
            fix=f"use at most {max(1, shape.layers // layout.vpp)}" + (", or a smaller vpp" if layout.vpp > 1 else ""),
        )
    if sequence_parallel and layout.tp == 1:
        problems.add(
            "sequence parallelism divides tokens between TP ranks, and there is one TP rank",
            where="actor.layout.sequence_parallel",
            fix="set it to false, or actor.layout.tp above 1",
        )
    if world is not None and world != layout.world:
        problems.add(
            f"the layout {layout} has {layout.world} ranks but there are {world} workers",
            where="cluster.nodes x cluster.workers_per_node",
            fix=f"use a multiple of {layout.tp * layout.pp * layout.cp} workers",
        )
    _refuse_unbuilt(layout, problems)


def _check_tp(shape: ModelShape, tp: int, where: str, problems: Problems) -> None:
    for what, count in _undivided(shape, tp):
        problems.add(
            f"{count} {what} cannot be divided over {tp} ranks",
            where=f"{where}={tp}",
            fix=f"for this model use one of {_listed(working_tp(shape))}",
        )


def _undivided(shape: ModelShape, tp: int) -> list[tuple[str, int]]:
    counts = {"attention heads": shape.heads, "MLP columns": shape.intermediate}
    if tp % shape.kv_heads:  # a multiple of the KV heads is fine: several ranks hold the same one
        counts["KV heads"] = shape.kv_heads
    # The vocabulary is padded to a multiple of tp (`ModelShape.padded_vocab`), so it always divides.
    return [(what, count) for what, count in counts.items() if count % tp]


def _refuse_unbuilt(layout: Layout, problems: Problems) -> None:
    reasons = {
        "cp": "context parallelism needs an attention that exchanges keys between ranks, which is not built yet",
        "ep": "expert parallelism needs a mixture-of-experts model, and no such family is supported yet",
    }
    for name, reason in reasons.items():
        if getattr(layout, name) > 1:
            problems.add(reason, where=f"actor.layout.{name}={getattr(layout, name)}", fix="use 1")


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values))
