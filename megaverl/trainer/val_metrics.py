"""Metrics of a validation from its scored responses. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One scored response.

    Attributes:
        prompt: number of its prompt.
        data_source: of the prompt.
        score: the scorer's.
        length: response tokens.
        answer: what it answers, for the vote; None where none was found.
        extra: what else the scorer returned.
    """

    prompt: int
    data_source: str
    score: float
    length: int
    answer: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def validation_metrics(samples: Sequence[Sample], n: int) -> dict[str, float]:
    """verl's validation metrics by data source; every mean over prompts gives each prompt the same weight.

    - ``val-core/S/reward/mean@N``: the mean over prompts of the mean score of their N samples;
    - ``val-core/S/reward/best@N/mean``: of their highest score (N > 1);
    - ``val-core/S/reward/maj@N/mean``: of the score that their most frequent answer got (N > 1): ties go to the answer
      that was sampled first; a prompt none of whose samples has an answer counts 0. Only where a sample has one;
    - ``val-aux/S/NAME/mean@N``: of each further number of the scorer, over the samples that have it;
    - ``val-aux/S/response_length/mean``: over samples.

    verl draws ``best`` and ``maj`` with replacement from the N samples (a bootstrap, lower); these take all N.
    """
    sources: dict[str, dict[int, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        sources[sample.data_source][sample.prompt].append(sample)
    metrics: dict[str, float] = {}
    for source, prompts in sources.items():
        groups = list(prompts.values())
        core, aux = f"val-core/{source}/reward", f"val-aux/{source}"
        metrics[f"{core}/mean@{n}"] = _mean([_mean([s.score for s in group]) for group in groups])
        if n > 1:
            metrics[f"{core}/best@{n}/mean"] = _mean([max(s.score for s in group) for group in groups])
            if any(s.answer is not None for group in groups for s in group):
                metrics[f"{core}/maj@{n}/mean"] = _mean([majority_score(group) for group in groups])
        everything = [s for group in groups for s in group]
        for name in sorted({name for s in everything for name in s.extra}):
            values = [s.extra[name] for s in everything if isinstance(s.extra.get(name), (int, float))]
            if values:
                metrics[f"{aux}/{name}/mean@{n}"] = _mean(values)
        metrics[f"{aux}/response_length/mean"] = _mean([s.length for s in everything])
    return metrics


def majority_score(group: Sequence[Sample]) -> float:
    """The score of the first sample with the most frequent answer of a prompt's samples; 0 without any answer."""
    answers = [s.answer for s in group if s.answer is not None]
    if not answers:
        return 0.0
    winner = Counter(answers).most_common(1)[0][0]  # of equal counts the first that came
    return next(s.score for s in group if s.answer == winner)


def mean_score(metrics: Mapping[str, float]) -> float:
    """The mean over data sources of ``val-core/../mean@N``: what a run is judged by when nothing else is named."""
    return _mean([value for name, value in metrics.items() if name.startswith("val-core/") and "/mean@" in name])


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)
