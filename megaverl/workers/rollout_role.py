"""The rollout and the reward in a worker: generate, keep the responses, score them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megaverl.data.batch import SequenceBatch
from megaverl.data.tokenizer import Tokenizer
from megaverl.errors import RunError
from megaverl.rewards.scorer import Score, Scorer, ScoreRequest
from megaverl.rollout.engine import Completion, RolloutEngine, Sampling
from megaverl.rollout.stops import cut_at_stop


@dataclass(frozen=True)
class PromptTask:
    """One prompt to answer.

    Attributes:
        key: names the prompt in the run; its samples' seeds derive from it.
        ids: token ids of the rendered prompt.
        data_source, ground_truth, extra_info: what the scorer gets.
        row: number of its row in the data, for messages.
    """

    key: int
    ids: list[int]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    row: int


@dataclass(frozen=True)
class GeneratedShard:
    """What the driver sees of the responses of one rollout replica.

    Attributes:
        batch: reference to the SequenceBatch in the object store.
        prompts: position of each sequence's prompt in the replica's tasks, [sequences].
        prompt_lengths, response_lengths: tokens, [sequences].
        clipped: the response ended at the length limit, [sequences].
    """

    batch: Any
    prompts: list[int]
    prompt_lengths: list[int]
    response_lengths: list[int]
    clipped: list[bool]


@dataclass(frozen=True)
class ScoredShard:
    """Scores of the sequences that this rank scored; ``texts`` only when asked for.

    Attributes:
        failures: number of the sequence -> (``error`` or ``timeout``, reason), where the scorer failed and 0 stands.
    """

    sequences: list[int]
    scores: list[float]
    extras: list[dict[str, Any]]
    texts: list[str] | None
    failures: dict[int, tuple[str, str]]


class RolloutRole:
    """All TP ranks of a replica generate the same responses; each scores its share of them."""

    def __init__(
        self, engine: RolloutEngine, tokenizer: Tokenizer, scorer: Scorer | None, tp_rank: int, tp: int
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.scorer = scorer
        self.tp_rank = tp_rank
        self.tp = tp
        self._tasks: list[PromptTask] = []
        self._completions: list[Completion] = []

    def generate(self, tasks: Sequence[PromptTask], sampling: Sampling) -> None:
        """Answers ``tasks``; the responses are kept until the next call."""
        self._tasks = list(tasks)
        self._completions = []
        if tasks:
            found = self.engine.generate([t.ids for t in tasks], [t.key for t in tasks], sampling)
            self._completions = [cut_at_stop(c, sampling.stop, self.tokenizer.decode) for c in found]
        check_complete(self._completions, tasks, sampling.n)

    def batch(self) -> SequenceBatch:
        """The last responses, ordered by (prompt, sample), with the column ``rollout_log_probs``."""
        done = self._completions
        return SequenceBatch.from_lists(
            [self._tasks[c.prompt].ids for c in done],
            [c.token_ids for c in done],
            response_columns={"rollout_log_probs": [c.log_probs for c in done]},
        )

    def describe(self, reference: Any) -> GeneratedShard:
        """The driver's view of the last `generate`, with the batch behind ``reference``."""
        done = self._completions
        return GeneratedShard(
            batch=reference,
            prompts=[c.prompt for c in done],
            prompt_lengths=[len(self._tasks[c.prompt].ids) for c in done],
            response_lengths=[len(c.token_ids) for c in done],
            clipped=[c.finish == "length" for c in done],
        )

    def score(self, keep_texts: bool) -> ScoredShard:
        """Scores every tp-th response of the last `generate`, from this rank's own on; 0 without a scorer."""
        own = range(self.tp_rank, len(self._completions), self.tp)
        if self.scorer is None and not keep_texts:  # a reward model scores, where the batch is assembled
            return ScoredShard(list(own), [0.0] * len(own), [{} for _ in own], None, {})
        texts = [self.tokenizer.decode(self._completions[i].token_ids) for i in own]
        rows = []
        for i, text in zip(own, texts, strict=True):
            task = self._tasks[self._completions[i].prompt]
            rows.append(ScoreRequest(task.data_source, text, task.ground_truth, task.extra_info, task.row))
        scores = self.scorer.score(rows) if self.scorer is not None else [Score(0.0) for _ in rows]
        return ScoredShard(
            list(own),
            [s.value for s in scores],
            [s.extra for s in scores],
            texts if keep_texts else None,
            {i: (s.failure, s.reason) for i, s in zip(own, scores, strict=True) if s.failure},
        )


def check_complete(completions: Sequence[Completion], tasks: Sequence[PromptTask], n: int) -> None:
    """Raises RunError unless every task has exactly the samples 0 to n - 1: groups are compared, none may be short."""
    wanted = [(prompt, sample) for prompt in range(len(tasks)) for sample in range(n)]
    found = [(c.prompt, c.sample) for c in completions]
    if found == wanted:
        return
    missing = sorted(set(wanted) - set(found))
    named = ", ".join(f"sample {sample} of row {tasks[prompt].row}" for prompt, sample in missing[:5])
    raise RunError(
        f"the rollout engine returned {len(found)} responses for {len(tasks)} prompts x {n} samples"
        + (f"; {len(missing)} never came: {named}" if missing else ", not one of each in order")
    )
