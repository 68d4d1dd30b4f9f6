import pickle

import pytest

from megaverl.config.load import load_config
from megaverl.errors import UserError
from megaverl.rewards.registry import BUILT_IN, Options, Registry


def test_the_built_in_sources_are_known():
    assert list(Registry()) == sorted(BUILT_IN)
    assert "openai/gsm8k" in Registry()
    assert "mine" not in Registry()
    assert Registry().get("mine") is None


@pytest.mark.parametrize("source", ["openai/gsm8k", "megaverl/arithmetic"])
def test_the_source_picks_the_scorer(source):
    compute = Registry().compute_score
    assert compute(source, "1+1=2\n#### 2", "2", {"index": 0}) == 1.0
    assert compute(data_source=source, solution_str="2", ground_truth="2") == 0.0


def test_an_unknown_source_lists_the_known_and_offers_the_nearest():
    with pytest.raises(UserError) as caught:
        Registry().compute_score("openai/gsm8", "#### 2", "2")
    (problem,) = caught.value.problems
    assert problem.what == "no scorer for data source 'openai/gsm8'"
    assert "megaverl/arithmetic, openai/gsm8k" in problem.fix
    assert "Did you mean 'openai/gsm8k'?" in problem.fix


def test_rules_of_the_run_go_before_the_table_and_the_first_that_fits_is_taken():
    registry = Registry(["openai/gsm8k=gsm8k_flexible", "my/special=exact_match", "my/*=gsm8k"])
    assert registry.compute_score("openai/gsm8k", "it is 2", "2") == 1.0
    assert registry.compute_score("my/special", "Answer:  two  words", "two words") == 1.0
    assert registry.compute_score("my/other", "#### 2", "2") == 1.0
    assert registry.compute_score("megaverl/arithmetic", "it is 2", "2") == 0.0
    assert "my/anything" in registry
    assert registry["my/special"]("words") is None
    assert "number" in registry["my/other"]("words")
    again = pickle.loads(pickle.dumps(registry))
    assert again.compute_score("openai/gsm8k", "it is 2", "2") == 1.0


def test_a_weighted_sum_shows_its_parts():
    options = Options(format_pattern=r"<think>.*</think>.*", length_limit=40, length_buffer=20)
    registry = Registry(["m=gsm8k + 0.5*format".replace("0.5*format", "format*0.5") + "+length_penalty*2e-1"], options)
    good = registry.compute_score("m", "<think>a</think>#### 2", "2")
    assert good == pytest.approx({"score": 1 + 0.5 - 0.2 * 0.1, "gsm8k": 1, "format": 1, "length_penalty": -0.1})
    long = registry.compute_score("m", "x" * 50, "2")
    assert long == pytest.approx({"score": -0.2, "gsm8k": 0, "format": 0, "length_penalty": -1})
    assert registry.find("m").check("words") is not None
    assert not registry.find("m").isolated
    assert Registry(["m=format+math"]).find("m").isolated


def test_all_that_is_wrong_with_the_rules_is_said_at_once():
    rules = ["nothing", "a=gsm8", "b=gsm8k*x", "c=math+math", "=gsm8k", "d=gsm8k", "d=math"]
    with pytest.raises(UserError) as caught:
        Registry(rules, Options("(", 10, 20))
    text = str(caught.value)
    assert len(caught.value.problems) == 8
    assert "did you mean gsm8k?" in text
    assert "names the scorer math twice" in text
    assert "has several rules for d" in text
    assert "reward.format_pattern=(" in text
    assert "reward.length_buffer=20" in text


def test_the_keys_of_the_configuration_reach_the_scorers():
    words = [
        "reward.sources=[my/data=format]",
        "reward.format_pattern=a+",
        "reward.length_limit=9",
        "reward.length_buffer=3",
    ]
    registry = Registry.of(load_config(None, words).reward)
    assert registry.options == Options("a+", 9, 3)
    assert registry.compute_score("my/data", "aaa", None) == 1.0
    assert Registry.of(load_config().reward).options == Options()
