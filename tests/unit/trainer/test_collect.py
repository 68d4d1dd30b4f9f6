"""Dynamic sampling: which prompts of which batches make the step's batch."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from megaverl.algorithms.registry import algorithm_for
from megaverl.config.schema import Config
from megaverl.trainer import collect as module
from megaverl.trainer.collect import collect
from megaverl.trainer.experience import Experience


@dataclass
class Driver:
    """What `collect` asks of a run beside generation."""

    config: Config
    step: int = 1
    posted: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.workers = SimpleNamespace(post=self.posted.append)
        self.console = SimpleNamespace(warn=self.warned.append)


def batch_of(useful, prompts=4):
    """One generated batch, two samples a prompt; scores differ for the prompts named."""
    groups = [p for p in range(prompts) for _ in range(2)]
    scores = [float(i % 2) if p in useful else 1.0 for i, p in enumerate(groups)]
    n = len(groups)
    return Experience(
        [object()], [(0, i) for i in range(n)], groups, [1] * n, [2] * n, [False] * n, None, scores, [{}] * n
    )


def run_collect(monkeypatch, batches, **keys):
    config = Config.model_validate({"algorithm": {"name": "dapo", **keys}, "data": {"train_batch_size": 4}})
    driver, waiting = Driver(config), [batch_of(useful) for useful in batches]
    monkeypatch.setattr(module, "_sample", lambda run, algorithm, number: waiting.pop(0))
    metrics, experience = collect(driver, algorithm_for(config))
    return driver, metrics, experience, waiting


def useful_of(experience):
    return [
        len({s for s, g in zip(experience.scores, experience.groups, strict=True) if g == group}) > 1
        for group in dict.fromkeys(experience.groups)
    ]


def test_batches_are_generated_until_enough_prompts_are_useful(monkeypatch):
    driver, metrics, experience, waiting = run_collect(monkeypatch, [{0, 2}, {1}, {0, 1, 2}, {0}])
    assert len(waiting) == 1
    assert metrics["train/num_gen_batches"] == 3
    assert metrics["train/useful_prompts_ratio"] == pytest.approx(6 / 12)
    assert useful_of(experience) == [True] * 4
    assert experience.groups == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [place[0] for place in experience.places] == [0, 0, 0, 0, 1, 1, 2, 2]
    assert driver.posted == ["to_train"]
    assert driver.warned == []


def test_the_bound_fills_the_batch_with_what_was_left_out_and_says_so(monkeypatch):
    driver, metrics, experience, _ = run_collect(monkeypatch, [{0}, set()], max_generation_batches=2)
    assert metrics["train/num_gen_batches"] == 2
    assert useful_of(experience) == [True, False, False, False]
    assert "only 1 of 8 prompts" in driver.warned[0]
    assert driver.posted == ["to_train"]


def test_one_batch_of_useful_prompts_is_taken_as_it_is(monkeypatch):
    _, metrics, experience, waiting = run_collect(monkeypatch, [{0, 1, 2, 3}, {0}])
    assert len(waiting) == 1
    assert metrics["train/num_gen_batches"] == 1
    assert useful_of(experience) == [True] * 4


def test_without_dynamic_sampling_a_step_is_one_batch_whatever_its_scores(monkeypatch):
    driver, metrics, experience, _ = run_collect(monkeypatch, [{1}], dynamic_sampling=False)
    assert "train/num_gen_batches" not in metrics
    assert useful_of(experience) == [False, True, False, False]
    assert driver.warned == []
