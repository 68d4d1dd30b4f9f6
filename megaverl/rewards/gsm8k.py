"""The scorer of GSM8K's answer form: a worked solution that ends with ``#### 42``."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

_NUMBER = r"[-+]?\s*\$?\s*[-+]?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_ANY = re.compile(_NUMBER)


def extract_answer(text: str, method: Literal["strict", "flexible"] = "strict") -> str | None:
    """The answer of a response as a plain number without commas and signs of money; None when there is none.

    The whole response is read.

    Args:
        method: ``strict`` takes the last number after ``####``; ``flexible`` the last number of all.
    """
    found = (_MARKED if method == "strict" else _ANY).findall(text)
    return _plain(found[-1]) if found else None


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    method: Literal["strict", "flexible"] = "strict",
) -> float:
    """1.0 when the response's answer equals the ground truth as a number, else 0.0; always a float.

    Raises:
        ValueError: the ground truth is not a number.
    """
    truth = _decimal(ground_truth)
    if truth is None:
        raise ValueError(f"the ground truth of {data_source} must be a number, this is {ground_truth!r}")
    answer = extract_answer(solution_str, method)
    return 1.0 if answer is not None and _decimal(answer) == truth else 0.0


def check_ground_truth(value: Any) -> str | None:
    """What is wrong with a ground truth; None when it is a number."""
    return None if _decimal(value) is not None else f"the ground truth must be a number, this is {value!r}"


def _plain(number: str) -> str:
    return re.sub(r"[\s$,+]", "", number)


def _decimal(value: Any) -> Decimal | None:
    """The number, or None. Text may have commas, a sign of money and a trailing period."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = Decimal(_plain(str(value)).removesuffix("."))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
