"""The row schema, that of verl's parquet files, and the check of one row.

A row has the columns ``data_source`` (which scorer), ``prompt`` (chat messages, or a string), ``ability``,
``reward_model`` (``{style, ground_truth}``) and ``extra_info``. A row for supervised training needs ``prompt``
and ``response`` only. Column names of prompt and response can be changed in the configuration.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megaverl.errors import Problem

Message = dict[str, Any]
Prompt = list[Message] | str
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Row:
    """One checked row.

    Attributes:
        data_source: name of the data set; picks the scorer. Empty for supervised rows that have none.
        prompt: chat messages ``[{role, content}, ...]``, or a string that goes to the model as it is.
        ability: free label such as ``math``.
        ground_truth: what the scorer compares with; None in supervised rows.
        extra_info: anything else a scorer or a log may want.
        response: the answer to learn; None in rows for reinforcement learning.
        style: how the answer is judged (verl's ``rule`` or ``model``).
    """

    data_source: str
    prompt: list[Message] | str
    ability: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    response: str | None = None
    style: str = "rule"

    def columns(self) -> dict[str, Any]:
        """The row as the file stores it."""
        stored = {
            "data_source": self.data_source,
            "prompt": self.prompt,
            "ability": self.ability,
            "reward_model": {"style": self.style, "ground_truth": self.ground_truth},
            "extra_info": self.extra_info or None,  # parquet cannot store a mapping without entries
        }
        return stored if self.response is None else {**stored, "response": self.response}


@dataclass(frozen=True)
class RowRules:
    """What a row must have.

    Attributes:
        prompt_key: column of the prompt.
        response_key: column of the answer to learn; None for reinforcement learning.
        sources: known data sources, each with a function that says what is wrong with a ground truth (None when
            nothing is); None when a custom reward function takes every source.
        scored: rows need a data source and a ground truth for a scorer; False for a reward model, which needs neither.
    """

    prompt_key: str = "prompt"
    response_key: str | None = None
    sources: Mapping[str, Callable[[Any], str | None]] | None = None
    scored: bool = True


class RowChecker:
    """Checks one row at a time and names every problem with its place."""

    def __init__(self, rules: RowRules) -> None:
        self.rules = rules

    def check(self, values: Mapping[str, Any], where: str) -> tuple[Row | None, list[Problem]]:
        """The row, or None and what is wrong with it.

        Args:
            values: column name -> value.
            where: file and row, for the messages.
        """
        found: list[Problem] = []
        prompt = check_prompt(values, self.rules.prompt_key, where, found)
        supervised = self.rules.response_key is not None
        response = self._response(values, where, found) if supervised else None
        source, truth, style = "", None, "rule"
        if supervised or not self.rules.scored:
            source = values.get("data_source") or ("" if supervised else "unnamed")
            if not isinstance(source, str):
                found.append(_wrong_type(where, "data_source", "a string", source))
        else:
            source = self._source(values, where, found)
            truth, style = self._ground_truth(values, source, where, found)
        extra = values.get("extra_info")
        if extra is not None and not isinstance(extra, Mapping):
            found.append(_wrong_type(where, "extra_info", "a mapping", extra))
        if found:
            return None, found
        ability = values.get("ability") or ""
        return Row(source, prompt, str(ability), truth, dict(extra or {}), response, style), found

    def _response(self, values: Mapping[str, Any], where: str, found: list[Problem]) -> str | None:
        key = self.rules.response_key or ""
        if not has_value(
            values, key, where, found, "data.response_key names the column that holds the answer to learn"
        ):
            return None
        response = values[key]
        if not isinstance(response, str):
            found.append(_wrong_type(where, key, "a string", response))
            return None
        if not response.strip():
            found.append(Problem("the response is empty", f"{where}, key {key}", "Give it a text or remove the row."))
        return response

    def _source(self, values: Mapping[str, Any], where: str, found: list[Problem]) -> str:
        if not has_value(values, "data_source", where, found, "It names the data set and picks the scorer"):
            return ""
        source = values["data_source"]
        if not isinstance(source, str):
            found.append(_wrong_type(where, "data_source", "a string", source))
            return ""
        sources = self.rules.sources
        if not source.strip():
            fix = "It names the data set and picks the scorer."
            found.append(Problem("the data source is empty", f"{where}, key data_source", fix))
        elif sources is not None and source not in sources:
            fix = (
                f"Known are {', '.join(sorted(sources))}.{_nearest(source, sources)} "
                "For others set reward.sources, or reward.function.path to a file with your own compute_score."
            )
            found.append(Problem(f"no scorer for data source {source!r}", f"{where}, key data_source", fix))
        return source

    def _ground_truth(
        self, values: Mapping[str, Any], source: str, where: str, found: list[Problem]
    ) -> tuple[Any, str]:
        if not has_value(values, "reward_model", where, found, "It holds {style, ground_truth}"):
            return None, "rule"
        model = values["reward_model"]
        if not isinstance(model, Mapping):
            found.append(_wrong_type(where, "reward_model", "a mapping with style and ground_truth", model))
            return None, "rule"
        place = f"{where}, key reward_model.ground_truth"
        truth = model.get("ground_truth")
        if truth is None:
            what = "is null" if "ground_truth" in model else "is missing"
            found.append(Problem(f"the ground truth {what}", place, "Store the right answer there."))
        else:
            check = (self.rules.sources or {}).get(source)
            reason = check(truth) if check else None
            if reason:
                found.append(Problem(reason, place, f"The scorer of {source} cannot compare with it."))
        return truth, str(model.get("style") or "rule")


def check_prompt(values: Mapping[str, Any], key: str, where: str, found: list[Problem]) -> Prompt:
    """The prompt in column ``key``; what is wrong with it goes to ``found``."""
    if not has_value(values, key, where, found, "data.prompt_key names the column that holds the prompt"):
        return ""
    prompt = values[key]
    if isinstance(prompt, str):
        if not prompt.strip():
            found.append(Problem("the prompt is empty", f"{where}, key {key}", "Give it a text or remove the row."))
        return prompt
    if not isinstance(prompt, list):
        found.append(_wrong_type(where, key, "a list of chat messages or a string", prompt))
        return ""
    if not prompt:
        found.append(Problem("the prompt is empty", f"{where}, key {key}", "Give it a message or remove the row."))
    for number, message in enumerate(prompt):
        _check_message(message, f"{where}, key {key}[{number}]", found)
    return [{k: v for k, v in m.items() if v is not None} if isinstance(m, Mapping) else m for m in prompt]


def _check_message(message: Any, where: str, found: list[Problem]) -> None:
    if not isinstance(message, Mapping):
        found.append(
            Problem(
                f"a message must have role and content, this is {describe_kind(message)}",
                where,
                fix='write {"role": "user", "content": "..."}',
            )
        )
        return
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        guess = _nearest(str(role), ROLES)
        found.append(Problem(f"unknown role {role!r}", f"{where}.role", f"Use one of {', '.join(ROLES)}.{guess}"))
    if content is None and "content" in message:
        found.append(Problem("the message is null", f"{where}.content", "Give it a text or remove the row."))
    elif not isinstance(content, str):
        what = "has no content" if content is None else f"must be a string, this is {describe_kind(content)}"
        found.append(Problem(f"the message {what}", f"{where}.content", "Store the message's text there."))
    elif not content.strip() and role != "assistant":
        found.append(Problem("the message is empty", f"{where}.content", "Give it a text or remove the row."))


def has_value(values: Mapping[str, Any], key: str, where: str, found: list[Problem], meaning: str) -> bool:
    """Whether the row has a value in column ``key``; a missing column and a null go to ``found``."""
    if key not in values:
        fix = f"{meaning}; the row has {', '.join(sorted(values)) or 'no columns'}."
        found.append(Problem(f"column {key!r} is missing", f"{where}, key {key}", fix))
    elif values[key] is None:
        found.append(Problem("the value is null", f"{where}, key {key}", f"{meaning}; fill it or remove the row."))
    else:
        return True
    return False


def _wrong_type(where: str, key: str, expected: str, value: Any) -> Problem:
    return Problem(
        f"must be {expected}, this is {describe_kind(value)}", f"{where}, key {key}", "Store the column that way."
    )


def describe_kind(value: Any) -> str:
    """Type and value, shortened, for messages."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
