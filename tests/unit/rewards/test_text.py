import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.rewards.text import check_text, exact_match, form, length_penalty


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("Paris", "Paris", 1.0),
        (" Paris\n", "Paris", 1.0),
        ("paris", "Paris", 0.0),
        ("It is big.\nAnswer: New\n York ", "New York", 1.0),
        ("The answer is: 42", 42, 1.0),
        ("so\n#### (B)", "(B)", 1.0),
        ("#### A\n#### B", "A", 0.0),
        ("Paris it is", "Paris", 0.0),
        ("", "Paris", 0.0),
    ],
)
def test_exact_match(text, truth, score):
    assert exact_match("any", text, truth) == score


@pytest.mark.parametrize(
    ("truth", "good"), [("a", True), (1, True), (" ", False), (None, False), ([], False), (True, False)]
)
def test_what_can_be_matched(truth, good):
    assert (check_text(truth) is None) == good


def test_form_wants_the_whole_response_and_a_dot_takes_line_breaks():
    assert form("  <think>a\nb</think>\n3 ", "<think>.*</think>.*") == 1.0
    assert form("x<think>a</think>", "<think>.*</think>.*") == 0.0


@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 200))
def test_the_penalty_falls_in_a_straight_line_between_its_bounds(length, limit, buffer):
    """DAPO, equation 13, as it is written there."""
    buffer = min(buffer, limit)
    if length <= limit - buffer:
        expected = 0.0
    elif length <= limit:
        expected = ((limit - buffer) - length) / buffer
    else:
        expected = -1.0
    assert length_penalty("x" * length, limit, buffer) == pytest.approx(expected)
