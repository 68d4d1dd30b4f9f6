"""The reinforcement-learning loop: generate, score, compare with the reference, update, hand the weights over."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megaverl.algorithms.losses import Denominators, finish_metrics
from megaverl.algorithms.registry import Algorithm, algorithm_for
from megaverl.algorithms.rewards import batch_metrics, finish_rollout_difference, penalised_rewards, penalty_metrics
from megaverl.data.packing import UpdatePlan, plan_update
from megaverl.trainer.experience import Experience, generate, sampling_of, score
from megaverl.trainer.resume import save_if_due
from megaverl.trainer.run import Run
from megaverl.trainer.updates import report_metrics, run_updates
from megaverl.trainer.validate import validate, validate_if_due


def train_rl(run: Run) -> None:
    """Runs all steps that are left. One pass of the loop is one line of DESIGN's "a step, as data"."""
    algorithm = algorithm_for(run.config)
    hand_over(run)
    if run.config.trainer.val_before_train and run.step == 0:
        run.trackers.log(validate(run) | run.timer.metrics(), run.step)
    while run.step < run.total_steps:
        run.step += 1
        run.heartbeat.step(run.step, run.total_steps)
        with run.timer.phase("step"):
            metrics, experience = rollout(run)
            plan = distribute(run, experience)
            metrics |= log_probs(run, algorithm, plan)
            advantages, found = judge(run, algorithm, experience, plan)
            metrics |= found
            metrics |= update(run, experience, plan, advantages)
            metrics |= hand_over(run)
        metrics |= validate_if_due(run)
        run.log_step(metrics)
        save_if_due(run)


def hand_over(run: Run) -> dict[str, float]:
    """Handoff train -> rollout: the engines serve the newest weights under the next version."""
    with run.timer.phase("update_weights"):
        run.version += 1
        return count_handoff(run, run.workers.call("to_rollout", run.version))


def count_handoff(run: Run, reports: Sequence[dict[str, float]]) -> dict[str, float]:
    """Bytes moved over all ranks, and the seconds of the slowest."""
    moved = sum(r["handoff/bytes_moved"] for r in reports)
    run.handoff_bytes += int(moved)
    return {"handoff/bytes_moved": moved, "handoff/seconds": max(r["handoff/seconds"] for r in reports)}


def rollout(run: Run) -> tuple[dict[str, float], Experience]:
    """Takes the next prompts, samples ``rollout.n`` responses each and scores them; then back to training."""
    prepared, data = run.prepared, run.config.data
    items = [prepared.train[i] for i in prepared.sampler.next_batch()]
    keys = [(run.step - 1) * data.train_batch_size + i for i in range(len(items))]
    sampling = sampling_of(
        run.config.rollout, data.max_response_length, run.config.trainer.seed, prepared.tokenizer.stop_ids
    )
    with run.timer.phase("gen"):
        experience = generate(run, items, keys, sampling)
    with run.timer.phase("reward"):
        score(run, experience)
    run.workers.call("to_train")
    return _extra_metrics(experience), experience


def _extra_metrics(experience: Experience) -> dict[str, float]:
    names = sorted({name for extra in experience.extras for name in extra})
    means = {}
    for name in names:
        values = [extra[name] for extra in experience.extras if name in extra]
        if all(isinstance(value, (int, float)) for value in values):
            means[f"reward/{name}/mean"] = sum(values) / len(values)
    return means


def distribute(run: Run, experience: Experience) -> UpdatePlan:
    """Balances the sequences over data parallel ranks and has each rank fetch its own from the object store."""
    config = run.config
    plan = plan_update(
        experience.lengths,
        experience.groups,
        dp=run.prepared.layout.dp,
        mini_batch_size=config.actor.mini_batch_size,
        epochs=config.actor.epochs,
        seed=config.trainer.seed * 1_000_003 + run.step,
    )
    with run.timer.phase("distribute"):
        run.workers.call("load", [experience.pieces(home) for home in plan.home])
    return plan


def log_probs(run: Run, algorithm: Algorithm, plan: UpdatePlan) -> dict[str, float]:
    """Log-probabilities of the policy before its update, where they are needed, and how far the rollout's are off."""
    if not algorithm.needs_old_log_probs(plan.single_update):
        return {}
    with run.timer.phase("old_log_prob"):
        parts = run.workers.call("old_log_probs")
    return finish_rollout_difference([gap for part in parts if part is not None for gap in part])


def judge(
    run: Run, algorithm: Algorithm, experience: Experience, plan: UpdatePlan
) -> tuple[list[float], dict[str, float]]:
    """Rewards (scores, less the KL penalty where it is on) and the advantage of every sequence, with their metrics."""
    config = run.config
    scores = torch.tensor(experience.scores, dtype=torch.float64)
    response_lengths = torch.tensor(experience.response_lengths)
    metrics: dict[str, float] = {}
    rewards = scores
    if algorithm.needs_reference:
        with run.timer.phase("ref"):
            penalties = [p for p in run.workers.call("reference_log_probs") if p is not None]
        if penalties:
            kl = torch.zeros_like(scores)
            for home, part in zip(plan.home, penalties, strict=True):
                kl[list(home)] = torch.tensor(part, dtype=kl.dtype)
            rewards = penalised_rewards(scores, kl, config.algorithm.kl_coef)
            metrics |= penalty_metrics(kl, response_lengths, config.algorithm.kl_coef)
    with run.timer.phase("adv"):
        advantages = algorithm.advantages(rewards, experience.groups)
    metrics |= batch_metrics(
        scores=scores,
        rewards=rewards,
        advantages=advantages,
        response_lengths=response_lengths,
        prompt_lengths=torch.tensor(experience.prompt_lengths),
        max_response_length=config.data.max_response_length,
        max_prompt_length=config.data.max_prompt_length,
    )
    return advantages.tolist(), metrics


def update(run: Run, experience: Experience, plan: UpdatePlan, advantages: Sequence[float]) -> dict[str, float]:
    """All updates on the batch."""
    norm = run.config.data.max_response_length
    denominators = [
        Denominators.of([experience.response_lengths[i] for share in m.ranks for i in share], norm)
        for m in plan.mini_batches
    ]
    by_dp = [[advantages[i] for i in home] for home in plan.home]
    with run.timer.phase("update_actor"):
        reports = run_updates(run, plan, denominators, by_dp)
    metrics = report_metrics(reports, denominators, finish_metrics)
    metrics["perf/total_num_tokens"] = sum(experience.lengths)
    return metrics
