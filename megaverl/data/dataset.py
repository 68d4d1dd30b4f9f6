"""The prompts of a run: every row checked, rendered, tokenized and measured before anything else starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megaverl.data.encode import encode_prompts
from megaverl.data.files import Record
from megaverl.data.loading import Checked, RowDataset, RowLoader
from megaverl.data.schema import Row, RowChecker, RowRules
from megaverl.errors import Problem, Problems

if TYPE_CHECKING:
    from megaverl.config.schema import DataConfig
    from megaverl.data.tokenizer import Tokenizer
    from megaverl.rewards.registry import Registry


@dataclass(frozen=True)
class PromptItem:
    """One prompt, ready to be sent.

    Attributes:
        key: number of its row over all files, from 0; names the prompt for the sampling seed and in logs.
        prompt_ids: the ids that the rollout sends, no more than ``data.max_prompt_length``.
        data_source: picks the scorer.
        ground_truth: for the scorer.
        extra_info: for the scorer and for logs.
        response_ids: supervised training only: the answer's ids, end token included.
    """

    key: int
    prompt_ids: list[int]
    data_source: str
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    response_ids: list[int] | None = None


PromptDataset = RowDataset[PromptItem]


def load_prompts(
    files: Sequence[str | Path],
    data_config: DataConfig,
    tokenizer: Tokenizer,
    problems: Problems,
    *,
    kind: Literal["rl", "sft"] = "rl",
    vocab: int,
    custom_reward: bool = False,
    registry: Registry | None = None,
    reward_model: bool = False,
    key: str = "data.train_files",
    spool: Path | None = None,
) -> PromptDataset:
    """Reads, checks, renders and tokenizes all rows.

    Chat messages are rendered by the tokenizer's chat template with the generation prompt; a string prompt goes to
    the model as it is (see `megaverl.data.encode`). What the policy ``data.truncation`` does is counted in the
    report: ``error`` refuses a prompt over the limit, ``left`` and ``right`` cut that end, ``filter`` leaves the
    row out. In supervised training a response over its limit is cut at its right end under ``left`` and ``right``.

    Args:
        problems: gets what is wrong, at most 20 rows by name; the caller raises. The data set returned next to
            problems has the good rows only and must not be used.
        kind: ``rl`` rows need data_source and ground truth, ``sft`` rows need a response.
        vocab: rows of the model's embedding.
        custom_reward: a custom reward function is set, so that any data source is allowed.
        registry: the run's scorers by data source; None: the built-in ones.
        reward_model: a reward model scores, so that rows need neither data source nor ground truth.
        key: configuration key of ``files``, for the messages.
        spool: folder for a file of the tokenized rows; None keeps them in memory.
    """
    rules = replace(_rules(data_config, kind, custom_reward, registry), scored=not reward_model)
    return _PromptLoader(rules, data_config, tokenizer, vocab, spool).load(files, problems, key)


def _rules(config: DataConfig, kind: str, custom_reward: bool, registry: Registry | None) -> RowRules:
    from megaverl.rewards.registry import Registry

    if kind == "sft":
        return RowRules(config.prompt_key, config.response_key)
    return RowRules(config.prompt_key, None, None if custom_reward else registry or Registry())


class _PromptLoader(RowLoader[PromptItem]):
    def __init__(
        self, rules: RowRules, config: DataConfig, tokenizer: Tokenizer, vocab: int, spool: Path | None
    ) -> None:
        super().__init__(config, tokenizer, vocab, spool)
        self._checker = RowChecker(rules)
        self._supervised = rules.response_key is not None

    def check(self, record: Record) -> tuple[Row | None, list[Problem]]:
        return self._checker.check(record.values, record.where)

    def items(self, checked: Sequence[Checked]) -> Iterator[PromptItem | None]:
        prompts = encode_prompts(self.tokenizer, [c.row.prompt for c in checked], self.config.check_workers)
        responses: list[list[int]] | list[None] = [None] * len(checked)
        if self._supervised:
            responses = [self.with_end(ids) for ids in self.tokenizer.encode([c.row.response for c in checked])]
        for row, prompt, response in zip(checked, prompts, responses, strict=True):
            yield self._item(row, prompt, response)

    def answers(self, item: PromptItem) -> Sequence[list[int]]:
        return [] if item.response_ids is None else [item.response_ids]

    def _item(self, checked: Checked, prompt: list[int] | str, response: list[int] | None) -> PromptItem | None:
        ids = self.checked_ids(checked, prompt, response or ())
        fitted = None if ids is None else self.fit_prompt(ids, checked.where)
        if fitted is None:
            return None
        if response is not None:
            response = self.fit_answer(response, checked.where)
            if response is None:
                return None
        row = checked.row
        return PromptItem(checked.key, fitted, row.data_source, row.ground_truth, row.extra_info, response)
