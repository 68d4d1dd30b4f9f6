"""Turns a command line of verl's into ours: every word is translated, listed as without effect, or refused."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megaverl.config.fields import all_fields, all_sections
from megaverl.config.source import OVERRIDE, override_value
from megaverl.config.verl_keys import DEFAULTS, ROWS
from megaverl.config.verl_keys_convert import RefusedValue, Row
from megaverl.errors import Problems

_BY_KEY = {row.key: row for row in ROWS if not row.key.endswith(".*")}
_BELOW = [row for row in ROWS if row.key.endswith(".*")]
_ROOTS = ("actor_rollout_ref", "reward_model", "custom_reward_function", "global_profiler", "ray_kwargs", "ray_init")


@dataclass
class Translation:
    """What became of a command line.

    Attributes:
        words: ``key=value`` by our names.
        became: (verl's word, our words).
        without_effect: (verl's word, reason).
        defaults: our words for defaults of verl's that the command line relies on.
    """

    words: list[str] = field(default_factory=list)
    became: list[tuple[str, list[str]]] = field(default_factory=list)
    without_effect: list[tuple[str, str]] = field(default_factory=list)
    defaults: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For people: what each word became, then what has no effect, then verl's defaults."""
        lines = [f"{word} -> {' '.join(ours)}" for word, ours in self.became]
        lines += [f"{word} has no effect: {why}" for word, why in self.without_effect]
        if self.defaults:
            lines.append(f"verl's defaults: {' '.join(self.defaults)}")
        return lines


def row_of(key: str) -> Row | None:
    """The row of a key of verl's, or None."""
    if key in _BY_KEY:
        return _BY_KEY[key]
    below = [row for row in _BELOW if key.startswith(row.key[:-1]) or key == row.key[:-2]]
    return max(below, key=lambda row: len(row.key), default=None)


def is_verl(word: str) -> bool:
    """Whether a word is one that only verl's command lines have: a key of verl's alone, or one of Hydra's signs."""
    key = _key(word)
    return word[:1] in "+~" or (key not in all_fields() and row_of(key) is not None) or key.split(".")[0] in _ROOTS


def translate(words: Sequence[str], problems: Problems, *, whole: bool) -> Translation:
    """Translates the words that are verl's; ours are left as they are.

    Args:
        whole: the command line is verl's own and names no file of ours: verl's defaults hold, and every word is to be
            known here. Otherwise a word that is nobody's goes on, and the configuration refuses it.
    """
    given = {_key(word): _value(word, problems) for word in words if not word.startswith("~")}
    done = Translation()
    for word in words:
        _one(word, given, done, problems, whole=whole)
    done.words = [_with_our_names(word) for word in done.words]
    if whole:
        set_already = {_key(word) for word in done.words}
        done.defaults = [f"{key}={value}" for key, value in DEFAULTS.items() if key not in set_already]
        done.words = [*done.defaults, *done.words]
    _check_algorithm(done, problems)
    return done


def _one(word: str, given: dict[str, Any], done: Translation, problems: Problems, *, whole: bool) -> None:
    key, row = _key(word), row_of(_key(word))
    where = f"{OVERRIDE}, {word}"
    if word.startswith("~"):
        if row is None and key not in all_fields():
            problems.add(f"unknown key {key}", where=where, fix=_nearest(key))
        else:
            done.without_effect.append((word, "it only takes a default of verl's away"))
        return
    if key in all_fields():
        done.words.append(word.lstrip("+"))
        return
    if row is None:
        if whole or key.split(".")[0] in _ROOTS or word.startswith("+"):
            problems.add(f"unknown key {key}", where=where, fix=_nearest(key))
        else:
            done.words.append(word)
        return
    try:
        result = row.apply(given[key], given)
    except RefusedValue as refused:
        problems.add(f"{word.lstrip('+')} cannot be had", where=where, fix=str(refused))
        return
    except (TypeError, ValueError):
        problems.add(f"{key} cannot be {given[key]!r}", where=where, fix=f"docs/from-verl.md says what {key} takes")
        return
    if isinstance(result, str):
        done.without_effect.append((word, result))
        return
    if row.kind == "renamed":  # as written: 001 stays a text where ours is one
        result = {row.to: word.partition("=")[2].strip()}
    ours = [f"{name}={_text(value)}" for name, value in result.items()]
    done.words += ours
    done.became.append((word, ours))


def _check_algorithm(done: Translation, problems: Problems) -> None:
    """verl has algorithms that this version does not: say so by verl's name."""
    known = all_fields()["algorithm.name"].choices
    for word, ours in done.became:
        for name in (o.partition("=")[2] for o in ours if o.startswith("algorithm.name=")):
            if name not in known:
                fix = f"there are {', '.join(known)}"
                problems.add(f"{word.lstrip('+')}: there is no algorithm {name}", where=f"{OVERRIDE}, {word}", fix=fix)
    _filter_wins(done)


def _filter_wins(done: Translation) -> None:
    """Rows that are filtered out need no truncation, in whatever order the two words come."""
    if "data.truncation=filter" in done.words:
        done.words = [w for w in done.words if not w.startswith("data.truncation=")] + ["data.truncation=filter"]


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0].strip()


def _value(word: str, problems: Problems) -> Any:
    key, _, text = word.lstrip("+").partition("=")
    return override_value(key.strip(), text, f"{OVERRIDE}, {word}", problems)


def _text(value: Any) -> str:
    """A value as a word of the command line has it."""
    return value if isinstance(value, str) else json.dumps(value)


def _with_our_names(word: str) -> str:
    """``${verl.key}`` in a value as ``${our.key}``."""

    def ours(found: re.Match[str]) -> str:
        row = row_of(found[1])
        return f"${{{row.to}}}" if row is not None and row.kind == "renamed" else found[0]

    return re.sub(r"\$\{([\w.]+)\}", ours, word)


def _nearest(key: str) -> str:
    names = [*_names()]
    close = difflib.get_close_matches(key, names, n=2, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else "docs/from-verl.md lists the keys that are taken"


def _names() -> Iterator[str]:
    yield from _BY_KEY
    yield from (name for name in (*all_fields(), *all_sections()) if name not in _BY_KEY)
