"""``megaverl config``: what keys mean, what a configuration resolves to."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from megaverl.commands.output import print_json, print_table, print_text
from megaverl.config.describe import Row, describe, section_sentence
from megaverl.config.load import config_yaml, load_config
from megaverl.config.schema import Config


def show_fields(key: str | None, *, as_json: bool) -> int:
    """``config describe [KEY]``."""
    rows = describe(key)
    if as_json:
        names = ("key", "type", "default", "bounds", "sentence")
        print_json([{name: getattr(row, name) for name in names} for row in rows])
    elif len(rows) == 1 and rows[0].key == key:
        print_text(_one_field(rows[0]))
    else:
        cells = [(row.key, row.type, row.default_text, row.bounds, row.sentence) for row in rows]
        title = f"{key}: {section_sentence(key)}" if key else ""
        print_table(title, ("key", "type", "default", "bounds", "meaning"), cells)
    return 0


def show_config(path: str, overrides: Sequence[str], *, as_json: bool) -> int:
    """``config show CONFIG [key=value ...]``."""
    print_config(load_config(path, overrides), as_json=as_json)
    return 0


def print_config(config: Config, *, as_json: bool) -> None:
    """Every key, as YAML or as JSON."""
    if as_json:
        print_json(config.model_dump())
    else:
        print_text(config_yaml(config))


def fields_text() -> str:
    """All keys with default and meaning, for ``train --help``."""
    width = shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 120
    lines = ["keys of the configuration (key=default):"]
    for row in describe():
        lines.append(f"  {row.key}={row.default_text}")
        bounds = f", {row.bounds}" if row.bounds else ""
        text = f"{row.sentence} ({row.type}{bounds})"
        lines += textwrap.wrap(text, width, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines) + "\n"


def _one_field(row: Row) -> str:
    lines = [row.key, f"  {row.sentence}", f"  type     {row.type}", f"  default  {row.default_text}"]
    return "\n".join([*lines, f"  bounds   {row.bounds}"] if row.bounds else lines)
