"""Scorers that look at the text alone: exact match, form, length."""

from __future__ import annotations

import re
from typing import Any

_MARKS = re.compile(r"(?:####|\b[Aa]nswer\s*(?:is)?\s*:)")


def exact_match(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 when the answer is the ground truth, white space aside, else 0.0.

    The answer is what follows the last ``####`` or ``Answer:``, up to the end; without either, the whole response.
    """
    answer = _MARKS.split(solution_str)[-1]
    return float(" ".join(answer.split()) == " ".join(str(ground_truth).split()))


def check_text(value: Any) -> str | None:
    """What is wrong with a ground truth to match; None when it is a text or a number."""
    if isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip():
        return None
    return f"the ground truth must be a text or a number, this is {value!r}"


def form(solution_str: str, pattern: str) -> float:
    """1.0 when the whole response, white space at its ends aside, matches the regular expression, else 0.0."""
    return float(re.fullmatch(pattern, solution_str.strip(), re.DOTALL) is not None)


def length_penalty(solution_str: str, limit: int, buffer: int) -> float:
    """0 for up to ``limit - buffer`` characters, then in a straight line down to -1 at ``limit``, and -1 beyond.

    The shape is that of the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13), in characters.
    """
    over = len(solution_str) - (limit - buffer)
    return -min(max(over, 0) / buffer, 1.0)
