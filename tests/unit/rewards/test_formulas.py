import pytest

from megaverl.rewards.formulas import check_ground_truth, compute_score


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        (r"so it is $\boxed{0.5}$", r"\frac{1}{2}", 1.0),
        (r"\boxed{\frac12}", "1/2", 1.0),
        (r"first \boxed{3}, no: \boxed{4}", "4", 1.0),
        (r"$\boxed{(1, 2]}$", r"(1,2]", 1.0),
        (r"$\boxed{[1, 2]}$", r"(1,2]", 0.0),
        (r"\boxed{x^2 + 2x + 1}", r"(x+1)^2", 1.0),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1.0),
        (r"\boxed{10\%}", r"10\%", 1.0),
        ("no expression at all", "7", 0.0),
        ("", "7", 0.0),
        (r"the answer is 8", 7, 0.0),
        (r"the answer is 7", 7, 1.0),
    ],
)
def test_answers_are_compared_by_value(text, truth, score):
    assert compute_score("lighteval/MATH", text, truth) == score


@pytest.mark.parametrize(
    ("truth", "good"), [(r"\frac{1}{2}", True), (3, True), ("", False), (None, False), (True, False), ("$", False)]
)
def test_what_a_formula_is(truth, good):
    assert (check_ground_truth(truth) is None) == good
