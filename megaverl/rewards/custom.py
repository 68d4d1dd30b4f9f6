"""A scorer from a user's own Python file."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from megaverl.errors import Problem, Problems, UserError
from megaverl.rewards.registry import ScoreFunction

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


@dataclass(frozen=True)
class CustomFunction:
    """Where a user's scorer is, and how it is called. Pickles; the function lives where it is loaded.

    Attributes:
        path: the Python file (``reward.function.path``).
        name: the function in it.
        arguments: further arguments, ``name=value``.
        batch: it takes lists, and returns a list of scores.
    """

    path: str
    name: str = "compute_score"
    arguments: tuple[str, ...] = ()
    batch: bool = False

    def load(self) -> ScoreFunction:
        """Imports the function, its further arguments bound.

        Raises:
            UserError: it cannot be used, or an argument cannot be read.
        """
        return load_function(self.path, self.name, read_arguments(self.arguments), batch=self.batch)

    def label(self, data_source: str) -> str:
        """The scorer's name in messages."""
        return self.path


def read_arguments(words: Sequence[str]) -> dict[str, Any]:
    """``name=value`` words as a dictionary; values are read as YAML.

    Raises:
        UserError: words that are no such pair, all of them.
    """
    problems, found = Problems(), {}
    for word in words:
        name, equals, value = word.partition("=")
        where = f"reward.function.arguments, {word!r}"
        if not equals or not name.isidentifier():
            problems.add("is no name=value", where=where, fix="write NAME=VALUE with the argument's name")
        elif name in found or name in ARGUMENTS or name in BATCH_ARGUMENTS:
            problems.add(f"gives {name} again", where=where, fix="name each further argument once")
        else:
            try:
                found[name] = yaml.safe_load(value)
            except yaml.YAMLError as error:
                problems.add(f"the value is not YAML: {error}", where=where, fix="quote the value")
    problems.raise_if_any()
    return found


def load_function(
    path: str | Path, name: str, arguments: dict[str, Any] | None = None, *, batch: bool = False
) -> ScoreFunction:
    """Imports the file and returns the function ``name``, checked to take the arguments of `compute_score` by name.

    It may be asynchronous.

    Args:
        arguments: further arguments, bound to it.
        batch: it takes the lists ``data_sources, solution_strs, ground_truths, extra_infos`` instead.

    Raises:
        UserError: the file is missing or fails to import, has no such function, or its signature does not fit.
    """
    names = BATCH_ARGUMENTS if batch else ARGUMENTS
    signature = f"def {name}({', '.join(names)})"
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(Problem("no such file", f"{file}, key reward.function.path", "Give a Python file."))
    module = _import(file)
    place = f"{file}, key reward.function.name"
    function = getattr(module, name, None)
    if function is None:
        there = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        close = difflib.get_close_matches(name, there, n=1)
        guess = f" Did you mean {close[0]!r}?" if close else ""
        raise UserError(Problem(f"no function {name!r}", place, f"The file has {', '.join(there) or 'none'}.{guess}"))
    if not callable(function):
        raise UserError(Problem(f"{name!r} is not a function", place, f"Write {signature}."))
    arguments = arguments or {}
    try:
        inspect.signature(function).bind(**dict.fromkeys(names), **arguments)
    except TypeError as error:
        fix = f"Write {signature}; more arguments need defaults or reward.function.arguments."
        raise UserError(Problem(f"{name!r} cannot be called as a scorer: {error}", place, fix)) from error
    return functools.partial(function, **arguments) if arguments else function


def _import(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"megaverl_custom_reward_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UserError(Problem("not a Python file", f"{file}, key reward.function.path", "Give a .py file."))
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may raise anything while it is imported; it is reported, not hidden
        what = f"the file fails to import: {type(error).__name__}: {error}"
        raise UserError(Problem(what, f"{file}, key reward.function.path", "Run it with Python by itself.")) from error
    return module
