"""What was found in the data: counts and lengths, for the console and as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

BAR = 40  # characters of the longest bar


@dataclass(frozen=True)
class Lengths:
    """Least, mean and most tokens, and how they spread.

    Attributes:
        histogram: (longest of the bin, rows in it), bins at powers of two; the last one ends at ``max``.
    """

    min: int
    mean: float
    max: int
    histogram: tuple[tuple[int, int], ...] = ()


def lengths(counts: Sequence[int]) -> Lengths | None:
    """Statistics of token counts; None for no rows."""
    return Lengths(min(counts), sum(counts) / len(counts), max(counts), _histogram(counts)) if counts else None


def _histogram(counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Rows by length in bins (0, 1], (1, 2], (2, 4], ...; empty bins below the shortest row are left out."""
    most = max(counts)
    bins = Counter(min(1 << max(0, count - 1).bit_length(), most) for count in counts)
    ends = {min(1 << power, most) for power in range(max(0, most - 1).bit_length() + 1)}
    return tuple((end, bins[end]) for end in sorted(ends) if end >= min(bins))


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
        if self.prompt_tokens:
            text += _bars("prompt tokens", self.prompt_tokens)
        if self.response_tokens:
            text += _bars("response tokens", self.response_tokens)
        return [*text, *(f"note: {count:,} {what}" for count, what in notes if count)]


def _bars(what: str, found: Lengths) -> list[str]:
    """The histogram as text, one bin a line."""
    most = max(rows for _, rows in found.histogram)
    width = len(f"{found.max:,}")
    return [
        f"{what} up to {end:>{width},}: {'#' * -(-BAR * rows // most)}{' ' * bool(rows)}{rows:,}"
        for end, rows in found.histogram
    ]


def _span(found: Lengths) -> str:
    return f"min {found.min}, mean {found.mean:.1f}, max {found.max}"
