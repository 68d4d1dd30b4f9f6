"""Preference rows of a run: every row checked, rendered, tokenized and measured before anything else starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megaverl.data.batch import UNIT, SequenceBatch
from megaverl.data.dataset import SHOWN, Checked, RowLoader, check_vocabulary, kept_parts, require_template
from megaverl.data.encode import encode_prompts
from megaverl.data.files import read_all, shorten
from megaverl.data.preference import JudgedCompletion, Kind, PreferencePair, check_preference
from megaverl.data.report import DataReport
from megaverl.errors import Problems

if TYPE_CHECKING:
    from megaverl.config.schema import DataConfig
    from megaverl.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class PreferenceItem:
    """One row: a prompt with its answers, ready to be packed.

    Attributes:
        key: number of its row over all files, from 0.
        prompt_ids: no more than ``data.max_prompt_length``.
        answers: ids of each answer, end token included: chosen and rejected, or one judged answer.
        label: whether the one answer is wanted; True for a pair.
        data_source: not used; for reports.
    """

    key: int
    prompt_ids: list[int]
    answers: tuple[list[int], ...]
    label: bool = True
    data_source: str = ""


@dataclass(frozen=True)
class PreferenceDataset:
    """The kept rows in file order, the report of what was read, and the kept rows of each entry of the files."""

    items: list[PreferenceItem]
    report: DataReport
    parts: list[int]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, position: int) -> PreferenceItem:
        return self.items[position]


def load_preferences(
    files: Sequence[str | Path],
    data_config: DataConfig,
    tokenizer: Tokenizer,
    problems: Problems,
    *,
    kind: Kind,
    vocab: int,
    key: str = "data.train_files",
) -> PreferenceDataset:
    """Reads, checks, renders and tokenizes all rows; prompts and lengths as in `dataset.load_prompts`.

    An answer is followed by the end token. Under ``data.truncation`` left and right an answer over its limit is cut at
    its right end.

    Args:
        problems: gets what is wrong, at most 20 rows by name; the caller raises.
        kind: ``pair`` (prompt, chosen, rejected) or ``kto`` (prompt, completion, label).
        vocab: rows of the model's embedding.
        key: configuration key of ``files``, for the messages.
    """
    found = Problems()
    check_vocabulary(tokenizer, vocab, problems)
    read = [read_all([entry], found, key=key) for entry in files]
    records = [record for part in read for record in part]
    checked = []
    for number, record in enumerate(records):
        row, bad = check_preference(record.values, record.where, kind, prompt_key=data_config.prompt_key)
        found.found += bad
        if row is not None:
            checked.append(Checked(number, record.where, row))
    checked = require_template(checked, tokenizer, problems)
    loader = _PreferenceLoader(data_config, tokenizer, "pref", vocab, found)
    items = loader.preferences(checked)
    problems.found += shorten(found.found, limit=SHOWN, what=key)
    report = loader.summary(
        files,
        len(records),
        len(items),
        prompts=[len(item.prompt_ids) for item in items],
        responses=[len(ids) for item in items for ids in item.answers],
        sources={},
    )
    if checked and not items and not found.found:
        fix = f"All {len(records)} rows are longer than a limit; raise data.max_prompt_length or max_response_length."
        problems.add("no rows are left", where=f"{', '.join(map(str, files))}, key {key}", fix=fix)
    return PreferenceDataset(items, report, kept_parts([len(part) for part in read], [item.key for item in items]))


class _PreferenceLoader(RowLoader):
    """Turns checked rows into items and counts what happened to them."""

    def preferences(self, checked: Sequence[Checked]) -> list[PreferenceItem]:
        prompts = encode_prompts(self.tokenizer, [c.row.prompt for c in checked], self.config.check_workers)
        texts = [_texts(c.row) for c in checked]
        encoded = iter(self.tokenizer.encode([text for row in texts for text in row]))
        items, seen = [], set()
        for row, prompt, own in zip(checked, prompts, texts, strict=True):
            answers = [self.with_end(next(encoded)) for _ in own]
            item = self._preference(row, prompt, answers)
            if item is None:
                continue
            items.append(item)
            content = (tuple(item.prompt_ids), *map(tuple, item.answers))
            self.counts["duplicates"] += content in seen
            self.counts["plain"] += isinstance(row.row.prompt, str)
            seen.add(content)
        return items

    def _preference(
        self, checked: Checked, prompt: list[int] | str, answers: Sequence[list[int]]
    ) -> PreferenceItem | None:
        ids = self.checked_ids(checked, prompt, [i for answer in answers for i in answer])
        if ids is None:
            return None
        fitted = self.fit(ids, self.config.max_prompt_length, checked.where, "prompt", self.config.truncation)
        if fitted is None:
            return None
        policy = "right" if self.config.truncation == "left" else self.config.truncation
        limit = self.config.max_response_length
        kept = [self.fit(answer, limit, checked.where, "response", policy) for answer in answers]
        if any(answer is None for answer in kept):
            return None
        if len(kept) == 2 and kept[0] == kept[1]:
            what = "chosen and rejected are the same tokens, cut to the limit"
            fix = "raise data.max_response_length, or remove the row"
            self.problems.add(what, where=f"{checked.where}, key rejected", fix=fix)
            return None
        label = checked.row.label if isinstance(checked.row, JudgedCompletion) else True
        return PreferenceItem(checked.key, fitted, tuple(kept), label)


def _texts(row: PreferencePair | JudgedCompletion) -> list[str]:
    return [row.completion] if isinstance(row, JudgedCompletion) else [row.chosen, row.rejected]


def pairs_batch(items: Sequence[PreferenceItem], preferred: str) -> SequenceBatch:
    """Pairs packed, each chosen answer directly before its rejected one.

    Args:
        preferred: name of the per-sequence column with 1 for chosen and 0 for rejected.
    """
    return SequenceBatch.from_lists(
        [item.prompt_ids for item in items for _ in item.answers],
        [answer for item in items for answer in item.answers],
        per_sequence={
            UNIT: torch.arange(len(items)).repeat_interleave(2),
            preferred: torch.tensor([1, 0]).repeat(len(items)),
        },
    )


def judged_batch(items: Sequence[PreferenceItem], preferred: str, baseline: int) -> SequenceBatch:
    """Judged answers packed, then each prompt once more with the answer to the next one (the first to the last).

    Args:
        preferred: name of the per-sequence column with 1 for wanted, 0 for unwanted, ``baseline`` for the others.
    """
    prompts = [item.prompt_ids for item in items]
    answers = [item.answers[0] for item in items]
    kinds = [int(item.label) for item in items] + [baseline] * len(items)
    return SequenceBatch.from_lists(
        prompts * 2,
        [*answers, *answers[1:], answers[0]],
        per_sequence={UNIT: torch.arange(len(items)).repeat(2), preferred: torch.tensor(kinds)},
    )
