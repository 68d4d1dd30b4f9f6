"""The scorer of MATH-style rows: a final expression, compared by value with Math-Verify.

It parses LaTeX and plain expressions and compares them with sympy, which may take for ever on a strange one; so it
runs in a process with a time-out for each response (`megaverl.rewards.pool`), and Math-Verify's own alarms are off.
"""

from __future__ import annotations

import logging
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    r"""1.0 when the response's last ``\boxed{..}``, without one its last expression, has the ground truth's value."""
    from math_verify import verify

    answer = _parse(solution_str[max(solution_str.rfind(r"\boxed"), 0) :])
    return float(bool(answer) and verify(_parse_truth(ground_truth), answer, timeout_seconds=None))


def check_ground_truth(value: Any) -> str | None:
    """What is wrong with a ground truth; None when it is an expression that can be read."""
    if isinstance(value, bool) or not isinstance(value, int | float | str) or not str(value).strip():
        return f"the ground truth must be a number or an expression, this is {value!r}"
    return None if _parse_truth(value) else f"the ground truth cannot be read as an expression: {value!r}"


def _parse_truth(value: Any) -> list[Any]:
    text = str(value).strip()
    return _parse(text if "$" in text or r"\boxed" in text else f"${text}$")


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns on each call that its alarms are off
    return parse(text, parsing_timeout=None)
