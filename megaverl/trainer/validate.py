"""Validation: the held-out prompts, with their own sampling, scored as in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megaverl.config.schema import Config
from megaverl.data.dataset import PromptItem
from megaverl.rewards.registry import Registry
from megaverl.trainer.experience import Experience, generate, sampling_of, score
from megaverl.trainer.generations import keep_generations
from megaverl.trainer.run import Run
from megaverl.trainer.val_metrics import Sample, mean_score, validation_metrics

Answer = Callable[[str, str, dict[str, Any]], str | None]
"""(data source, response, what the scorer returned) -> what the response answers; None where there is no telling."""


def validate_if_due(run: Run) -> dict[str, float]:
    """Validates every ``trainer.val_every`` steps and after the last one; the engines must be in rollout."""
    every = run.config.trainer.val_every
    due = run.step == run.total_steps or (every and run.step % every == 0)
    return validate(run) if due else {}


def validate(run: Run) -> dict[str, float]:
    """Answers every validation prompt ``rollout.val.n`` times and keeps some responses to be read.

    Returns:
        The metrics of `val_metrics.validation_metrics`. Empty without validation rows.
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
        experience = generate(run, items, [item.key for item in items], sampling, keep_texts=True)
        score(run, experience)
        keep_generations(run, items, experience)
    metrics = validation_metrics(samples_of(items, experience, answer_of(config)), config.rollout.val.n)
    run.validations.append((run.step, mean_score(metrics)))
    return metrics


def answer_of(config: Config) -> Answer:
    """How to read a response's answer: the scorer's ``pred`` if it returns one, else as a built-in scorer reads it."""
    registry = None if config.reward.function.path else Registry.of(config.reward)

    def answer(data_source: str, text: str, extra: dict[str, Any]) -> str | None:
        if extra.get("pred") is not None:
            return str(extra["pred"])
        read = registry.find(data_source).answer if registry is not None and data_source in registry else None
        return read(text) if read is not None else None

    return answer


def samples_of(items: Sequence[PromptItem], experience: Experience, answer: Answer) -> list[Sample]:
    """The scored responses, in the order of the experience."""
    texts = experience.texts or [""] * len(experience.groups)
    return [
        Sample(
            group,
            items[group].data_source,
            experience.scores[i],
            experience.response_lengths[i],
            answer(items[group].data_source, texts[i], experience.extras[i]),
            experience.extras[i],
        )
        for i, group in enumerate(experience.groups)
    ]
