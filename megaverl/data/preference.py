"""The row schema of preference files, and their reading with every bad row named.

A pair (DPO, IPO, reward models) has ``prompt, chosen, rejected``; a judged answer (KTO) has ``prompt, completion,
label``. Prompts are chat messages or a string, as in `megaverl.data.schema`. An answer is a string, or chat messages
that hold exactly one message of the assistant; next to a string prompt it must be a string.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megaverl.data.files import read_all, shorten
from megaverl.data.schema import Message, Prompt, check_prompt, describe_kind, has_value
from megaverl.errors import Problem, Problems

Kind = Literal["pair", "kto"]
SHOWN = 20  # problems named one by one


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to one prompt, the first of them preferred.

    Attributes:
        prompt: chat messages, or a string that goes to the model as it is.
        chosen, rejected: texts of the answers, without a chat template.
        where: file and row, for messages.
    """

    prompt: list[Message] | str
    chosen: str
    rejected: str
    where: str = ""


@dataclass(frozen=True)
class JudgedCompletion:
    """One answer to a prompt and whether it is wanted (``label``)."""

    prompt: list[Message] | str
    completion: str
    label: bool
    where: str = ""


def check_preference(
    values: Mapping[str, Any], where: str, kind: Kind, *, prompt_key: str = "prompt"
) -> tuple[PreferencePair | JudgedCompletion | None, list[Problem]]:
    """The row, or None and everything that is wrong with it.

    Args:
        values: column name -> value.
        where: file and row, for the messages.
        kind: ``pair`` or ``kto``.
        prompt_key: column of the prompt (``data.prompt_key``).
    """
    found: list[Problem] = []
    prompt = check_prompt(values, prompt_key, where, found)
    if kind == "kto":
        completion = _answer(values, "completion", prompt, where, found)
        label = _label(values, where, found)
        return (None if found else JudgedCompletion(prompt, completion, label, where)), found
    chosen = _answer(values, "chosen", prompt, where, found)
    rejected = _answer(values, "rejected", prompt, where, found)
    if not found and chosen == rejected:
        fix = "Remove the row; it prefers nothing."
        found.append(Problem("chosen and rejected are the same", f"{where}, key rejected", fix))
    return (None if found else PreferencePair(prompt, chosen, rejected, where)), found


def read_preferences(
    files: Sequence[str | Path],
    kind: Kind,
    problems: Problems,
    *,
    prompt_key: str = "prompt",
    key: str = "data.train_files",
) -> list[PreferencePair] | list[JudgedCompletion]:
    """All rows of parquet, JSONL or Arrow files in order.

    Args:
        problems: gets what is wrong, the first 20 by name and the count; the caller raises. Next to problems the
            result has the good rows only and must not be used.
        key: configuration key of ``files``, for the messages.
    """
    found = Problems()
    rows = []
    for record in read_all(files, found, key=key):
        row, bad = check_preference(record.values, record.where, kind, prompt_key=prompt_key)
        found.found += bad
        if row is not None:
            rows.append(row)
    problems.found += shorten(found.found, limit=SHOWN, what=key)
    return rows


def _answer(values: Mapping[str, Any], key: str, prompt: Prompt, where: str, found: list[Problem]) -> str:
    if not has_value(values, key, where, found, "It holds the answer: a string or one assistant message"):
        return ""
    value, place = values[key], f"{where}, key {key}"
    if isinstance(value, list):
        value = _assistant_text(value, prompt, place, found)
        if value is None:
            return ""
    if not isinstance(value, str):
        fix = "Store the column that way."
        found.append(Problem(f"must be a string or chat messages, this is {describe_kind(value)}", place, fix))
        return ""
    if not value.strip():
        found.append(Problem("the answer is empty", place, "Give it a text or remove the row."))
    return value


def _assistant_text(messages: list[Any], prompt: Prompt, place: str, found: list[Problem]) -> str | None:
    """The text of an answer stored as messages; None after a problem was added."""
    if isinstance(prompt, str):
        what = "the answer is chat messages and the prompt a string"
        found.append(Problem(what, place, "Store both as chat messages, or both as strings."))
        return None
    one = len(messages) == 1 and isinstance(messages[0], Mapping) and messages[0].get("role") == "assistant"
    if not one:
        roles = ", ".join(str(m.get("role")) if isinstance(m, Mapping) else describe_kind(m) for m in messages)
        fix = "Store the messages before the answer in the prompt."
        found.append(Problem(f"must be one message of the assistant, this has {roles or 'none'}", place, fix))
        return None
    content = messages[0].get("content")
    if isinstance(content, str):
        return content
    what = f"the message's content must be a string, this is {describe_kind(content)}"
    found.append(Problem(what, f"{place}[0].content", "Store the message's text there."))
    return None


def _label(values: Mapping[str, Any], where: str, found: list[Problem]) -> bool:
    if not has_value(values, "label", where, found, "It says whether the completion is wanted: true or false"):
        return False
    label = values["label"]
    if not isinstance(label, bool):
        what = f"must be true or false, this is {describe_kind(label)}"
        found.append(Problem(what, f"{where}, key label", "Store the column as booleans."))
    return bool(label)
