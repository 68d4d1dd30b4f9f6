"""Preference rows of a run: every row checked, rendered, tokenized and measured before anything else starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megaverl.data.batch import UNIT, SequenceBatch
from megaverl.data.encode import encode_prompts
from megaverl.data.files import Record
from megaverl.data.loading import Checked, RowDataset, RowLoader
from megaverl.data.preference import JudgedCompletion, Kind, PreferencePair, check_preference
from megaverl.errors import Problem, Problems

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


PreferenceDataset = RowDataset[PreferenceItem]


def load_preferences(
    files: Sequence[str | Path],
    data_config: DataConfig,
    tokenizer: Tokenizer,
    problems: Problems,
    *,
    kind: Kind,
    vocab: int,
    key: str = "data.train_files",
    spool: Path | None = None,
) -> PreferenceDataset:
    """Reads, checks, renders and tokenizes all rows; prompts and lengths as in `dataset.load_prompts`.

    An answer is followed by the end token. Under ``data.truncation`` left and right an answer over its limit is cut at
    its right end.

    Args:
        problems: gets what is wrong, at most 20 rows by name; the caller raises.
        kind: ``pair`` (prompt, chosen, rejected) or ``kto`` (prompt, completion, label).
        vocab: rows of the model's embedding.
        key: configuration key of ``files``, for the messages.
        spool: folder for a file of the tokenized rows; None keeps them in memory.
    """
    return _PreferenceLoader(kind, data_config, tokenizer, vocab, spool).load(files, problems, key)


class _PreferenceLoader(RowLoader[PreferenceItem]):
    def __init__(self, kind: Kind, config: DataConfig, tokenizer: Tokenizer, vocab: int, spool: Path | None) -> None:
        super().__init__(config, tokenizer, vocab, spool)
        self._kind = kind

    def check(self, record: Record) -> tuple[PreferencePair | JudgedCompletion | None, list[Problem]]:
        return check_preference(record.values, record.where, self._kind, prompt_key=self.config.prompt_key)

    def items(self, checked: Sequence[Checked]) -> Iterator[PreferenceItem | None]:
        prompts = encode_prompts(self.tokenizer, [c.row.prompt for c in checked], self.config.check_workers)
        texts = [_texts(c.row) for c in checked]
        encoded = iter(self.tokenizer.encode([text for row in texts for text in row]))
        for row, prompt, own in zip(checked, prompts, texts, strict=True):
            yield self._item(row, prompt, [self.with_end(next(encoded)) for _ in own])

    def answers(self, item: PreferenceItem) -> Sequence[list[int]]:
        return item.answers

    def _item(self, checked: Checked, prompt: list[int] | str, answers: Sequence[list[int]]) -> PreferenceItem | None:
        ids = self.checked_ids(checked, prompt, [i for answer in answers for i in answer])
        fitted = None if ids is None else self.fit_prompt(ids, checked.where)
        if fitted is None:
            return None
        kept = [self.fit_answer(answer, checked.where) for answer in answers]
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
