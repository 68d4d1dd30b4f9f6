import re
from collections import Counter

import pytest

from megaverl.data.arithmetic import DATA_SOURCE, every_question, make_rl_rows, make_sft_rows, write_arithmetic
from megaverl.data.files import read_all
from megaverl.data.preference import read_preferences
from megaverl.data.schema import RowChecker, RowRules
from megaverl.errors import Problems, UserError
from megaverl.rewards.registry import Registry


def _question(row):
    return row.prompt[0]["content"]


def _solve(question):
    """The answer worked out from the words alone."""
    first, second = map(int, re.findall(r"\d+", question))
    return first - second if re.search(r"gave away|sold", question) else first + second


def test_questions_of_a_split_differ_and_validation_is_held_out():
    train, val, sft = make_rl_rows(1024, 0, "train"), make_rl_rows(256, 0, "val"), make_sft_rows(3000, 0)
    seen = [{_question(row) for row in rows} for rows in (train, val, sft)]
    assert (len(seen[0]), len(seen[1])) == (1024, 256)
    assert not seen[1] & (seen[0] | seen[2])


def test_every_answer_is_right_and_its_worked_form_scores_one():
    questions = list(every_question())
    assert len({problem.question for problem in questions}) == len(questions)
    for problem in questions:
        assert problem.answer == _solve(problem.question) >= 0
        assert Registry().compute_score(DATA_SOURCE, problem.worked(), str(problem.answer)) == 1.0


def test_a_tenth_is_held_out():
    questions = list(every_question())
    assert sum(problem.held_out for problem in questions) / len(questions) == pytest.approx(0.1, abs=0.01)


def test_rows_depend_on_the_seed_alone():
    assert make_sft_rows(50, 3) == make_sft_rows(50, 3)
    assert make_rl_rows(50, 3, "train") == make_rl_rows(50, 3, "train")
    assert make_rl_rows(50, 3, "train") != make_rl_rows(50, 4, "train")


def test_the_demonstrator_is_as_imperfect_as_it_says():
    kinds = Counter()
    rows = make_sft_rows(6000, 1)
    for row in rows:
        truth = row.ground_truth
        right = Registry().compute_score(DATA_SOURCE, row.response, truth) == 1.0
        if row.response.startswith("The answer is"):
            kinds["wrong form"] += 1
            assert not right
            assert row.response == f"The answer is {truth}."
        elif "=" in row.response:
            kinds["careful"] += 1
            assert right
        else:
            kinds["guess"] += 1
    shares = {kind: count / len(rows) for kind, count in kinds.items()}
    assert shares == pytest.approx({"careful": 0.4, "guess": 0.3, "wrong form": 0.3}, abs=0.03)


def test_more_questions_than_there_are_is_refused():
    with pytest.raises(ValueError, match="which has 652"):
        make_rl_rows(653, 0, "val")
    assert len(make_rl_rows(652, 0, "val")) == 652


def test_files_are_rows_of_the_schema(tmp_path):
    paths = write_arithmetic(tmp_path / "data", 0, train=20, val=10, sft=30, pairs=40)
    assert {name: path.name for name, path in paths.items()} == {
        n: f"{n}.parquet" for n in ("train", "val", "sft", "pairs", "val_pairs", "judged")
    }
    checkers = {
        "train": RowChecker(RowRules(sources=Registry())),
        "val": RowChecker(RowRules(sources=Registry())),
        "sft": RowChecker(RowRules(response_key="response")),
    }
    problems = Problems()
    for name, count in (("train", 20), ("val", 10), ("sft", 30)):
        records = read_all([paths[name]], problems)
        assert len(records) == count
        for record in records:
            problems.found += checkers[name].check(record.values, record.where)[1]
    for name, kind, count in (("pairs", "pair", 40), ("val_pairs", "pair", 10), ("judged", "kto", 40)):
        assert len(read_preferences([paths[name]], kind, problems)) == count
    assert problems.found == []
    with pytest.raises(UserError, match="exists already"):
        write_arithmetic(tmp_path / "data", 0, train=20, val=10, sft=30)
