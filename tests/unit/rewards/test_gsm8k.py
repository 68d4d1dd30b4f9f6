import math

import pytest

from megaverl.rewards.gsm8k import check_ground_truth, compute_score, extract_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7+2=9\n#### 9", "9"),
        ("#### 1,234,567", "1234567"),
        ("####9", "9"),
        ("#### -5", "-5"),
        ("#### - 5", "-5"),
        ("#### $18", "18"),
        ("#### -$18", "-18"),
        ("#### $-18", "-18"),
        ("#### 18.", "18"),
        ("#### 18.50", "18.50"),
        ("#### .5", ".5"),
        ("#### 18 dollars", "18"),
        ("#### 1\nno wait\n#### 2", "2"),
        ("#### 2\nso #### it is", "2"),
        ("The answer is 9.", None),
        ("#### nine", None),
        ("", None),
    ],
)
def test_strict_takes_the_last_number_after_the_mark(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [("The answer is 9.", "9"), ("7 apples, 1,200 pens", "1200"), ("It costs $-3.", "-3"), ("none", None)],
)
def test_flexible_takes_the_last_number_of_all(text, answer):
    assert extract_answer(text, "flexible") == answer


@pytest.mark.parametrize("truth", ["1200", "1,200", 1200, 1200.0, "1200.0", "$1,200."])
def test_answers_are_compared_as_numbers(truth):
    assert compute_score("openai/gsm8k", "#### $1,200.00", truth) == 1.0
    assert compute_score("openai/gsm8k", "#### 120", truth) == 0.0
    assert check_ground_truth(truth) is None


@pytest.mark.parametrize("text", ["#### 9", "#### 8", "no answer at all", "", "#### 1.2.3"])
@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_case_40_the_score_is_always_a_float(text, method):
    """Case 40: the scorer returned the int 0 where a response had no answer, and floats otherwise."""
    assert type(compute_score("openai/gsm8k", text, "9", method=method)) is float


@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_case_40_the_whole_response_is_read(method):
    """Case 40: only the last 300 characters were read."""
    text = "#### 9\n" + "and that is why it is so. " * 4000
    assert compute_score("openai/gsm8k", text, "9", method=method) == 1.0


@pytest.mark.parametrize("truth", ["nine", "", None, True, math.nan, "1.2.3", ["9"]])
def test_a_ground_truth_that_is_no_number_is_refused(truth):
    assert "must be a number" in check_ground_truth(truth)
    with pytest.raises(ValueError, match="must be a number"):
        compute_score("openai/gsm8k", "#### 9", truth)
