"""Says what keys mean: the fields of the schema as rows, for a table or for JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megaverl.config.fields import Field, all_fields, all_sections, nearest_text
from megaverl.errors import Problem, UserError


@dataclass(frozen=True)
class Row:
    """One key, in words.

    Attributes:
        key: dotted name.
        type: type or choices, e.g. ``whole number or null``, ``error | left | right | filter``.
        default: the default itself (for JSON); `default_text` is how YAML would have it.
        bounds: e.g. ``>= 0, < 1``; may be empty.
        sentence: what the key does.
    """

    key: str
    type: str
    default: Any
    bounds: str
    sentence: str

    @property
    def default_text(self) -> str:
        return value_text(self.default)


def describe(key: str | None = None) -> list[Row]:
    """Rows for one field, for all fields of a section, or for everything.

    Raises:
        UserError: there is no such key; the nearest ones are named.
    """
    if key is None:
        return [_row(field) for field in all_fields().values()]
    if key in all_fields():
        return [_row(all_fields()[key])]
    if key in all_sections():
        return [_row(field) for name, field in all_fields().items() if name.startswith(f"{key}.")]
    raise UserError(Problem(f"unknown key {key}", fix=nearest_text(key)))


def section_sentence(key: str) -> str:
    """What a section is about; empty for a field."""
    return all_sections().get(key, "")


def value_text(value: Any) -> str:
    """A value as one writes it after ``key=``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(value_text(item) for item in value)}]"
    if value == "":
        return '""'
    return f"{value:g}" if isinstance(value, float) else str(value)


def _row(field: Field) -> Row:
    return Row(field.key, field.type_text, field.default, field.bounds, field.sentence)
