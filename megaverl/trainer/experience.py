"""What the driver knows of a step's responses: references and per-sequence columns, never the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megaverl.config.schema import SamplingConfig
from megaverl.data.dataset import PromptItem
from megaverl.data.packing import balance
from megaverl.rollout.engine import Sampling
from megaverl.trainer.run import Run
from megaverl.workers.group import Asked
from megaverl.workers.rollout_role import GeneratedShard, PromptTask, ScoredShard


@dataclass
class Experience:
    """The responses to a set of prompts; every list is [sequences] and runs over replicas, then their sequences.

    Attributes:
        places: (number of the shard, position in it).
        groups: position of the sequence's prompt among the prompts asked for.
        scoring: the scores that are asked for; None once all are there for good (`join`).
        scores: filled by `score`.
        extras: further numbers that the scorer returned.
        texts: decoded responses, when asked for.
        baselines: score of the greedy response to the sequence's prompt; None without one.
        failures: (``error`` or ``timeout``, reason) of each response that the scorer failed on and that scores 0.
    """

    shards: list[GeneratedShard]
    places: list[tuple[int, int]]
    groups: list[int]
    prompt_lengths: list[int]
    response_lengths: list[int]
    clipped: list[bool]
    scoring: Asked | None
    scores: list[float] = field(default_factory=list)
    extras: list[dict[str, Any]] = field(default_factory=list)
    texts: list[str] | None = None
    failures: list[tuple[str, str]] = field(default_factory=list)
    baselines: list[float] | None = None

    @property
    def lengths(self) -> list[int]:
        return [p + r for p, r in zip(self.prompt_lengths, self.response_lengths, strict=True)]

    def pieces(self, sequences: Sequence[int]) -> list[tuple[Any, list[int]]]:
        """(reference, positions) pieces that together are these sequences, in their order."""
        found: list[tuple[Any, list[int]]] = []
        last = -1
        for sequence in sequences:
            shard, position = self.places[sequence]
            if shard != last:
                found.append((self.shards[shard].batch, []))
                last = shard
            found[-1][1].append(position)
        return found


def join(parts: Sequence[tuple[Experience, Sequence[int]]]) -> Experience:
    """The scored sequences of these prompts, their prompts numbered anew in the given order.

    Args:
        parts: (experience, numbers of its prompts to take).
    """
    whole, prompts = Experience([], [], [], [], [], [], None), 0
    for part, wanted in parts:
        number = {group: prompts + i for i, group in enumerate(wanted)}
        chosen = [i for i, group in enumerate(part.groups) if group in number]
        whole.places += [(len(whole.shards) + part.places[i][0], part.places[i][1]) for i in chosen]
        whole.shards += part.shards
        whole.groups += [number[part.groups[i]] for i in chosen]
        for name in ("prompt_lengths", "response_lengths", "clipped", "scores", "extras"):
            getattr(whole, name).extend(getattr(part, name)[i] for i in chosen)
        whole.failures += part.failures
        if part.baselines is not None:
            whole.baselines = [*(whole.baselines or []), *(part.baselines[i] for i in chosen)]
        prompts += len(wanted)
    return whole


def sampling_of(config: SamplingConfig, max_tokens: int, seed: int, stop_ids: tuple[int, ...]) -> Sampling:
    """The engine's sampling parameters for a section of the configuration."""
    return Sampling(
        n=config.n,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=max_tokens,
        seed=seed,
        stop_ids=(*stop_ids, *config.stop_token_ids),
        min_p=config.min_p,
        stop=tuple(config.stop),
    )


def generate(
    run: Run, items: Sequence[PromptItem], keys: Sequence[int], sampling: Sampling, *, keep_texts: bool = False
) -> Experience:
    """Has every rollout replica answer its share of the prompts, and score the answers then (`score` takes the scores).

    Args:
        keys: names of the prompts for their seeds; the responses do not depend on how prompts fall to replicas.
        keep_texts: the scores come with the decoded responses.
    """
    replicas = run.workers.spec.replicas
    shares = [range(r, len(items), replicas) for r in range(replicas)]
    tasks = [[_task(items[i], keys[i]) for i in share] for share in shares]
    places = run.workers.spec.places
    asked = run.workers.ask_by_rank("generate", lambda rank: (tasks[places[rank].replica], sampling))
    scoring = run.workers.ask("score", keep_texts)  # ranks go on to it by themselves
    by_replica = {
        places[rank].replica: shard for rank, shard in enumerate(run.workers.answers(asked)) if shard is not None
    }
    shards = [by_replica[replica] for replica in range(replicas)]
    experience = Experience(shards, [], [], [], [], [], scoring)
    for number, (shard, share) in enumerate(zip(shards, shares, strict=True)):
        experience.places += [(number, i) for i in range(len(shard.prompts))]
        experience.groups += [share[p] for p in shard.prompts]
        experience.prompt_lengths += shard.prompt_lengths
        experience.response_lengths += shard.response_lengths
        experience.clipped += shard.clipped
    return experience


def _task(item: PromptItem, key: int) -> PromptTask:
    return PromptTask(key, item.prompt_ids, item.data_source, item.ground_truth, item.extra_info, item.key)


def score(run: Run, experience: Experience) -> None:
    """Takes the scores that `generate` has asked for; fills ``scores``, ``extras`` and, when asked, ``texts``."""
    assert experience.scoring is not None
    places = run.workers.spec.places
    offsets = [0]
    for shard in experience.shards:
        offsets.append(offsets[-1] + len(shard.prompts))
    experience.scores = [0.0] * offsets[-1]
    experience.extras = [{} for _ in range(offsets[-1])]
    texts = [""] * offsets[-1]
    parts: list[ScoredShard] = run.workers.answers(experience.scoring)
    experience.failures = [failure for part in parts for failure in part.failures.values()]
    if experience.failures:
        count, first = len(experience.failures), experience.failures[0][1]
        run.console.warn(f"the scorer failed on {count} of {offsets[-1]} responses, they score 0; the first: {first}")
    for rank, part in enumerate(parts):
        for i, sequence in enumerate(part.sequences):
            at = offsets[places[rank].replica] + sequence
            experience.scores[at] = part.scores[i]
            experience.extras[at] = part.extras[i]
            if part.texts is not None:
                texts[at] = part.texts[i]
    if run.prepared.reward_shape is not None:
        score_by_model(run, experience)
    experience.texts = texts if all(part.texts is not None for part in parts) else None


def score_by_model(run: Run, experience: Experience) -> None:
    """Fills ``scores`` by the reward model: each data parallel rank scores a share with about as many tokens."""
    shares = balance(experience.lengths, run.prepared.layout.dp)
    parts = run.workers.call("reward_model_scores", [experience.pieces(share) for share in shares])
    for share, part in zip(shares, [p for p in parts if p is not None], strict=True):
        for sequence, value in zip(share, part, strict=True):
            experience.scores[sequence] = value
