"""What was found in the data: counts and lengths, for the console and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Lengths:
    """Least, mean and most tokens."""

    min: int
    mean: float
    max: int


def lengths(counts: Sequence[int]) -> Lengths | None:
    """Statistics of token counts; None for no rows."""
    return Lengths(min(counts), sum(counts) / len(counts), max(counts)) if counts else None


@dataclass(frozen=True)
class DataReport:
    """What became of the rows of some files.

    Attributes:
        rows: rows read.
        kept: rows in the data set.
        filtered: rows left out because they are over a limit (policy ``filter``).
        truncated: prompts cut (policies ``left`` and ``right``); ``responses_truncated`` likewise.
        duplicates: kept rows with the same tokens as an earlier one; a note, they stay.
        plain_prompts: prompts that are strings and go to the model without the chat template.
        data_sources: data source -> kept rows.
        prompt_tokens: lengths of the kept prompts as they are sent; ``response_tokens`` of supervised answers.
    """

    files: list[str]
    rows: int
    kept: int
    filtered: int
    truncated: int
    responses_truncated: int
    duplicates: int
    plain_prompts: int
    data_sources: dict[str, int]
    prompt_tokens: Lengths | None
    response_tokens: Lengths | None
    policy: str
    max_prompt_length: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The report as text, one fact a line."""
        text = [f"{', '.join(self.files)}: {self.kept:,} of {self.rows:,} rows kept"]
        if self.prompt_tokens:
            text.append(f"prompt tokens {_span(self.prompt_tokens)} (limit {self.max_prompt_length})")
        if self.response_tokens:
            text.append(f"response tokens {_span(self.response_tokens)}")
        notes = (
            (self.filtered, "left out, longer than the limit (data.truncation=filter)"),
            (self.truncated, f"prompts cut on the {self.policy} (data.truncation={self.policy})"),
            (self.responses_truncated, "responses cut on the right"),
            (self.duplicates, "rows repeat an earlier row"),
            (self.plain_prompts, "prompts are strings and go to the model without the chat template"),
        )
        return [*text, *(f"note: {count:,} {what}" for count, what in notes if count)]


def _span(found: Lengths) -> str:
    return f"min {found.min}, mean {found.mean:.1f}, max {found.max}"
