"""The prompts of a run: every row checked, rendered, tokenized and measured before anything else starts."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megaverl.data.encode import encode_prompts
from megaverl.data.files import Record, read_all, shorten
from megaverl.data.report import DataReport, lengths
from megaverl.data.schema import Row, RowChecker, RowRules
from megaverl.errors import Problem, Problems

if TYPE_CHECKING:
    from megaverl.config.schema import DataConfig
    from megaverl.data.preference import JudgedCompletion, PreferencePair
    from megaverl.data.tokenizer import Tokenizer
    from megaverl.rewards.registry import Registry

SHOWN = 20  # bad rows named one by one


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


@dataclass(frozen=True)
class PromptDataset:
    """The kept rows in file order, and the report of what was read.

    Attributes:
        parts: kept rows of each entry of the list of files.
    """

    items: list[PromptItem]
    report: DataReport
    parts: list[int]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, position: int) -> PromptItem:
        return self.items[position]


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
    """
    found = Problems()
    check_vocabulary(tokenizer, vocab, problems)
    read = [read_all([entry], found, key=key) for entry in files]
    records = [record for part in read for record in part]
    rules = _rules(data_config, kind, custom_reward, registry)
    checked = _check_rows(records, replace(rules, scored=False) if reward_model else rules, found)
    checked = require_template(checked, tokenizer, problems)
    loader = RowLoader(data_config, tokenizer, kind, vocab, found)
    items = loader.items(checked)
    problems.found += shorten(found.found, limit=SHOWN, what=key)
    report = loader.report(files, len(records), items)
    if checked and not items and not found.found:
        fix = f"All {len(records)} rows are longer than the limit; raise data.max_prompt_length."
        problems.add("no rows are left", where=f"{', '.join(map(str, files))}, key {key}", fix=fix)
    return PromptDataset(items, report, kept_parts([len(part) for part in read], [item.key for item in items]))


def kept_parts(rows: Sequence[int], keys: Sequence[int]) -> list[int]:
    """Kept rows of each entry of the list of files.

    Args:
        rows: rows read from each entry.
        keys: numbers of the kept rows over all entries.
    """
    ends = list(accumulate(rows))
    within = Counter(bisect_right(ends, key) for key in keys)
    return [within[part] for part in range(len(rows))]


def _rules(config: DataConfig, kind: str, custom_reward: bool, registry: Registry | None) -> RowRules:
    from megaverl.rewards.registry import Registry

    if kind == "sft":
        return RowRules(config.prompt_key, config.response_key)
    return RowRules(config.prompt_key, None, None if custom_reward else registry or Registry())


@dataclass(frozen=True)
class Checked:
    key: int
    where: str
    row: Row | PreferencePair | JudgedCompletion


def _check_rows(records: Sequence[Record], rules: RowRules, problems: Problems) -> list[Checked]:
    checker = RowChecker(rules)
    good = []
    for number, record in enumerate(records):
        row, found = checker.check(record.values, record.where)
        problems.found += found
        if row is not None:
            good.append(Checked(number, record.where, row))
    return good


def check_vocabulary(tokenizer: Tokenizer, vocab: int, problems: Problems) -> None:
    if tokenizer.size <= vocab:
        return
    problem = Problem(
        f"the tokenizer has ids up to {tokenizer.size - 1}, the model's embedding has {vocab} rows",
        f"{tokenizer.path}, key model.tokenizer_path",
        "Use the tokenizer that belongs to the checkpoint.",
    )
    if problem not in problems.found:  # training and validation rows are loaded one after the other
        problems.found.append(problem)


def require_template(checked: list[Checked], tokenizer: Tokenizer, problems: Problems) -> list[Checked]:
    """The rows that can be rendered; one problem when chat messages meet a tokenizer without a chat template."""
    chats = [c for c in checked if not isinstance(c.row.prompt, str)]
    if tokenizer.has_chat_template or not chats:
        return checked
    problems.add(
        f"the tokenizer has no chat template, and {len(chats)} prompts are chat messages (the first: {chats[0].where})",
        where=str(tokenizer.path),
        fix="Use a tokenizer with chat_template in tokenizer_config.json, or give prompts as strings.",
    )
    return [c for c in checked if isinstance(c.row.prompt, str)]


class RowLoader:
    """Turns checked rows into items and counts what happened to them."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, kind: str, vocab: int, problems: Problems) -> None:
        self.config, self.tokenizer, self.kind, self.vocab, self.problems = config, tokenizer, kind, vocab, problems
        self.counts: Counter[str] = Counter()

    def items(self, checked: Sequence[Checked]) -> list[PromptItem]:
        prompts = encode_prompts(self.tokenizer, [c.row.prompt for c in checked], self.config.check_workers)
        responses: list[list[int]] | list[None] = [None] * len(checked)
        if self.kind == "sft":
            responses = [self.with_end(ids) for ids in self.tokenizer.encode([c.row.response for c in checked])]
        items, seen = [], set()
        for row, prompt, response in zip(checked, prompts, responses, strict=True):
            item = self._item(row, prompt, response)
            if item is None:
                continue
            items.append(item)
            content = (tuple(item.prompt_ids), tuple(item.response_ids or ()))
            self.counts["duplicates"] += content in seen
            self.counts["plain"] += isinstance(row.row.prompt, str)
            seen.add(content)
        return items

    def report(self, files: Sequence[str | Path], rows: int, items: Sequence[PromptItem]) -> DataReport:
        return self.summary(
            files,
            rows,
            len(items),
            prompts=[len(item.prompt_ids) for item in items],
            responses=[len(item.response_ids) for item in items if item.response_ids is not None],
            sources=dict(Counter(item.data_source for item in items)),
        )

    def summary(
        self,
        files: Sequence[str | Path],
        rows: int,
        kept: int,
        *,
        prompts: Sequence[int],
        responses: Sequence[int],
        sources: dict[str, int],
    ) -> DataReport:
        """The report from lengths in tokens and what was counted."""
        return DataReport(
            files=[str(f) for f in files],
            rows=rows,
            kept=kept,
            filtered=self.counts["filtered"],
            truncated=self.counts["truncated"],
            responses_truncated=self.counts["responses_truncated"],
            duplicates=self.counts["duplicates"],
            plain_prompts=self.counts["plain"],
            data_sources=sources,
            prompt_tokens=lengths(prompts),
            response_tokens=lengths(responses),
            policy=self.config.truncation,
            max_prompt_length=self.config.max_prompt_length,
        )

    def with_end(self, ids: list[int]) -> list[int]:
        end = self.tokenizer.end_id
        return ids if ids[-1:] == [end] else [*ids, end]

    def checked_ids(self, checked: Checked, prompt: list[int] | str, answers: Sequence[int]) -> list[int] | None:
        """The prompt's ids; None after a problem was added: no ids, or ids that the model does not have."""
        if isinstance(prompt, str):
            place = f"{checked.where}, key {self.config.prompt_key}"
            self.problems.add(
                f"the chat template refuses the messages: {prompt}",
                where=place,
                fix="write the messages as the model's template wants them (roles and their order)",
            )
            return None
        highest = max((*prompt, *answers), default=-1)
        if highest >= self.vocab or not prompt:
            what = f"token id {highest} is outside the model's embedding of {self.vocab} rows"
            what = what if prompt else "the prompt has no tokens"
            self.problems.add(what, where=checked.where, fix="Use the tokenizer that belongs to the checkpoint.")
            return None
        return prompt

    def _item(self, checked: Checked, prompt: list[int] | str, response: list[int] | None) -> PromptItem | None:
        prompt = self.checked_ids(checked, prompt, response or ())
        if prompt is None:
            return None
        limits = self.config.max_prompt_length, self.config.max_response_length
        fitted = self.fit(prompt, limits[0], checked.where, "prompt", self.config.truncation)
        answer = response
        if fitted is not None and response is not None:
            policy = "right" if self.config.truncation == "left" else self.config.truncation
            answer = self.fit(response, limits[1], checked.where, "response", policy)
        if fitted is None or (response is not None and answer is None):
            return None
        row = checked.row
        return PromptItem(checked.key, fitted, row.data_source, row.ground_truth, row.extra_info, answer)

    def fit(self, ids: list[int], limit: int, where: str, name: str, policy: str) -> list[int] | None:
        """The ids within the limit by the policy; None where the row is refused or left out."""
        if len(ids) <= limit:
            return ids
        if policy == "error":
            fix = f"Raise data.max_{name}_length or set data.truncation to left, right or filter."
            self.problems.add(f"the {name} has {len(ids)} tokens, the limit is {limit}", where=where, fix=fix)
            return None
        if policy == "filter":
            self.counts["filtered"] += 1
            return None
        self.counts["truncated" if name == "prompt" else "responses_truncated"] += 1
        return ids[-limit:] if policy == "left" else ids[:limit]
