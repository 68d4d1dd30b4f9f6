"""What a run would be, without a worker, a GPU, Ray, the weights or the rows: the layout and the reshard plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaverl.config.derived import train_layout, uses_rollout
from megaverl.config.rules import check_rules
from megaverl.config.schema import Config
from megaverl.errors import Problems
from megaverl.models.shape import ModelShape
from megaverl.parallel.layout import Layout


@dataclass(frozen=True)
class DryRun:
    """What is known beforehand.

    Attributes:
        notes: combinations of keys that work and may surprise.
        layout: the training layout.
        model: where the sizes of the model are from; None when they are not known.
        plan: the reshard plan in numbers; None where nothing is generated or the sizes are not known.
    """

    notes: list[str]
    layout: Layout
    model: str | None
    plan: dict[str, Any] | None

    def lines(self) -> list[str]:
        """For people."""
        lines = [f"layout: {self.layout}, {self.layout.world} workers", f"model: {self.model or 'sizes not known'}"]
        if self.plan is not None:
            kinds = ("aliased", "copied", "received")
            counts = " · ".join(f"{self.plan[f'bytes_{kind}']:,} {kind}" for kind in kinds)
            step = f"train {self.layout} -> rollout tp{self.plan['rollout_tp']}"
            lines.append(f"reshard plan: {step}, bytes of all ranks: {counts}")
            lines.append(f"reshard plan: extra memory of the worst rank: {self.plan['peak_extra_bytes']:,} bytes")
        return lines


def dry_run(config: Config) -> DryRun:
    """Checks keys, rules, layout and reshard plan.

    Raises:
        UserError: with all problems found.
    """
    problems = Problems()
    notes = check_rules(config, problems)
    problems.raise_if_any()
    layout = train_layout(config)
    shape, source, note = _shape(config.model.path)
    notes += [note] if note else []
    return DryRun(notes, layout, source, reshard_totals(config, layout, shape) if shape else None)


def _shape(path: str) -> tuple[ModelShape | None, str | None, str]:
    """(shape, where it is from, a note)."""
    from megaverl.models.family import load_shape
    from megaverl.models.published import published_name, published_shape

    file = Path(path) / "config.json"
    if file.is_file():
        return load_shape(path), str(file), ""
    name = published_name(path)
    if name:
        note = f"{file} is not there: the sizes are those of the published {name}"
        return published_shape(name), f"the published {name}", note
    return None, None, f"{file} is not there and the model is not a published Qwen2.5 or Qwen3: no plan"


def reshard_totals(config: Config, layout: Layout, shape: ModelShape) -> dict[str, Any] | None:
    """The reshard plan in numbers; None where nothing is generated.

    Raises:
        UserError: the model cannot be divided so.
    """
    from megaverl.models.family import weight_map
    from megaverl.parallel.checks import check_layout
    from megaverl.resharding.planner import make_plan

    rollout_tp = config.rollout.tp or layout.tp if uses_rollout(config) else None
    problems = Problems()
    check_layout(shape, layout, rollout_tp, problems, sequence_parallel=config.actor.layout.sequence_parallel)
    problems.raise_if_any()
    if rollout_tp is None:
        return None
    plan = make_plan(weight_map(shape), layout, rollout_tp, element_bytes=_element_bytes(config))
    totals = {name: count for name, count in plan.totals().items() if name != "bytes_received_bound"}
    return {"train": str(layout), "rollout_tp": rollout_tp, "element_bytes": _element_bytes(config), **totals}


def _element_bytes(config: Config) -> int:
    """Bytes of a weight; where the hardware decides, a GPU that has 16-bit formats is assumed."""
    cpu = config.cluster.device == "cpu"
    return 4 if config.actor.precision == "fp32" or (config.actor.precision == "auto" and cpu) else 2
