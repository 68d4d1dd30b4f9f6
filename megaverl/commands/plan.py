"""``megaverl plan``: what a run would do, computed without running it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from megaverl.commands.output import print_json, print_table
from megaverl.errors import Problems
from megaverl.parallel.layout import Layout

if TYPE_CHECKING:
    from megaverl.resharding.plan import ReshardPlan

TRAIN_SIZES = ("tp", "pp", "dp", "cp", "ep", "vpp")
COLUMNS = ("bytes_aliased", "bytes_copied", "bytes_received", "peak_extra_bytes")


def reshard(model: str, train: str, rollout: str, *, element_bytes: int, as_json: bool) -> int:
    """``plan reshard --model M --train tp=2,dp=4 --rollout tp=2``: bytes by rank and in all."""
    problems = Problems()
    train_sizes = parse_sizes(train, TRAIN_SIZES, "--train", problems)
    rollout_sizes = parse_sizes(rollout, ("tp",), "--rollout", problems)
    problems.raise_if_any()
    from megaverl.models.family import load_shape, weight_map
    from megaverl.resharding.plan import make_plan

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
    return {
        "model": model,
        "train": asdict(plan.train),
        "rollout": {"tp": plan.rollout_tp},
        "element_bytes": element_bytes,
        "totals": plan.totals(),
        "ranks": [{"rank": rank.rank, **{name: getattr(rank, name) for name in COLUMNS}} for rank in plan.ranks],
    }


def _print(model: str, plan: ReshardPlan) -> None:
    rows = [(rank.rank, *(f"{getattr(rank, name):,}" for name in COLUMNS)) for rank in plan.ranks]
    totals = plan.totals()
    rows.append(("all", *(f"{totals[name]:,}" for name in COLUMNS)))
    heads = ("rank", "aliased", "copied", "received", "extra memory")
    title = f"{model}: train {plan.train} -> rollout tp{plan.rollout_tp}, bytes (extra memory of all: the worst rank's)"
    print_table(title, heads, rows, right=heads)
