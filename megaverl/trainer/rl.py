"""The reinforcement-learning loop: generate, score, compare with the reference, update, hand the weights over."""

from __future__ import annotations

from collections.abc import Sequence

from megaverl.algorithms.losses import Denominators
from megaverl.algorithms.moments import merge_moments
from megaverl.algorithms.registry import Algorithm, algorithm_for
from megaverl.algorithms.rollout_correction import finish_mismatch
from megaverl.config.derived import critic_warmup, epochs, mini_batches
from megaverl.data.packing import UpdatePlan, plan_at_home, plan_update
from megaverl.trainer.advantages import judge
from megaverl.trainer.collect import collect
from megaverl.trainer.experience import Experience
from megaverl.trainer.resume import save_if_due
from megaverl.trainer.run import Run, worst_memory
from megaverl.trainer.updates import run_updates
from megaverl.trainer.validate import validate, validate_if_due


def train_rl(run: Run) -> None:
    """Runs all steps that are left. One pass of the loop is one line of DESIGN's "a step, as data"."""
    algorithm = algorithm_for(run.config)
    hand_over(run)
    if run.config.trainer.val_before_train and run.step == 0 and run.prepared.val is not None:
        run.trackers.log(validate(run) | run.timer.metrics(), run.step)
    while run.goes_on:
        run.step += 1
        run.heartbeat.step(run.step, run.total_steps)
        with run.timer.phase("step"):
            metrics, experience = collect(run, algorithm)
            plan = distribute(run, experience)
            metrics |= log_probs(run, algorithm, plan)
            values(run, algorithm)
            metrics |= judge(run, algorithm, experience, plan)
            metrics |= update(run, algorithm, experience, plan)
            metrics |= hand_over(run)
        metrics |= validate_if_due(run)
        save_if_due(run, metrics)
        run.log_step(metrics)


def hand_over(run: Run) -> dict[str, float]:
    """Handoff train -> rollout: the engines serve the newest weights under the next version."""
    with run.timer.phase("update_weights"):
        run.version += 1
        reports = run.workers.call("to_rollout", run.version)
        return count_handoff(run, reports) | worst_memory(reports)


def count_handoff(run: Run, reports: Sequence[dict[str, float]]) -> dict[str, float]:
    """Bytes over all ranks; seconds, staging memory and memory by phase of the worst rank."""
    sums = {f"handoff/bytes_{kind}": 0.0 for kind in ("aliased", "copied", "received", "moved")}
    kinds = [f"memory/{phase}_{what}" for phase in ("train", "rollout") for what in ("weights", "peak")]
    worst = dict.fromkeys(("handoff/seconds", "handoff/staging_peak", *kinds), 0.0)
    for report in reports:
        sums = {name: total + report[name] for name, total in sums.items()}
        worst = {name: max(most, report[name]) for name, most in worst.items()}
    run.handoff_bytes += int(sums["handoff/bytes_moved"])
    return sums | worst


def distribute(run: Run, experience: Experience) -> UpdatePlan:
    """Balances the sequences over data parallel ranks and has each rank fetch its own from the object store."""
    config = run.config
    plan = plan_update(
        experience.lengths,
        experience.groups,
        dp=run.prepared.layout.dp,
        mini_batch_size=config.actor.mini_batch_size,
        epochs=epochs(config, "actor"),
        seed=step_seed(run),
    )
    with run.timer.phase("distribute"):
        run.workers.post("load", [experience.pieces(home) for home in plan.home])
    return plan


def log_probs(run: Run, algorithm: Algorithm, plan: UpdatePlan) -> dict[str, float]:
    """Log-probabilities of the policy before its update, where they are needed, and how far the rollout's are off."""
    if not algorithm.needs_old_log_probs(plan.single_update):
        return {}
    with run.timer.phase("old_log_prob"):
        parts = run.workers.call("old_log_probs")
    return finish_mismatch(merge_moments([gap for part in parts if part is not None for gap in part]))


def values(run: Run, algorithm: Algorithm) -> None:
    """The critic's values before its update; they stay in the workers."""
    if algorithm.needs_critic:
        with run.timer.phase("values"):
            run.workers.call("values")


def update(run: Run, algorithm: Algorithm, experience: Experience, plan: UpdatePlan) -> dict[str, float]:
    """All updates on the batch: the critic's, then (once the critic's warm-up is over) the actor's."""
    config = run.config
    metrics: dict[str, float] = {"perf/total_num_tokens": sum(experience.lengths)}
    if algorithm.needs_critic:
        critic_plan = plan_at_home(
            plan.home,
            experience.lengths,
            mini_batches=mini_batches(config, "critic"),
            epochs=epochs(config, "critic"),
            seed=step_seed(run),
        )
        metrics |= run_updates(run, "critic", critic_plan, denominators(run, experience, critic_plan))
    if run.step > critic_warmup(config):
        metrics |= run_updates(run, "actor", plan, denominators(run, experience, plan))
    return metrics


def denominators(run: Run, experience: Experience, plan: UpdatePlan) -> list[Denominators]:
    """What the losses of each mini-batch are divided by."""
    lengths, norm = experience.response_lengths, run.config.data.max_response_length
    return [Denominators.of([lengths[i] for share in m.ranks for i in share], norm) for m in plan.mini_batches]


def step_seed(run: Run) -> int:
    """Of the shuffles of this step."""
    return run.config.trainer.seed * 1_000_003 + run.step
