"""What loading prompts and preferences have in common: rows in chunks, checked, tokenized, measured and kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from megaverl.data.files import Record, each_record, shorten
from megaverl.data.report import DataReport, lengths
from megaverl.data.spool import Spool
from megaverl.errors import Problem, Problems

if TYPE_CHECKING:
    from megaverl.config.schema import DataConfig
    from megaverl.data.tokenizer import Tokenizer

SHOWN = 20  # bad rows named one by one
CHUNK = 4096  # rows in memory at once
Item = TypeVar("Item")


@dataclass(frozen=True)
class Checked:
    """A row that is as it should be: its number over all files, its place, and what the check made of it."""

    key: int
    where: str
    row: Any


@dataclass(frozen=True)
class RowDataset(Generic[Item]):
    """The kept rows in file order.

    Attributes:
        items: in memory, or in a file (`Spool`).
        report: what was read, and what became of it.
        parts: kept rows of each entry of the list of files.
    """

    items: Sequence[Item]
    report: DataReport
    parts: list[int]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, position: int) -> Item:
        return self.items[position]


class RowLoader(ABC, Generic[Item]):
    """Turns the rows of files into items, a chunk at a time, and counts what happened to them.

    Args:
        vocab: rows of the model's embedding.
        spool: folder for a file of the items; None keeps them in memory.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, vocab: int, spool: Path | None) -> None:
        self.config, self.tokenizer, self.vocab = config, tokenizer, vocab
        self.problems = Problems()
        self.counts: Counter[str] = Counter()
        self.kept: list[Item] | Spool = [] if spool is None else Spool(spool)
        self._sources: Counter[str] = Counter()
        self._prompt_tokens, self._answer_tokens, self._contents = array("l"), array("l"), array("Q")
        self._first_chat = ""

    @abstractmethod
    def check(self, record: Record) -> tuple[Any | None, list[Problem]]:
        """The row as the schema has it, or None and what is wrong with it."""

    @abstractmethod
    def items(self, checked: Sequence[Checked]) -> Iterator[Item | None]:
        """An item for each row, in order; None for one that is left out or has become a problem."""

    @abstractmethod
    def answers(self, item: Item) -> Sequence[list[int]]:
        """The answers' token ids of an item."""

    def load(self, files: Sequence[str | Path], problems: Problems, key: str) -> RowDataset[Item]:
        """All rows of the files. What is wrong goes to ``problems``, at most `SHOWN` rows by name."""
        check_vocabulary(self.tokenizer, self.vocab, problems)
        size = CHUNK if self.config.check_workers == 1 else 16 * CHUNK  # processes start anew for each chunk
        parts = []
        for entry in files:
            before = len(self.kept)
            records = each_record([entry], self.problems, key=key)
            while chunk := list(islice(records, size)):
                self._add(chunk)
            parts.append(len(self.kept) - before)
        self._report_template(problems)
        problems.found += shorten(self.problems.found, limit=SHOWN, what=key)
        if self.counts["good"] and not self.kept and not self.problems.found:
            limits = "data.max_prompt_length" + (" or data.max_response_length" if self._answer_tokens else "")
            fix = f"All {self.counts['rows']} rows are longer than a limit; raise {limits}."
            problems.add("no rows are left", where=f"{', '.join(map(str, files))}, key {key}", fix=fix)
        return RowDataset(self.kept, self._report(files), parts)

    def _add(self, records: Sequence[Record]) -> None:
        good = []
        for record in records:
            row, found = self.check(record)
            self.problems.found += found
            if row is not None:
                good.append(Checked(self.counts["rows"], record.where, row))
            self.counts["rows"] += 1
        if not self.tokenizer.has_chat_template:
            chats = [c for c in good if not isinstance(c.row.prompt, str)]
            self.counts["chats"] += len(chats)
            self._first_chat = self._first_chat or (chats[0].where if chats else "")
            good = [c for c in good if isinstance(c.row.prompt, str)]
        self.counts["good"] += len(good)
        kept = []
        for checked, item in zip(good, self.items(good), strict=True):
            if item is not None:
                kept.append(item)
                self._measure(item, checked)
        self.kept.extend(kept)

    def _measure(self, item: Any, checked: Checked) -> None:
        answers = self.answers(item)
        self._prompt_tokens.append(len(item.prompt_ids))
        self._answer_tokens.extend(len(answer) for answer in answers)
        self._sources[item.data_source] += 1
        self.counts["plain"] += isinstance(checked.row.prompt, str)
        content = blake2b(digest_size=8)
        for ids in (item.prompt_ids, *answers):
            content.update(array("l", [len(ids), *ids]).tobytes())
        self._contents.append(int.from_bytes(content.digest(), "little"))

    def _report(self, files: Sequence[str | Path]) -> DataReport:
        distinct = len(np.unique(np.frombuffer(self._contents, np.uint64))) if self._contents else 0
        return DataReport(
            files=[str(f) for f in files],
            rows=self.counts["rows"],
            kept=len(self.kept),
            filtered=self.counts["filtered"],
            truncated=self.counts["truncated"],
            responses_truncated=self.counts["responses_truncated"],
            duplicates=len(self.kept) - distinct,
            plain_prompts=self.counts["plain"],
            data_sources={source: count for source, count in self._sources.items() if source},
            prompt_tokens=lengths(self._prompt_tokens),
            response_tokens=lengths(self._answer_tokens),
            policy=self.config.truncation,
            max_prompt_length=self.config.max_prompt_length,
        )

    def _report_template(self, problems: Problems) -> None:
        if self.counts["chats"]:
            problems.add(
                f"the tokenizer has no chat template, and {self.counts['chats']} prompts are chat messages "
                f"(the first: {self._first_chat})",
                where=str(self.tokenizer.path),
                fix="Use a tokenizer with chat_template in tokenizer_config.json, or give prompts as strings.",
            )

    def with_end(self, ids: list[int]) -> list[int]:
        """The answer's ids followed by the end token."""
        end = self.tokenizer.end_id
        return ids if ids[-1:] == [end] else [*ids, end]

    def checked_ids(self, checked: Checked, prompt: list[int] | str, answers: Sequence[int]) -> list[int] | None:
        """The prompt's ids; None after a problem was added: no ids, or ids that the model does not have."""
        if isinstance(prompt, str):
            self.problems.add(
                f"the chat template refuses the messages: {prompt}",
                where=f"{checked.where}, key {self.config.prompt_key}",
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

    def fit_prompt(self, ids: list[int], where: str) -> list[int] | None:
        """The prompt within its limit by ``data.truncation``; None where the row is refused or left out."""
        return self._fit(ids, self.config.max_prompt_length, where, "prompt", self.config.truncation)

    def fit_answer(self, ids: list[int], where: str) -> list[int] | None:
        """As `fit_prompt`; an answer is cut at its right end under both cutting policies."""
        policy = "right" if self.config.truncation == "left" else self.config.truncation
        return self._fit(ids, self.config.max_response_length, where, "response", policy)

    def _fit(self, ids: list[int], limit: int, where: str, name: str, policy: str) -> list[int] | None:
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


def check_vocabulary(tokenizer: Tokenizer, vocab: int, problems: Problems) -> None:
    """The model has a row for every id of the tokenizer."""
    if tokenizer.size <= vocab:
        return
    problem = Problem(
        f"the tokenizer has ids up to {tokenizer.size - 1}, the model's embedding has {vocab} rows",
        f"{tokenizer.path}, key model.tokenizer_path",
        "Use the tokenizer that belongs to the checkpoint.",
    )
    if problem not in problems.found:  # training and validation rows are loaded one after the other
        problems.found.append(problem)
