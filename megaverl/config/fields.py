"""The fields of the schema by dotted key, read once from the pydantic models: types, bounds, defaults, names."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megaverl.config.schema import Config

_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}
_BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


@dataclass(frozen=True)
class Field:
    """One key that holds a value (no section).

    Attributes:
        key: dotted name, e.g. ``actor.optimizer.lr``.
        kind: the Python type of the value, or of an item of a list: bool, int, float or str.
        choices: the values allowed; empty when any value of the kind within the bounds is.
        is_list: the value is a list of items of ``kind``.
        optional: the value may be null.
        default: value when the key is not set.
        bounds: e.g. ``>= 0, < 1``; empty when there are none.
        sentence: what the key does.
    """

    key: str
    kind: type
    choices: tuple[str, ...]
    is_list: bool
    optional: bool
    default: Any
    bounds: str
    sentence: str

    @property
    def type_text(self) -> str:
        """The type in words, e.g. ``whole number or null`` or ``console | file``."""
        text = " | ".join(self.choices) if self.choices else _WORDS[self.kind]
        if self.is_list:
            text = f"list of {text}"
        return f"{text} or null" if self.optional else text


@cache
def all_fields() -> dict[str, Field]:
    """Every field by dotted key, in the order of the schema."""
    return {field.key: field for field in _walk(Config, Config(), "")}


@cache
def all_sections() -> dict[str, str]:
    """Every section by dotted key, with its sentence."""
    return dict(_sections(Config, ""))


def nearest(key: str) -> list[str]:
    """Known keys (at most three) that the writer of an unknown ``key`` may have meant, best first."""
    names = [*all_fields(), *all_sections()]
    last = key.rsplit(".", 1)[-1]
    same_last = [name for name in names if name.rsplit(".", 1)[-1] == last]
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.75)
    by_key = sorted(same_last, key=lambda name: -difflib.SequenceMatcher(None, name, key).ratio())
    lasts = sorted({name.rsplit(".", 1)[-1] for name in names})
    close_last = difflib.get_close_matches(last, lasts, n=1, cutoff=0.75)
    by_last = [name for name in names if name.rsplit(".", 1)[-1] in close_last]
    by_last.sort(key=lambda name: -difflib.SequenceMatcher(None, name, key).ratio())
    loose = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return list(dict.fromkeys([*close, *by_key, *by_last, *loose]))[:3]


def nearest_text(key: str) -> str:
    """The advice for an unknown key, e.g. ``did you mean rollout.n?``."""
    names = nearest(key)
    if names:
        return f"did you mean {' or '.join(names)}?"
    return "`megaverl config describe` lists all keys"


def _walk(model: type[BaseModel], values: BaseModel, prefix: str) -> Iterator[Field]:
    for name, info in model.model_fields.items():
        key, value = f"{prefix}{name}", getattr(values, name)
        if isinstance(value, BaseModel):
            yield from _walk(type(value), value, f"{key}.")
        else:
            yield _field(key, info, value)


def _sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield f"{prefix}{name}", info.description or ""
            yield from _sections(info.annotation, f"{prefix}{name}.")


def _field(key: str, info: FieldInfo, default: Any) -> Field:
    annotation, optional = _without_none(info.annotation)
    is_list = get_origin(annotation) is list
    if is_list:
        (annotation,) = get_args(annotation)
    choices = get_args(annotation) if get_origin(annotation) is Literal else ()
    return Field(
        key=key,
        kind=str if choices else annotation,
        choices=tuple(choices),
        is_list=is_list,
        optional=optional,
        default=default,
        bounds=_bounds(info.metadata),
        sentence=info.description or "",
    )


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) not in (types.UnionType, typing.Union):
        return annotation, False
    rest = [part for part in get_args(annotation) if part is not type(None)]
    if len(rest) != 1:
        raise TypeError(f"the schema has a field of type {annotation}; only `X | None` can be described")
    return rest[0], True


def _bounds(metadata: list[Any]) -> str:
    parts = []
    for constraint in metadata:
        for name, sign in _BOUNDS:
            value = getattr(constraint, name, None)
            if value is not None:
                parts.append(f"{sign} {value:g}")
        if getattr(constraint, "min_length", None):
            parts.append("not empty")
    return ", ".join(parts)
