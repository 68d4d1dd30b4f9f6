"""A scorer from a user's own Python file."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

from megaverl.errors import Problem, UserError
from megaverl.rewards.registry import ScoreFunction

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
SIGNATURE = "def {name}(data_source, solution_str, ground_truth, extra_info=None)"


def load_function(path: str | Path, name: str) -> ScoreFunction:
    """Imports the file and returns the function ``name``, checked to take the arguments of `compute_score` by name.

    It may be asynchronous.

    Raises:
        UserError: the file is missing or fails to import, has no such function, or its signature does not fit.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(Problem("no such file", f"{file}, key reward.function.path", "Give a Python file."))
    module = _import(file)
    place = f"{file}, key reward.function.name"
    function = getattr(module, name, None)
    if function is None:
        names = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        close = difflib.get_close_matches(name, names, n=1)
        guess = f" Did you mean {close[0]!r}?" if close else ""
        raise UserError(Problem(f"no function {name!r}", place, f"The file has {', '.join(names) or 'none'}.{guess}"))
    if not callable(function):
        raise UserError(Problem(f"{name!r} is not a function", place, f"Write {SIGNATURE.format(name=name)}."))
    try:
        inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        fix = f"Write {SIGNATURE.format(name=name)}; more arguments need defaults."
        raise UserError(Problem(f"{name!r} cannot be called as a scorer: {error}", place, fix)) from error
    return function


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
