"""Validation: the held-out prompts, with their own sampling, scored as in training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import fsum

from megaverl.data.dataset import PromptItem
from megaverl.trainer.experience import Experience, generate, sampling_of, score
from megaverl.trainer.run import Run


def validate_if_due(run: Run) -> dict[str, float]:
    """Validates every ``trainer.val_every`` steps and after the last one; the engines must be in rollout."""
    every = run.config.trainer.val_every
    due = run.step == run.total_steps or (every and run.step % every == 0)
    return validate(run) if due else {}


def validate(run: Run) -> dict[str, float]:
    """Answers every validation prompt ``rollout.val.n`` times.

    Returns:
        ``val-core/<data source>/reward/mean@N``: the mean over prompts of the mean score of their samples, and
        ``val-aux/..`` for response lengths and further numbers of the scorer. Empty without validation rows.
    """
    prepared, config = run.prepared, run.config
    if prepared.val is None:
        return {}
    # A stream of seeds of its own, the same at every validation: differences come from the weights alone.
    sampling = sampling_of(
        config.rollout.val, config.data.max_response_length, config.trainer.seed + 1, prepared.tokenizer.stop_ids
    )
    items = prepared.val.items
    with run.timer.phase("testing"):
        experience = generate(run, items, [item.key for item in items], sampling)
        score(run, experience)
    metrics = validation_metrics(items, experience, config.rollout.val.n)
    run.validations.append((run.step, accuracy(metrics)))
    return metrics


def validation_metrics(items: Sequence[PromptItem], experience: Experience, n: int) -> dict[str, float]:
    """The metrics of `validate` from scored responses."""
    scores: dict[str, list[float]] = defaultdict(list)
    extras: dict[tuple[str, str], list[float]] = defaultdict(list)
    lengths: dict[str, list[int]] = defaultdict(list)
    for i, group in enumerate(experience.groups):
        source = items[group].data_source
        scores[source].append(experience.scores[i])
        lengths[source].append(experience.response_lengths[i])
        for name, value in experience.extras[i].items():
            if isinstance(value, (int, float)):
                extras[source, name].append(value)
    metrics = {f"val-core/{source}/reward/mean@{n}": _mean(values) for source, values in scores.items()}
    metrics |= {f"val-aux/{source}/{name}/mean@{n}": _mean(values) for (source, name), values in extras.items()}
    return metrics | {f"val-aux/{source}/response_length/mean": _mean(v) for source, v in lengths.items()}


def accuracy(metrics: Mapping[str, float]) -> float:
    """Mean over data sources of ``val-core/../reward/mean@N``."""
    return _mean([value for name, value in metrics.items() if name.startswith("val-core/") and "/mean@" in name])


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)
