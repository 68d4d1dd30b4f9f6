import textwrap

import pytest

from megaverl.errors import UserError
from megaverl.rewards.custom import CustomFunction, load_function, read_arguments


def _file(tmp_path, source):
    path = tmp_path / "my_reward.py"
    path.write_text(textwrap.dedent(source))
    return path


@pytest.mark.parametrize(
    "signature",
    [
        "data_source, solution_str, ground_truth, extra_info=None",
        "solution_str, ground_truth, data_source, extra_info",
        "data_source, solution_str, ground_truth, extra_info=None, scale=2.0",
        "solution_str, **others",
    ],
)
def test_a_function_that_takes_the_arguments_by_name_is_loaded(tmp_path, signature):
    function = load_function(_file(tmp_path, f"def judge({signature}):\n    return len(solution_str)\n"), "judge")
    assert function(data_source="x", solution_str="abc", ground_truth="1", extra_info={}) == 3


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.py, key reward\.function\.path: no such file"):
        load_function(tmp_path / "none.py", "compute_score")


def test_a_missing_function_is_named_and_the_nearest_offered(tmp_path):
    path = _file(tmp_path, "import math\ndef compute_scores(): pass\ndef other(): pass\n")
    with pytest.raises(UserError) as caught:
        load_function(path, "compute_score")
    (problem,) = caught.value.problems
    assert problem.where == f"{path}, key reward.function.name"
    assert problem.fix == "The file has compute_scores, other. Did you mean 'compute_scores'?"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def compute_score(solution_str, ground_truth): return 1.0", "data_source"),
        ("def compute_score(data_source, solution_str, ground_truth): return 1.0", "extra_info"),
        ("def compute_score(data_source, solution_str, ground_truth, extra_info, judge): return 1.0", "judge"),
        ("compute_score = 3", "not a function"),
    ],
)
def test_a_function_that_cannot_be_called_as_a_scorer_is_refused(tmp_path, source, words):
    with pytest.raises(UserError, match=words):
        load_function(_file(tmp_path, source), "compute_score")


@pytest.mark.parametrize(
    ("source", "words"),
    [("import not_installed_anywhere", "ModuleNotFoundError"), ("def f(:", "SyntaxError"), ("1 / 0", "ZeroDivision")],
)
def test_a_file_that_fails_to_import_says_why(tmp_path, source, words):
    with pytest.raises(UserError, match=rf"key reward\.function\.path: the file fails to import: {words}"):
        load_function(_file(tmp_path, source), "compute_score")


def test_further_arguments_are_read_as_yaml_and_bound(tmp_path):
    source = (
        "def judge(data_source, solution_str, ground_truth, extra_info, scale, names):\n    return scale * len(names)\n"
    )
    function = CustomFunction(str(_file(tmp_path, source)), "judge", ("scale=2.5", "names=[a, b]")).load()
    assert function(data_source="x", solution_str="abc", ground_truth="1", extra_info={}) == 5.0


def test_further_arguments_that_do_not_fit_are_refused(tmp_path):
    source = "def judge(data_source, solution_str, ground_truth, extra_info): return 1.0"
    function = CustomFunction(str(_file(tmp_path, source)), "judge", ("scale=2.5",))
    with pytest.raises(UserError, match="scale"):
        function.load()
    with pytest.raises(UserError) as caught:
        read_arguments(["a", "b=1", "b=2", "extra_info=1", "c=[", "2=3"])
    assert len(caught.value.problems) == 5


def test_a_batch_function_takes_lists(tmp_path):
    source = "def judge(data_source, solution_str, ground_truth, extra_info): return 1.0"
    function = CustomFunction(str(_file(tmp_path, source)), "judge", batch=True)
    with pytest.raises(UserError, match="data_sources"):
        function.load()
