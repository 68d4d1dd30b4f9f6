from dataclasses import replace

import pytest

from megaverl.errors import RunError, UserError
from megaverl.rollout.engine import Sampling
from megaverl.rollout.requests import EngineState, check_request, request_seed

GOOD = Sampling(n=1, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=4, seed=0)


def problems(prompts, keys, sampling=GOOD, **limits):
    with pytest.raises(UserError) as caught:
        check_request(prompts, keys, sampling, **({"vocab": 10, "max_model_len": 8} | limits))
    return [str(p) for p in caught.value.problems]


def test_seeds_differ_by_base_key_and_sample_and_are_stable():
    seeds = {request_seed(b, k, s) for b in range(8) for k in range(40) for s in range(8)}
    assert len(seeds) == 8 * 40 * 8
    assert all(0 <= s < 2**62 for s in seeds)
    assert request_seed(1, 23, 4) != request_seed(12, 3, 4)
    assert request_seed(0, 0, 0) == 2404280986188055813


def test_every_bad_prompt_is_named_at_once():
    found = problems([[], [1, 10], [-1], [1] * 5, [1, 2]], range(5))
    assert [f.split(":")[0] for f in found] == ["prompt 0", "prompt 1", "prompt 2", "prompt 3"]
    assert "5 tokens and 4 new ones are more than 8" in found[3]


@pytest.mark.parametrize(
    "wrong",
    [{"n": 0}, {"max_tokens": 0}, {"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": 0}, {"min_p": 1.5}],
)
def test_impossible_sampling_is_refused(wrong):
    assert len(problems([[1]], [0], replace(GOOD, **wrong))) == 1


def test_each_prompt_needs_a_key():
    assert "2 prompts came with 1 keys" in problems([[1], [2]], [0])[0]


def test_a_good_request_passes():
    check_request([[0, 9], [1] * 4], [5, 5], GOOD, vocab=10, max_model_len=8)


def test_state_is_ready_only_awake_and_with_a_version():
    state = EngineState()
    with pytest.raises(RunError, match="no version"):
        state.check_ready()
    state.version = 0
    state.check_ready()
    state.awake = False
    with pytest.raises(RunError, match="asleep"):
        state.check_ready()
