import pytest

from megaverl.errors import UserError
from megaverl.rewards.registry import compute_score, ground_truth_checks, known_sources


def test_both_sources_of_the_answer_form_are_known():
    assert known_sources() == ("megaverl/arithmetic", "openai/gsm8k")
    assert set(ground_truth_checks()) == set(known_sources())


@pytest.mark.parametrize("source", ["openai/gsm8k", "megaverl/arithmetic"])
def test_the_source_picks_the_scorer(source):
    assert compute_score(source, "1+1=2\n#### 2", "2", {"index": 0}) == 1.0
    assert compute_score(data_source=source, solution_str="2", ground_truth="2") == 0.0


def test_an_unknown_source_lists_the_known_and_offers_the_nearest():
    with pytest.raises(UserError) as caught:
        compute_score("openai/gsm8", "#### 2", "2")
    (problem,) = caught.value.problems
    assert problem.what == "no scorer for data source 'openai/gsm8'"
    assert "megaverl/arithmetic, openai/gsm8k" in problem.fix
    assert "Did you mean 'openai/gsm8k'?" in problem.fix
