import math
from pathlib import Path

import pytest

from megaverl.errors import RunError
from megaverl.rollout.fresh_vllm import FreshAnswers
from megaverl.trainer.export_check import judge

ANSWERS = FreshAnswers(tokens=[[5, 6], [7, 8]], log_probs=[[-0.5, -1.0], [-2.0, -0.25]], texts=["a b", "c"])
POLICY = [[-0.5, -1.0004], [-2.0, -0.25]]


def judged(answers=ANSWERS, policy=POLICY, tolerance=1e-3):
    return judge(Path("out"), answers, policy, tolerance)


def test_answers_that_are_the_policys_pass_with_the_largest_difference():
    found = judged()
    assert (found.prompts, found.tokens, found.texts) == (2, 4, ["a b", "c"])
    assert found.largest_difference == pytest.approx(4e-4)
    assert "4 tokens" in str(found)


@pytest.mark.parametrize(
    ("answers", "policy", "said"),
    [
        (ANSWERS, [[-0.5, -1.0], [-2.1, -0.25]], "answer 1 is 0.1 off"),
        (
            FreshAnswers("", ANSWERS.tokens, [[math.nan, -1.0], [-2.0, -0.25]], ["a", "c"]),
            POLICY,
            "answer 0 has values",
        ),
        (ANSWERS, [[-0.5, -1.0], [-2.0, -math.inf]], "scores of answer 1"),
        (FreshAnswers("", ANSWERS.tokens, ANSWERS.log_probs, ["a", ""]), POLICY, "answer 1 is empty"),
        (FreshAnswers("", [], [], []), [], "no answers"),
    ],
)
def test_other_answers_are_refused(answers, policy, said):
    with pytest.raises(RunError, match=said):
        judged(answers, policy)
