"""What the rollout role makes of an engine's answers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megaverl.errors import RunError
from megaverl.rollout.engine import Completion, Sampling
from megaverl.workers.rollout_role import PromptTask, RolloutRole


class Engine:
    """Answers every prompt with its own ids, and loses what it is told to lose."""

    def __init__(self, lost: set[tuple[int, int]]) -> None:
        self.lost = lost

    def generate(self, prompts, keys, sampling):
        pairs = [(p, s) for p in range(len(prompts)) for s in range(sampling.n)]
        return [
            Completion(prompt=p, sample=s, token_ids=list(prompts[p]), log_probs=[0.0] * len(prompts[p]), finish="stop")
            for p, s in pairs
            if (p, s) not in self.lost
        ]


def role(*lost: tuple[int, int]) -> RolloutRole:
    return RolloutRole(Engine(set(lost)), SimpleNamespace(decode=str), None, 0, 1)


TASKS = [PromptTask(i, [1, 2, i], "x", "y", {}, 100 + i) for i in range(512)]
SAMPLING = Sampling(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=4, seed=0, stop_ids=())


def test_case_36_one_lost_response_of_512_prompts_ends_the_step_and_is_named():
    with pytest.raises(
        RunError, match=r"1023 responses for 512 prompts x 2 samples; 1 never came: sample 1 of row 407"
    ):
        role((307, 1)).generate(TASKS, SAMPLING)


def test_complete_answers_pass():
    whole = role()
    whole.generate(TASKS, SAMPLING)
    assert len(whole.batch().lengths) == 1024
