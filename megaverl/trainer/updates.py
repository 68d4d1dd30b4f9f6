"""Sending the update plan to the workers and putting their reports together. Shared by all loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from megaverl.algorithms.losses import Denominators
from megaverl.algorithms.rewards import finish_rollout_difference
from megaverl.data.packing import UpdatePlan
from megaverl.trainer.run import Run
from megaverl.workers.actor_role import Update, UpdateReport


def run_updates(
    run: Run, plan: UpdatePlan, denominators: Sequence[Denominators], advantages_by_dp: list[list[float]] | None
) -> list[list[UpdateReport]]:
    """Runs all updates of the plan; returns the reports by data parallel rank, then by update."""
    updates = []
    for rank, home in enumerate(plan.home):
        position = {sequence: i for i, sequence in enumerate(home)}
        shares = plan.for_rank(rank)
        updates.append([Update([position[i] for i in share], d) for share, d in zip(shares, denominators, strict=True)])
    return [r for r in run.workers.call("update_actor", advantages_by_dp, updates) if r is not None]


def report_metrics(
    reports: Sequence[Sequence[UpdateReport]],
    denominators: Sequence[Denominators],
    finish: Callable[[dict[str, float], Denominators], dict[str, float]],
) -> dict[str, float]:
    """Metrics of a step: the mean over its updates, each exact over all its micro-batches and ranks."""
    per_update = []
    for number, count in enumerate(denominators):
        ranks = [r[number] for r in reports]
        sums = {name: math.fsum(r.sums[name] for r in ranks) for name in ranks[0].sums}
        per_update.append(finish(sums, count) | {"actor/grad_norm": ranks[0].grad_norm, "actor/lr": ranks[0].lr})
    metrics = {name: math.fsum(m[name] for m in per_update) / len(per_update) for name in per_update[0]}
    metrics["actor/lr"] = per_update[-1]["actor/lr"]
    skipped = sum(not r.applied for r in reports[0])
    if skipped:
        metrics["actor/skipped_updates"] = skipped
    gaps = [gap for rank in reports for report in rank for gap in report.gaps]
    return metrics | finish_rollout_difference(gaps)
