import pickle

import numpy as np
import pytest

from megaverl.errors import RunError, UserError
from megaverl.rewards.custom import CustomFunction
from megaverl.rewards.registry import Registry
from megaverl.rewards.scorer import Score, Scorer, ScoreRequest, checked_score

REQUESTS = [
    ScoreRequest("openai/gsm8k", "#### 2", "2", key=4),
    ScoreRequest("megaverl/arithmetic", "The answer is 2.", "2", key=5),
]
CUSTOM = """
def judge(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str), "is_right": solution_str.endswith(ground_truth), "place": extra_info["place"]}
"""


def _scorer(tmp_path, source, name="judge"):
    path = tmp_path / "reward.py"
    path.write_text(source)
    scorer = Scorer(CustomFunction(str(path), name), workers=1)
    _open.append(scorer)
    return scorer


_open: list[Scorer] = []


@pytest.fixture(autouse=True)
def _no_process_stays():
    yield
    while _open:
        _open.pop().close()


def test_responses_are_scored_by_their_source_in_order():
    scorer = Scorer()
    assert scorer.score(REQUESTS) == [Score(1.0), Score(0.0)]


def test_formulas_go_to_the_pool_and_all_scores_come_in_order():
    scorer = Scorer(registry=Registry(["mine=math+format"]), workers=1)
    _open.append(scorer)
    formula = ScoreRequest("mine", r"<think></think> \boxed{1/2}", "0.5", key=6)
    scores = scorer.score([REQUESTS[0], formula, REQUESTS[1]])
    assert scores == [Score(1.0), Score(2.0, {"math": 1.0, "format": 1.0}), Score(0.0)]


def test_a_custom_scorer_takes_any_source_and_its_other_entries_are_kept(tmp_path):
    scorer = _scorer(tmp_path, CUSTOM)
    (score,) = scorer.score([ScoreRequest("anything", "is 2", "2", {"place": "here"})])
    assert score == Score(4.0, {"is_right": True, "place": "here"})
    assert type(score.value) is float


def test_a_loaded_scorer_crosses_processes_by_its_settings(tmp_path):
    scorer = _scorer(tmp_path, CUSTOM)
    scorer.load()
    again = pickle.loads(pickle.dumps(scorer))
    request = ScoreRequest("anything", "is 2", "2", {"place": "here"})
    _open.append(again)
    assert again.score([request]) == scorer.score([request])


def test_a_bad_custom_function_is_refused_at_load(tmp_path):
    with pytest.raises(UserError, match="no function 'judge'"):
        _scorer(tmp_path, "x = 1").load()


@pytest.mark.parametrize("value", [1, 0.5, True, np.float32(0.5), np.int64(2), -3.0])
def test_numbers_become_floats(value):
    for result in (value, {"score": value}):
        score = checked_score(result, "here")
        assert score == Score(float(value))
        assert type(score.value) is float


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf"), [1.0], {"reward": 1.0}, {"score": None}, {}])
def test_anything_else_ends_the_run(value):
    with pytest.raises(RunError, match=r"^here: "):
        checked_score(value, "here")
