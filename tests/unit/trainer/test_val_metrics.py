"""Metrics of a validation against plain Python; which responses are kept."""

import random
import statistics

import pytest

from megaverl.config.schema import Config
from megaverl.trainer.generations import chosen
from megaverl.trainer.val_metrics import Sample, majority_score, mean_score, validation_metrics
from megaverl.trainer.validate import answer_of


def draw(seed, prompts=7, n=5):
    rng = random.Random(seed)
    samples = []
    for prompt in range(prompts):
        source = "even" if prompt % 2 == 0 else "odd"
        for _ in range(n):
            answer = rng.choice(["1", "2", "3", None])
            samples.append(Sample(prompt, source, float(answer == "1"), rng.randint(0, 9), answer, {"x": rng.random()}))
    rng.shuffle(samples)
    return samples


@pytest.mark.parametrize("seed", range(5))
def test_against_the_definitions(seed):
    samples = draw(seed)
    metrics = validation_metrics(samples, 5)
    for source in ("even", "odd"):
        own = [s for s in samples if s.data_source == source]
        groups = [[s for s in own if s.prompt == prompt] for prompt in dict.fromkeys(s.prompt for s in own)]
        votes = []
        for group in groups:
            counts = {}
            for s in group:
                if s.answer is not None:
                    counts[s.answer] = counts.get(s.answer, 0) + 1
            best = [a for a in counts if counts[a] == max(counts.values())]
            votes.append(float(best[0] == "1") if best else 0.0)
        core = f"val-core/{source}/reward"
        assert metrics[f"{core}/mean@5"] == pytest.approx(statistics.fmean(s.score for s in own))
        assert metrics[f"{core}/best@5/mean"] == statistics.fmean(max(s.score for s in g) for g in groups)
        assert metrics[f"{core}/maj@5/mean"] == pytest.approx(statistics.fmean(votes))
        assert metrics[f"val-aux/{source}/x/mean@5"] == pytest.approx(statistics.fmean(s.extra["x"] for s in own))
        assert metrics[f"val-aux/{source}/response_length/mean"] == statistics.fmean(s.length for s in own)
    assert mean_score(metrics) == pytest.approx(
        (metrics["val-core/even/reward/mean@5"] + metrics["val-core/odd/reward/mean@5"]) / 2
    )


def test_one_sample_has_no_vote_and_no_best():
    metrics = validation_metrics([Sample(0, "s", 0.5, 3, "1"), Sample(1, "s", 1.0, 4, "2", {"note": "text"})], 1)
    assert metrics == {"val-core/s/reward/mean@1": 0.75, "val-aux/s/response_length/mean": 3.5}


def test_without_answers_there_is_no_vote():
    metrics = validation_metrics([Sample(0, "s", 0.0, 3), Sample(0, "s", 1.0, 3)], 2)
    assert set(metrics) == {
        "val-core/s/reward/mean@2",
        "val-core/s/reward/best@2/mean",
        "val-aux/s/response_length/mean",
    }


def test_of_two_equal_counts_the_first_sampled_answer_wins():
    group = [Sample(0, "s", score, 1, answer) for score, answer in ((0.0, "b"), (1.0, "a"), (1.0, "a"), (0.0, "b"))]
    assert majority_score(group) == 0.0
    assert majority_score(group[1:]) == 1.0
    assert majority_score([Sample(0, "s", 1.0, 1)]) == 0.0


def test_answers_come_from_the_scorer_or_are_read_as_it_reads_them():
    built_in = answer_of(Config())
    assert built_in("openai/gsm8k", "so #### 1,234", {}) == "1234"
    assert built_in("openai/gsm8k", "so 1234", {}) is None
    assert built_in("openai/gsm8k", "so #### 5", {"pred": 7}) == "7"
    assert built_in("of nobody", "#### 5", {}) is None
    custom = answer_of(Config.model_validate({"reward": {"function": {"path": "mine.py"}}}))
    assert custom("openai/gsm8k", "#### 5", {}) is None
    assert custom("openai/gsm8k", "#### 5", {"pred": "x"}) == "x"


def test_kept_prompts_are_spread_evenly_and_always_the_same():
    assert chosen(100, 4) == [0, 25, 50, 75]
    assert chosen(3, 8) == [0, 1, 2]
    assert chosen(5, 0) == []
