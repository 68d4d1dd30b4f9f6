"""From scores to the column ``advantages`` in the workers, with the metrics of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megaverl.algorithms.moments import merge_moments
from megaverl.algorithms.registry import Algorithm
from megaverl.algorithms.rewards import batch_metrics, overlong_penalty, penalised_rewards, penalty_metrics
from megaverl.algorithms.value_loss import ADVANTAGES, finish_value_metrics
from megaverl.data.packing import UpdatePlan
from megaverl.trainer.experience import Experience
from megaverl.trainer.run import Run


def judge(run: Run, algorithm: Algorithm, experience: Experience, plan: UpdatePlan) -> dict[str, float]:
    """Gives every response token its advantage: from its prompt's samples, a critic's values, or what is to come."""
    scores = torch.tensor(experience.scores, dtype=torch.float64)
    lengths = torch.tensor(experience.response_lengths)
    shaped, metrics = shape_scores(run, scores, lengths)
    coef = run.kl.coef
    rewards, penalty = reference_penalty(run, algorithm, experience, plan, shaped)
    metrics |= penalty
    per_sequence = None
    with run.timer.phase("adv"):
        if algorithm.advantages is None:
            metrics |= token_advantages(run, algorithm, plan, shaped.tolist(), experience.baselines, coef)
        else:
            per_sequence = algorithm.advantages(rewards, experience.groups, lengths)
            run.workers.post("set_advantages", _by_home(plan, per_sequence.tolist()))
    return metrics | batch_metrics(
        scores=scores,
        rewards=rewards,
        advantages=per_sequence,
        response_lengths=lengths,
        prompt_lengths=torch.tensor(experience.prompt_lengths),
        max_response_length=run.config.data.max_response_length,
        max_prompt_length=run.config.data.max_prompt_length,
    )


def shape_scores(run: Run, scores: Tensor, response_lengths: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Scores [sequences] less the penalty of overlong responses, where ``reward.overlong_buffer`` is set."""
    reward = run.config.reward
    if not reward.overlong_buffer:
        return scores, {}
    limit = run.config.data.max_response_length
    penalty = overlong_penalty(response_lengths, limit, reward.overlong_buffer, reward.overlong_penalty)
    return scores + penalty, {"reward/overlong_penalty/mean": penalty.mean().item()}


def reference_penalty(
    run: Run, algorithm: Algorithm, experience: Experience, plan: UpdatePlan, scores: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Runs the reference where it is needed; rewards [sequences]: scores, less the KL penalty where it is on."""
    if not algorithm.needs_reference:
        return scores, {}
    asked = run.workers.ask("reference_log_probs")
    if not run.config.algorithm.kl_in_reward:  # nothing here depends on it: the ranks go on to the update by themselves
        run.wait_later("ref", asked)
        return scores, {}
    with run.timer.phase("ref"):
        penalties = [p for p in run.workers.answers(asked) if p is not None]
    kl, coef = torch.zeros_like(scores), run.kl.coef
    for home, part in zip(plan.home, penalties, strict=True):
        kl[list(home)] = torch.tensor(part, dtype=kl.dtype)
    metrics = penalty_metrics(kl, torch.tensor(experience.response_lengths), coef)
    run.kl.update(metrics["actor/reward_kl_penalty"], len(experience.lengths))
    return penalised_rewards(scores, kl, coef), metrics


def token_advantages(
    run: Run,
    algorithm: Algorithm,
    plan: UpdatePlan,
    scores: Sequence[float],
    baselines: Sequence[float] | None,
    kl_coef: float,
) -> dict[str, float]:
    """Advantages of tokens, made in the workers and, where the algorithm says so, whitened over the whole step."""
    by_home = None if baselines is None else _by_home(plan, baselines)
    parts = run.workers.call("estimate_advantages", _by_home(plan, scores), by_home, kl_coef)
    moments = merge_moments([part for part in parts if part is not None])
    if algorithm.whitens:
        run.workers.post("whiten_advantages", moments[ADVANTAGES])
    return finish_value_metrics(moments, whitened=algorithm.whitens)


def _by_home(plan: UpdatePlan, values: Sequence[float]) -> list[list[float]]:
    return [[values[i] for i in home] for home in plan.home]
