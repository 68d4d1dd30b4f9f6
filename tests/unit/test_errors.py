"""Rules that hold for every error of the package, found by looking at all of its code."""

import ast
import importlib
import inspect
import pickle
import pkgutil
from pathlib import Path

import pytest

import megaverl
from megaverl.errors import MegaverlError, Problem, Problems, UserError, merged

PACKAGE = Path(megaverl.__file__).parent


def called(node):
    function = node.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def without_fix(source):
    """Lines of calls that make a problem and say nothing of what to do."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        keys = {keyword.arg for keyword in node.keywords}
        made = called(node) == "Problem" and len(node.args) < 3
        added = called(node) == "add" and ast.unparse(node.func.value).lower().endswith("problems")
        empty = any(k.arg == "fix" and isinstance(k.value, ast.Constant) and not k.value.value for k in node.keywords)
        if (made or added) and ("fix" not in keys or empty):
            yield node.lineno


def test_every_problem_says_what_to_do():
    files = sorted(PACKAGE.rglob("*.py"))
    found = [f"{f.relative_to(PACKAGE)}:{line}" for f in files for line in without_fix(f.read_text())]
    assert found == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("Problem('a', 'b')", [1]),
        ("x = 1\nself.problems.add('a', where='b', fix='')", [2]),
        ("Problem('a', 'b', 'c')\nproblems.add('a', fix='b')\nseen.add('a')", []),
    ],
)
def test_the_search_finds_what_it_looks_for(source, lines):
    assert list(without_fix(source)) == lines


def modules_with_exceptions():
    """Names of modules in which a class is derived from something called an error, by their code."""
    for info in pkgutil.walk_packages([str(PACKAGE)], "megaverl."):
        file = PACKAGE.parent / Path(*info.name.split("."))
        file = file / "__init__.py" if info.ispkg else file.with_suffix(".py")
        classes = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ClassDef)]
        bases = [ast.unparse(base) for node in classes for base in node.bases]
        if any(base.endswith(("Error", "Exception")) for base in bases):
            yield info.name


def exceptions():
    found = set()
    for name in modules_with_exceptions():
        for _, kind in inspect.getmembers(importlib.import_module(name), inspect.isclass):
            if issubclass(kind, Exception) and kind.__module__.startswith("megaverl"):
                found.add(kind)
    return sorted(found, key=lambda kind: kind.__qualname__)


def test_there_are_exceptions_to_look_at():
    assert {MegaverlError, UserError} < set(exceptions())


def arguments_of(kind):
    """Arguments that a class takes, made up by their annotations; one text where it has no constructor of its own."""
    if issubclass(kind, UserError):
        return ([Problem("a", "f, row 1", "b"), Problem("c", "d", "e")],)
    if "__init__" not in vars(kind):
        return ("text",)
    wanted = inspect.signature(kind).parameters.values()
    return tuple({"int": 15, "str": "text"}[str(parameter.annotation)] for parameter in wanted)


@pytest.mark.parametrize("kind", exceptions(), ids=lambda kind: kind.__name__)
def test_every_exception_survives_the_way_through_ray(kind):
    """What a worker raises is pickled: the type, the text and the problems must come back."""
    arguments = arguments_of(kind)
    error = kind(*arguments)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.args) == (kind, str(error), error.args)
    assert vars(again) == vars(error)


def problems_at(*rows, what="missing", key="prompt"):
    return [Problem(what, f"a.parquet, row {row}, key {key}", "add it") for row in rows]


def test_a_problem_of_a_whole_column_is_one():
    (found,) = merged(problems_at(*range(64)))
    assert found == Problem("missing", "a.parquet, rows 0 to 63, key prompt", "add it")


def test_other_problems_stay_apart_and_in_order():
    given = [*problems_at(3, 9), *problems_at(4, what="empty"), *problems_at(3, key="reward_model"), *problems_at(12)]
    found = merged(given)
    assert [p.where for p in found] == [
        "a.parquet, rows 3, 9 and 12, key prompt",
        "a.parquet, row 4, key prompt",
        "a.parquet, row 3, key reward_model",
    ]


def test_many_rows_are_counted_and_equal_problems_are_one():
    (found,) = merged(problems_at(*range(0, 40, 2)))
    assert found.where == "a.parquet, rows 0, 2, 4, 6, 8 and 15 more, key prompt"
    collected = Problems()
    for _ in range(3):
        collected.add("no such folder", where="model.path", fix="name another")
    with pytest.raises(UserError, match="no such folder") as caught:
        collected.raise_if_any()
    assert len(caught.value.problems) == 1


def test_lines_of_a_text_file_are_named_by_row():
    (found,) = merged([Problem("the line is empty", f"a.jsonl, row {n} (line {n + 1})", "write it") for n in (0, 1)])
    assert found.where == "a.jsonl, rows 0 to 1"
