"""``megaverl plan``: what a run would do, computed without running it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from megaverl.commands.output import print_json, print_table, print_text
from megaverl.errors import Problems
from megaverl.parallel.layout import Layout

if TYPE_CHECKING:
    from megaverl.resharding.plan import Kind, ReshardPlan

KINDS: tuple[Kind, ...] = ("alias", "copy", "receive")
TRAIN_SIZES = ("tp", "pp", "dp", "cp", "ep", "vpp")
COLUMNS = ("bytes_aliased", "bytes_copied", "bytes_received", "bytes_received_bound", "peak_extra_bytes")
HEADS = ("aliased", "copied", "received", "lacked", "extra memory")
RANKS_SHOWN = 64
"""Ranks in the printed table; ``--json`` has all."""


def reshard(model: str, train: str, rollout: str, *, element_bytes: int, as_json: bool) -> int:
    """``plan reshard --model M --train tp=2,dp=4 --rollout tp=2``: bytes by rank and in all."""
    problems = Problems()
    train_sizes = parse_sizes(train, TRAIN_SIZES, "--train", problems)
    rollout_sizes = parse_sizes(rollout, ("tp",), "--rollout", problems)
    problems.raise_if_any()
    from megaverl.models.family import load_shape, weight_map
    from megaverl.resharding.planner import make_plan

    layout, rollout_tp = Layout(**train_sizes), rollout_sizes.get("tp", 1)
    found = make_plan(weight_map(load_shape(model)), layout, rollout_tp, element_bytes=element_bytes)
    if as_json:
        print_json(_document(model, found, element_bytes))
    else:
        _print(model, found)
    return 0


def parse_sizes(text: str, names: tuple[str, ...], where: str, problems: Problems) -> dict[str, int]:
    """``tp=2,pp=1`` -> {"tp": 2, "pp": 1}; adds a problem for each part that is wrong."""
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = part.partition("=")
        if name not in names:
            problems.add(f"unknown size {name!r}", where=f"{where} {text}", fix=f"sizes are {', '.join(names)}")
        elif name in sizes:
            problems.add(f"{name} is given twice", where=f"{where} {text}", fix="give each size once")
        elif not number.isdecimal() or int(number) < 1:
            problems.add(
                f"{name} must be a whole number of at least 1, got {number!r}",
                where=f"{where} {text}",
                fix=f"e.g. {name}=2",
            )
        else:
            sizes[name] = int(number)
    return sizes


def _document(model: str, plan: ReshardPlan, element_bytes: int) -> dict[str, object]:
    from megaverl.resharding.plan import hybridflow_bytes_received

    return {
        "model": model,
        "train": asdict(plan.train),
        "rollout": {"tp": plan.rollout_tp},
        "element_bytes": element_bytes,
        "totals": plan.totals(),
        "hybridflow_bytes_received_per_rank": hybridflow_bytes_received(plan),
        "classes": [
            {"megatron": name, **{column: sums[kind] for column, kind in zip(COLUMNS, KINDS, strict=False)}}
            for name, sums in plan.by_class().items()
        ],
        "ranks": [{"rank": rank.rank, **{name: getattr(rank, name) for name in COLUMNS}} for rank in plan.ranks],
    }


def _print(model: str, plan: ReshardPlan) -> None:
    from megaverl.resharding.plan import hybridflow_bytes_received

    title = f"{model}: train {plan.train} -> rollout tp{plan.rollout_tp}"
    classes = [(name, *(f"{sums[kind]:,}" for kind in KINDS)) for name, sums in plan.by_class().items()]
    print_table(f"{title}, bytes of all ranks by parameter", ("parameter", *HEADS[:3]), classes, right=HEADS)
    rows = [(rank.rank, *(f"{getattr(rank, name):,}" for name in COLUMNS)) for rank in plan.ranks[:RANKS_SHOWN]]
    totals = plan.totals()
    if len(plan.ranks) > RANKS_SHOWN:
        rows.append((f"{len(plan.ranks) - RANKS_SHOWN} more", *("" for _ in COLUMNS)))
    rows.append(("all", *(f"{totals[name]:,}" for name in COLUMNS)))
    print_text("")
    print_table(f"{title}, bytes by rank (extra memory of all: the worst rank's)", ("rank", *HEADS), rows, right=HEADS)
    formula = hybridflow_bytes_received(plan)
    print_text(f"\nreceived by each rank by HybridFlow's formula (arXiv 2409.19256): {formula:,}")
