"""Loads a configuration: YAML files that inherit, then ``key=value`` words, then the checks of the schema."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from megaverl.config.fields import Field, all_fields, all_sections, nearest_text
from megaverl.config.schema import Config
from megaverl.config.source import Source, read_chain, read_overrides
from megaverl.errors import Problems
from megaverl.files import write_text

_MISSING = "???"  # OmegaConf's mark of a value that has to be given


def load_config(path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> Config:
    """The checked configuration.

    Args:
        path: a YAML file; ``base: other.yaml`` in it names a file to inherit from, relative to it. None: defaults only.
        overrides: words ``key=value`` with dotted keys; a later one wins.

    Raises:
        UserError: with every problem found: files that cannot be read, wrong YAML, unknown keys, wrong values.
    """
    problems = Problems()
    source = Source() if path is None else read_chain(Path(path), problems)
    source.merge(read_overrides(list(overrides), problems))
    values = _known_values(source, problems)
    config = _validate(_resolve(values, source, problems), source, problems)
    problems.raise_if_any()
    assert config is not None  # _validate returns None only with a problem
    return config


def save_config(config: Config, path: str | os.PathLike[str]) -> None:
    """Writes every key, resolved, as YAML that `load_config` reads back equal. The file appears whole or not at all.

    Raises:
        WriteError: it cannot be written.
    """
    write_text(path, config_yaml(config))


def config_yaml(config: Config) -> str:
    """Every key and its value as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(_escape(config.model_dump())))


def _escape(value: Any) -> Any:
    """A text with ``${`` in it is meant as it stands: the reader must not take it for an interpolation."""
    if isinstance(value, dict):
        return {name: _escape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
    return value


def _known_values(source: Source, problems: Problems) -> dict[str, Any]:
    """The values under known keys, as dotted key -> value; a problem for each unknown key and missing value."""
    known: dict[str, Any] = {}
    for key, value in _leaves(source.values, ""):
        if key not in all_fields() and not (key in all_sections() and value == {}):
            problems.add(f"unknown key {key}", where=source.where(key), fix=nearest_text(key))
        elif value == _MISSING:
            problems.add(f"{key} must be given", where=source.where(key), fix=f"add {key}=VALUE")
        elif key in all_fields():
            known[key] = value
    return known


def _leaves(node: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """All (dotted key, value), unknown ones too; a dictionary at a field or an empty one comes as it is."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key not in all_fields():
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _resolve(values: dict[str, Any], source: Source, problems: Problems) -> dict[str, Any]:
    """Replaces ``${other.key}`` and ``${oc.env:NAME}``, which may also name a key that has its default."""
    container = OmegaConf.create(_escape(Config().model_dump()))
    placed: list[str] = []
    resolved: dict[str, Any] = {}
    for key, value in values.items():
        with _reporting(key, source, problems):
            OmegaConf.update(container, key, value)
            placed.append(key)
    for key in placed:
        with _reporting(key, source, problems):
            value = OmegaConf.select(container, key, throw_on_resolution_failure=True)
            resolved[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    return resolved


@contextmanager
def _reporting(key: str, source: Source, problems: Problems) -> Iterator[None]:
    try:
        yield
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        problems.add(f"{key} cannot be resolved: {reason}", where=source.where(key), fix="correct the ${...} in it")


def _validate(values: dict[str, Any], source: Source, problems: Problems) -> Config | None:
    nested = Source()
    for key, value in values.items():
        nested.set(key, _coerce(all_fields()[key], value), "")
    try:
        # Strict, so that `true` is no number and "8" no 8. As JSON, where strict mode takes objects for sections.
        return Config.model_validate_json(json.dumps(nested.values, default=str), strict=True)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            key = ".".join(part for part in detail["loc"] if isinstance(part, str))
            what, fix = _explain(all_fields()[key], detail["type"], detail["input"])
            problems.add(what, where=source.where(key), fix=fix)
        return None


def _coerce(field: Field, value: Any) -> Any:
    """The two conveniences: one text for a list of texts, and 1e3 for a whole number."""
    if field.is_list and isinstance(value, str):
        return [value]
    if field.kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _explain(field: Field, error_type: str, value: Any) -> tuple[str, str]:
    """(what is wrong, what to do) of one error of pydantic."""
    describe = f"`megaverl config describe {field.key}` says what it does"
    if error_type == "literal_error":
        close = difflib.get_close_matches(str(value), field.choices, n=1)
        fix = f"did you mean {close[0]}?" if close else f"choose one of {' | '.join(field.choices)}"
        return f"{field.key} must be one of {' | '.join(field.choices)}, got {_show(value)}", fix
    bound_errors = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "string_too_short")
    if error_type in bound_errors:
        return f"{field.key} must be {field.bounds}, got {_show(value)}", describe
    return f"{field.key} must be {_an(field.type_text)}, got {_show(value)}", describe


def _show(value: Any) -> str:
    """The value as YAML would have it: null and true, not None and True."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return repr(value)


def _an(text: str) -> str:
    return text if text.startswith(("text", "true")) or " | " in text else f"a {text}"
