"""``metrics.jsonl``: one row a step, also across crashes and resumes."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from megaverl.errors import UserError
from megaverl.observe.metrics_file import MetricsFile, read_metrics


def log_steps(path, steps, first_step=0):
    file = MetricsFile(path, first_step)
    for step in steps:
        file.log({"loss": step / 10}, step)
    file.close()
    return file


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_row_is_there_as_soon_as_it_was_logged(tmp_path):
    """Also when the process is killed right after."""
    path = tmp_path / "run" / "metrics.jsonl"
    code = (
        "import os, sys\nfrom megaverl.observe.metrics_file import MetricsFile\n"
        "MetricsFile(sys.argv[1]).log({'loss': 0.5, 'n': 3}, 1)\nos._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=60).returncode == 9
    assert path.read_text() == '{"step": 1, "loss": 0.5, "n": 3}\n'


def test_a_resumed_run_goes_on_and_repeats_no_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log_steps(path, range(6))
    file = log_steps(path, range(4, 8), first_step=4)
    assert steps_in(path) == list(range(8))
    assert (file.superseded_rows, file.superseded) == (2, tmp_path / "metrics.superseded-1.jsonl")
    assert steps_in(file.superseded) == [4, 5]


def test_a_resume_at_the_end_sets_nothing_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log_steps(path, range(3))
    assert log_steps(path, [3], first_step=3).superseded is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_starting_anew_keeps_the_rows_of_before(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for _ in range(3):
        log_steps(path, range(2))
    assert steps_in(path) == [0, 1]
    for number in (1, 2):
        assert steps_in(tmp_path / f"metrics.superseded-{number}.jsonl") == [0, 1]


def test_a_line_cut_off_by_a_crash_is_set_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log_steps(path, range(3))
    with path.open("a") as file:
        file.write('{"step": 3, "los')
    file = log_steps(path, [3], first_step=3)
    assert steps_in(path) == [0, 1, 2, 3]
    assert file.superseded.read_text() == '{"step": 3, "los'


@pytest.mark.parametrize("line", ["not json", "[1]", '{"loss": 1}', '{"step": "x"}', ""])
def test_a_file_of_something_else_is_refused_and_kept(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    text = f'{{"step": 0}}\n{line}\n{{"step": 2}}\n'
    path.write_text(text)
    with pytest.raises(UserError, match="line 2: not a row of metrics"):
        MetricsFile(path, 1)
    assert path.read_text() == text


def test_a_step_has_one_row(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", first_step=2)
    with pytest.raises(ValueError, match="step 1 cannot be logged"):
        file.log({}, 1)
    file.log({}, 2)
    with pytest.raises(ValueError, match="step 2 cannot be logged"):
        file.log({}, 2)
    file.close()
    assert steps_in(tmp_path / "metrics.jsonl") == [2]


def test_numbers_that_json_lacks_stay_readable(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.log({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e-30, "e": 2}, 0)
    file.close()

    def refuse(constant):
        raise AssertionError(constant)

    row = json.loads(path.read_text(), parse_constant=refuse)
    assert row == {"step": 0, "a": "nan", "b": "inf", "c": "-inf", "d": 1e-30, "e": 2}
    (back,) = read_metrics(path)
    assert math.isnan(back["a"])
    assert (back["b"], back["c"], back["e"]) == (math.inf, -math.inf, 2)


def test_an_unusable_folder_is_an_os_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        MetricsFile(tmp_path / "file" / "metrics.jsonl")
