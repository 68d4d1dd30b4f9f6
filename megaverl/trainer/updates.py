"""Sending an update plan to the workers and putting their reports together. Shared by all loops and roles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from megaverl.algorithms.losses import Denominators, finish_metrics
from megaverl.algorithms.moments import merge_moments
from megaverl.algorithms.rollout_correction import finish_mismatch
from megaverl.data.packing import UpdatePlan
from megaverl.trainer.run import Run
from megaverl.workers.update import Update, UpdateReport

Role = Literal["actor", "critic"]


def run_updates(run: Run, role: Role, plan: UpdatePlan, denominators: Sequence[Denominators]) -> dict[str, float]:
    """Runs all updates of the plan on the role's model; returns their metrics."""
    updates = []
    for rank, home in enumerate(plan.home):
        position = {sequence: i for i, sequence in enumerate(home)}
        shares = plan.for_rank(rank)
        updates.append([Update([position[i] for i in share], d) for share, d in zip(shares, denominators, strict=True)])
    asked = run.workers.ask(f"update_{role}", updates)
    run.wait_for_earlier()
    with run.timer.phase(f"update_{role}"):
        reports = run.workers.answers(asked)
    return report_metrics(role, [r for r in reports if r is not None], denominators)


def report_metrics(
    role: Role, reports: Sequence[Sequence[UpdateReport]], denominators: Sequence[Denominators]
) -> dict[str, float]:
    """Metrics of a step: the mean over its updates, each exact over all its micro-batches and ranks.

    Args:
        reports: by data parallel rank, then by update.
    """
    per_update = []
    for number, count in enumerate(denominators):
        ranks = [r[number] for r in reports]
        sums = {name: math.fsum(r.sums[name] for r in ranks) for name in ranks[0].sums}
        own = {f"{role}/grad_norm": ranks[0].grad_norm, f"{role}/lr": ranks[0].lr}
        per_update.append(finish_metrics(sums, count) | own)
    metrics = {name: math.fsum(m[name] for m in per_update) / len(per_update) for name in per_update[0]}
    metrics[f"{role}/lr"] = per_update[-1][f"{role}/lr"]
    skipped = sum(not r.applied for r in reports[0])
    if skipped:
        metrics[f"{role}/skipped_updates"] = skipped
    gaps = [gap for rank in reports for report in rank for gap in report.gaps]
    return metrics | finish_mismatch(merge_moments(gaps))
