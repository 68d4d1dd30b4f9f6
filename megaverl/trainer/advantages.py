"""From scores to the column ``advantages`` in the workers, with the metrics of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megaverl.algorithms.registry import Algorithm
from megaverl.algorithms.rewards import batch_metrics, penalised_rewards, penalty_metrics
from megaverl.algorithms.value_loss import ADVANTAGES, finish_value_metrics, merge_moments
from megaverl.data.packing import UpdatePlan
from megaverl.trainer.experience import Experience
from megaverl.trainer.run import Run


def judge(run: Run, algorithm: Algorithm, experience: Experience, plan: UpdatePlan) -> dict[str, float]:
    """Gives every response token its advantage: from the samples of its prompt, or from the critic's values."""
    scores = torch.tensor(experience.scores, dtype=torch.float64)
    rewards, metrics = reference_penalty(run, algorithm, experience, plan, scores)
    per_sequence = None
    with run.timer.phase("adv"):
        if algorithm.advantages is None:
            metrics |= advantages_by_value(run, plan, experience.scores)
        else:
            per_sequence = algorithm.advantages(rewards, experience.groups)
            run.workers.post("set_advantages", _by_home(plan, per_sequence.tolist()))
    return metrics | batch_metrics(
        scores=scores,
        rewards=rewards,
        advantages=per_sequence,
        response_lengths=torch.tensor(experience.response_lengths),
        prompt_lengths=torch.tensor(experience.prompt_lengths),
        max_response_length=run.config.data.max_response_length,
        max_prompt_length=run.config.data.max_prompt_length,
    )


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
    kl, coef = torch.zeros_like(scores), run.config.algorithm.kl_coef
    for home, part in zip(plan.home, penalties, strict=True):
        kl[list(home)] = torch.tensor(part, dtype=kl.dtype)
    metrics = penalty_metrics(kl, torch.tensor(experience.response_lengths), coef)
    return penalised_rewards(scores, kl, coef), metrics


def advantages_by_value(run: Run, plan: UpdatePlan, scores: Sequence[float]) -> dict[str, float]:
    """Generalised advantage estimation in the workers, whitened over the response tokens of the whole step."""
    parts = run.workers.call("estimate_advantages", _by_home(plan, scores))
    moments = merge_moments([part for part in parts if part is not None])
    whitened = run.config.algorithm.whiten_advantages
    if whitened:
        run.workers.post("whiten_advantages", moments[ADVANTAGES])
    return finish_value_metrics(moments, whitened=whitened)


def _by_home(plan: UpdatePlan, values: Sequence[float]) -> list[list[float]]:
    return [[values[i] for i in home] for home in plan.home]
