"""The responses of a step: take prompts, sample, score; again while dynamic sampling leaves prompts out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megaverl.algorithms.registry import Algorithm
from megaverl.data.dataset import PromptItem
from megaverl.rollout.engine import Sampling
from megaverl.trainer.experience import Experience, generate, join, sampling_of, score
from megaverl.trainer.run import Run

KEYS_OF_A_REFILL = 1 << 40  # far above any prompt's own number, so that no two prompts of a run share their seeds


def collect(run: Run, algorithm: Algorithm) -> tuple[dict[str, float], Experience]:
    """Samples ``rollout.n`` responses to each of the next prompts and scores them; then back to training.

    With dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) prompts whose samples all have the same score are left
    out, and further batches of prompts are sampled until the batch is full. After
    ``algorithm.max_generation_batches`` it is filled up with prompts that were left out: they have no advantage but
    keep every batch the same size.
    """
    settings, size = run.config.algorithm, run.config.data.train_batch_size
    most = settings.max_generation_batches if settings.dynamic_sampling else 1
    kept: list[tuple[Experience, list[int]]] = []
    spare: list[tuple[Experience, list[int]]] = []
    batches, found = 0, 0
    while found < size and batches < most:
        experience = _sample(run, algorithm, batches)
        batches += 1
        useful = _useful(experience) if settings.dynamic_sampling else list(dict.fromkeys(experience.groups))
        taken = useful[: size - found]
        kept.append((experience, taken))
        spare.append((experience, [g for g in dict.fromkeys(experience.groups) if g not in taken]))
        found += len(taken)
    for experience, unused in spare if found < size else ():
        filling = unused[: size - found]
        kept.append((experience, filling))
        found += len(filling)
    run.workers.post("to_train")
    whole = kept[0][0] if batches == 1 else join(kept)
    metrics = _extra_metrics(whole)
    if settings.dynamic_sampling:
        metrics |= _sampling_metrics(run, [experience for experience, _ in spare], batches)
    return metrics, whole


def _sample(run: Run, algorithm: Algorithm, number: int) -> Experience:
    """The next batch of prompts, answered and scored; ``number`` counts the batches of this step."""
    prepared, config = run.prepared, run.config
    items = [prepared.train[i] for i in prepared.sampler.next_batch()]
    first = (run.step - 1) * config.data.train_batch_size + number * KEYS_OF_A_REFILL
    keys = [first + i for i in range(len(items))]
    sampling = sampling_of(
        config.rollout, config.data.max_response_length, config.trainer.seed, prepared.tokenizer.stop_ids
    )
    with run.timer.phase("gen"):
        experience = generate(run, items, keys, sampling)
    with run.timer.phase("reward"):
        score(run, experience)
    if algorithm.greedy_baseline:
        greedy = replace(sampling, n=1, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)
        experience.baselines = _greedy_scores(run, items, keys, greedy, experience)
    return experience


def _greedy_scores(
    run: Run, items: Sequence[PromptItem], keys: Sequence[int], sampling: Sampling, experience: Experience
) -> list[float]:
    """For each sequence, the score of the greedy response to its prompt (ReMax, arXiv 2310.10505)."""
    with run.timer.phase("gen"):
        greedy = generate(run, items, keys, sampling)
    with run.timer.phase("reward"):
        score(run, greedy)
    by_prompt = dict(zip(greedy.groups, greedy.scores, strict=True))
    return [by_prompt[group] for group in experience.groups]


def _useful(experience: Experience) -> list[int]:
    """The prompts whose samples have different scores, in their order."""
    scores: dict[int, set[float]] = {}
    for group, value in zip(experience.groups, experience.scores, strict=True):
        scores.setdefault(group, set()).add(value)
    return [group for group in dict.fromkeys(experience.groups) if len(scores[group]) > 1]


def _sampling_metrics(run: Run, sampled: Sequence[Experience], batches: int) -> dict[str, float]:
    prompts = sum(len(set(experience.groups)) for experience in sampled)
    useful = sum(len(_useful(experience)) for experience in sampled)
    if useful < run.config.data.train_batch_size:
        run.console.warn(
            f"step {run.step}: only {useful} of {prompts} prompts had samples of different scores; others fill the"
            " batch (algorithm.max_generation_batches bounds the search)"
        )
    return {"train/num_gen_batches": float(batches), "train/useful_prompts_ratio": useful / prompts}


def _extra_metrics(experience: Experience) -> dict[str, float]:
    names = sorted({name for extra in experience.extras for name in extra})
    kinds = [kind for kind, _ in experience.failures]
    means = {"reward/timeouts": float(kinds.count("timeout")), "reward/errors": float(kinds.count("error"))}
    for name in names:
        values = [extra[name] for extra in experience.extras if name in extra]
        if all(isinstance(value, (int, float)) for value in values):
            means[f"reward/{name}/mean"] = sum(values) / len(values)
    return means
