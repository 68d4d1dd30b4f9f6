"""Reads YAML files and ``key=value`` words into plain dictionaries that remember where each key came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megaverl.config.fields import all_fields, all_sections
from megaverl.errors import Problems

OVERRIDE = "command line"


@dataclass
class Source:
    """Values not yet checked against the schema.

    Attributes:
        values: nested dictionaries.
        origin: dotted key -> where it was set, e.g. ``run.yaml, line 3``.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)

    def where(self, key: str) -> str:
        """Place of ``key``, or of the nearest section above it that has one."""
        while key:
            if key in self.origin:
                return self.origin[key]
            key = key.rpartition(".")[0]
        return ""

    def set(self, key: str, value: Any, origin: str) -> None:
        """Sets a dotted key; what stood there or, as a plain value, on the way there is replaced."""
        *parents, last = key.split(".")
        node = self.values
        for name in parents:
            if not isinstance(node.get(name), dict):
                node[name] = {}
            node = node[name]
        node[last] = value
        self.origin[key] = origin

    def merge(self, other: Source) -> None:
        """Lays ``other`` over this: sections are merged, values and lists are replaced."""
        _merge(self.values, other.values)
        self.origin.update(other.origin)


def _merge(below: dict[str, Any], above: dict[str, Any]) -> None:
    for name, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(name), dict):
            _merge(below[name], value)
        else:
            below[name] = value


def read_chain(path: Path, problems: Problems) -> Source:
    """The file and, below it, all files that it inherits from through a top-level ``base: other.yaml``."""
    chain: list[Source] = []
    seen: list[Path] = []
    named_by = ""
    while True:
        resolved = path.resolve()
        if resolved in seen:
            names = " -> ".join(str(p.name) for p in [*seen[seen.index(resolved) :], resolved])
            problems.add(
                f"files inherit from each other in a circle: {names}", where=named_by, fix="remove one `base:`"
            )
            break
        seen.append(resolved)
        source = _read_file(path, named_by, problems)
        if source is None:
            break
        chain.append(source)
        base = source.values.pop("base", None)
        if base is None:
            break
        named_by = source.origin.pop("base", str(path))
        if not isinstance(base, str) or not base:
            problems.add(f"`base` must name one YAML file, got {base!r}", where=named_by, fix="base: other.yaml")
            break
        path = path.parent / base
    merged = Source()
    for source in reversed(chain):
        merged.merge(source)
    return merged


def read_overrides(words: list[str], problems: Problems) -> Source:
    """``key=value`` words; values are read as YAML, except that a text field takes its value as written."""
    source = Source()
    for word in words:
        key, equals, text = word.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            problems.add(f"`{word}` is not of the form key=value", where=OVERRIDE, fix="e.g. rollout.n=8")
            continue
        where = f"{OVERRIDE}, {word}"
        above = next((name for name in all_fields() if key.startswith(f"{name}.")), None)
        if above and _is_misplaced(above, {}, where, problems):
            continue
        found = len(problems.found)
        value = override_value(key, text, where, problems)
        if len(problems.found) == found and not _is_misplaced(key, value, where, problems):
            source.set(key, value, where)
    return source


def override_value(key: str, text: str, where: str, problems: Problems) -> Any:
    """The value of a ``key=value`` word: as written for a text field, else read as YAML; None after a problem."""
    text = text.strip()
    known = all_fields().get(key)
    is_text = known is not None and known.kind is str and not known.is_list
    if is_text and text not in ("null", "~") and not text.startswith(("'", '"')):
        return text  # as written: 001, a path with a colon, a name with a # in it
    try:
        parsed = OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        problems.add(f"the value is not valid YAML: {_yaml_message(error)}", where=where, fix="quote the value")
        return None
    if list(parsed) != ["value"]:
        problems.add("the value goes over several lines", where=where, fix="put it on one line, or into a YAML file")
        return None
    return parsed["value"]


def _read_file(path: Path, named_by: str, problems: Problems) -> Source | None:
    """One file, or None after a problem was added."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        fix = f"`base` in {named_by} names it; the path is relative to that file" if named_by else "check the path"
        problems.add(f"cannot read the configuration: {reason}", where=str(path), fix=fix)
        return None
    except UnicodeDecodeError as error:
        problems.add(f"not UTF-8 text (byte {error.start})", where=str(path), fix="name a YAML file")
        return None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            return Source()
        if not isinstance(node, yaml.MappingNode):
            problems.add("a configuration holds keys and values", where=str(path), fix="e.g. `rollout:` and `  n: 8`")
            return None
        # OmegaConf's own reading: 1e-6 is a number, dates are text, a key written twice is refused.
        values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        problems.add(f"not valid YAML: {_yaml_message(error)}", where=where, fix="correct the line")
        return None
    source = Source()
    _note_lines(node, "", str(path), source.origin)
    source.values = _well_placed(values, "", source, problems)
    return source


def _yaml_message(error: Exception) -> str:
    problem = getattr(error, "problem", None)
    return str(problem or str(error).splitlines()[0])


def _well_placed(values: dict[str, Any], prefix: str, source: Source, problems: Problems) -> dict[str, Any]:
    """Without empty sections (``actor:`` with nothing under it reads as null) and without misplaced values."""
    kept = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if (value is None and key in all_sections()) or _is_misplaced(key, value, source.where(key), problems):
            continue
        kept[str(name)] = _well_placed(value, f"{key}.", source, problems) if isinstance(value, dict) else value
    return kept


def _is_misplaced(key: str, value: Any, where: str, problems: Problems) -> bool:
    """Whether a section holds a plain value or a field holds keys; adds the problem.

    Checked in each source before they are merged, where one could hide the other.
    """
    if key in all_sections() and not isinstance(value, dict):
        example = next(name for name in all_fields() if name.startswith(f"{key}."))
        problems.add(f"{key} is a section, got {value!r}", where=where, fix=f"set the keys in it, such as {example}")
        return True
    if key in all_fields() and isinstance(value, dict):
        text = f"{key} holds a value ({all_fields()[key].type_text}), not further keys"
        problems.add(text, where=where, fix=f"`megaverl config describe {key}` says what it does")
        return True
    return False


def _note_lines(node: yaml.Node, prefix: str, path: str, origin: dict[str, str]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value}"
        origin[key] = f"{path}, line {key_node.start_mark.line + 1}"
        _note_lines(value_node, f"{key}.", path, origin)
