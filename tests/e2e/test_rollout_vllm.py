"""vLLM in real worker processes, joined to their torch.distributed world, with the training parameters as its own."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megaverl.config.schema import RolloutConfig
from megaverl.errors import RunError, UserError
from megaverl.models.family import load_shape, weight_map
from megaverl.parallel.layout import Layout
from megaverl.resharding.planner import make_plan
from megaverl.rollout.compat_vllm import vllm_refusal
from megaverl.rollout.engine import Sampling
from tests.gloo.launch import run_ranks
from tests.unit.resharding.test_plan import TINY
from tests.unit.rollout.tiny import (
    VOCAB,
    reference,
    reference_log_probs,
    save_checkpoint,
    some_prompts,
    training_params,
    write_shard,
)

pytestmark = pytest.mark.skipif(vllm_refusal(TINY, "cpu") is not None, reason="needs the supported vLLM for CPUs")

PROMPTS = some_prompts(12)
KEYS = range(100, 112)
GREEDY = Sampling(n=1, temperature=0.0, top_p=1.0, top_k=-1, max_tokens=8, seed=0)
SAMPLED = Sampling(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8, seed=7)
WARM = Sampling(n=1, temperature=1.4, top_p=1.0, top_k=-1, max_tokens=5, seed=7)
NUCLEUS = Sampling(n=1, temperature=0.7, top_p=0.6, top_k=-1, max_tokens=5, seed=7)
MIN_P = Sampling(n=1, temperature=1.3, top_p=1.0, top_k=-1, max_tokens=5, seed=7, min_p=0.9)
TOP_K = Sampling(n=1, temperature=1.3, top_p=1.0, top_k=3, max_tokens=5, seed=7)
UPDATES = 3


def start(folder, rank, tp, world):
    """The engine on config.json alone, as a worker has it, and the training parameters."""
    from megaverl.rollout.vllm_engine import VllmEngine

    layout = Layout(tp=tp, dp=world // tp)
    shape = load_shape(folder)
    plan = make_plan(weight_map(shape), layout, tp)
    params = training_params(folder, tp, rank % tp)
    config = RolloutConfig(cpu_cache_gb=0.1, max_num_seqs=64)
    engine = VllmEngine(folder / "bare", shape, plan, params, layout, config, max_model_len=64)
    return engine, params


def report(engine):
    return vars(engine.check_binding())


def updates(engine, params, folder, tp, rank):
    """Greedy responses with the start weights and after each in-place update, and the binding each time."""
    results, bindings, pointers = [], [], {n: p.data_ptr() for n, p in params.items()}
    for update in range(UPDATES + 1):
        write_shard(params, folder, tp, rank % tp, update)
        engine.sleep()
        engine.wake_weights()
        engine.wake()
        engine.serve_version(update)
        results.append(engine.generate(PROMPTS, KEYS, GREEDY))
        bindings.append(report(engine))
    assert pointers == {n: p.data_ptr() for n, p in params.items()}
    write_shard(params, folder, tp, rank % tp, 0)
    engine.serve_version(UPDATES + 1)
    return results, bindings


def segments_left():
    """Named shared memory of this world's vLLM; its name begins with the process id of rank 0."""
    first = [os.getpid()]
    dist.broadcast_object_list(first, src=0)
    return sorted(path.name for path in Path("/dev/shm").glob(f"{first[0]}-*cpushm*"))


def several_ranks(rank, world, folder, tp):
    engine, params = start(folder, rank, tp, world)
    out = dict(zip(("updates", "bindings"), updates(engine, params, folder, tp, rank)))
    out["shared memory mapped"] = "cpushm" in Path("/proc/self/maps").read_text()
    out["segments left"] = segments_left()
    out["sampled"] = engine.generate(PROMPTS, KEYS, SAMPLED)
    own = [rank // tp]  # each replica its own request: the others must not wait for it, nor answer it
    out["own"] = engine.generate([PROMPTS[i] for i in own], own, SAMPLED)
    return out


def one_rank(rank, world, folder):
    torch.manual_seed(123)
    expected_draw = torch.rand(1, generator=torch.Generator().manual_seed(123)).item()
    set_threads = torch.set_num_threads
    engine, params = start(folder, rank, 1, world)
    out = {"refusals": refusals(engine)}
    out.update(zip(("updates", "bindings"), updates(engine, params, folder, 1, rank)))
    out["sampled"] = engine.generate(PROMPTS, KEYS, SAMPLED)
    out["again"] = engine.generate(PROMPTS, KEYS, SAMPLED)
    out["alone"] = [c for p, k in zip(PROMPTS, KEYS) for c in engine.generate([p], [k], SAMPLED)]
    out["other keys"] = engine.generate(PROMPTS, range(12), SAMPLED)
    out["reversed"] = engine.generate(PROMPTS[::-1], KEYS[::-1], SAMPLED)
    for name, sampling in (("warm", WARM), ("nucleus", NUCLEUS), ("top_k", TOP_K), ("min_p", MIN_P)):
        out[name] = engine.generate(PROMPTS, KEYS, sampling)
    many = engine.generate([PROMPTS[0]], [0], Sampling(3000, 1.0, 1.0, -1, max_tokens=1, seed=1))
    out["first tokens"] = Counter(c.token_ids[0] for c in many)
    out["stopping"] = stopping(engine)
    out["prefixes"] = prefixes(engine)
    with torch.no_grad():
        params["output_layer.weight"].neg_()
    engine.serve_version(9)
    out["head negated"] = engine.generate(PROMPTS[:2], KEYS[:2], GREEDY)
    out["process unchanged"] = torch.rand(1).item() == expected_draw and torch.set_num_threads is set_threads
    out["compiled frames"] = sum(torch._dynamo.utils.counters["frames"].values())
    out["spoiled"] = spoiled(engine)
    return out


def refusals(engine):
    """What is refused, and with which text."""
    found = {}

    def note(name, error, call):
        with pytest.raises(error) as caught:
            call()
        found[name] = str(caught.value)

    note("no version", RunError, lambda: engine.generate(PROMPTS[:1], [0], GREEDY))
    engine.serve_version(0)
    engine.sleep()
    note("asleep", RunError, lambda: engine.generate(PROMPTS[:1], [0], GREEDY))
    engine.wake_weights()
    engine.wake()
    note("prompts", UserError, lambda: engine.generate([[], [VOCAB], [1] * 60], [0, 1, 2], GREEDY))
    assert engine.generate([], [], GREEDY) == []
    return found


def prefixes(engine):
    """How often vLLM was told to drop its cached prefixes: by a request, another, a commit after them, another."""
    told, counts = [], []
    drop = engine._llm.reset_prefix_cache
    engine.serve_version(8)
    engine._llm.reset_prefix_cache = lambda: told.append(1) or drop()
    for call in (ask := lambda: engine.generate(PROMPTS[:1], [0], GREEDY), ask, *[lambda: engine.serve_version(8)] * 2):
        call()
        counts.append(len(told))
    engine._llm.reset_prefix_cache = drop
    return counts


def stopping(engine):
    """Greedy responses, then the same with one of their tokens as end token, with and without heeding it."""
    free = engine.generate(PROMPTS, KEYS, GREEDY)
    end = free[0].token_ids[3]
    ends = Sampling(1, 0.0, 1.0, -1, max_tokens=8, seed=0, stop_ids=(end,))
    ignoring = Sampling(1, 0.0, 1.0, -1, max_tokens=8, seed=0, stop_ids=(end,), ignore_end=True)
    return end, free, engine.generate(PROMPTS, KEYS, ends), engine.generate(PROMPTS, KEYS, ignoring)


def spoiled(engine):
    """What the check says of a parameter that vLLM moved, and of a layer that it packed."""
    from megaverl.rollout.compat_vllm import engine_model

    model = engine_model(engine._llm)
    model.lm_head.cpu_linear = lambda x, weight, bias: x
    model.model.norm.weight.data = model.model.norm.weight.data.clone()
    with pytest.raises(RunError) as caught:
        engine.check_binding()
    return str(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    return bare_copy(save_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def single(folder):
    return run_ranks(one_rank, 1, folder)[0]


@pytest.fixture(scope="module")
def tp2(folder):
    return run_ranks(several_ranks, 2, folder, 2)


@pytest.fixture(scope="module")
def replicas(folder):
    return run_ranks(several_ranks, 2, folder, 1)


@pytest.fixture(scope="module")
def models(folder):
    return [reference(folder, update) for update in range(UPDATES + 1)]


def assert_agrees(completions, model, temperature=1.0, *, greedy=False, prompts=PROMPTS):
    assert completions
    for c in completions:
        expected, best = reference_log_probs(model, prompts[c.prompt], c.token_ids, temperature)
        assert c.log_probs == pytest.approx(expected, abs=1e-5)
        assert not greedy or c.token_ids == best


def tokens(completions):
    return [c.token_ids for c in completions]


def check_updates(result, models, parameters=31):
    for update, completions in enumerate(result["updates"]):
        assert_agrees(completions, models[update], greedy=True)
    assert len({json.dumps(tokens(c)) for c in result["updates"]}) == UPDATES + 1
    for binding in result["bindings"]:
        assert binding["parameters"] == parameters
        assert binding["bytes_added"] == 0


def test_tp1_generates_with_the_training_weights_through_in_place_updates(single, models):
    check_updates(single, models)


def test_tp2_generates_with_the_training_weights_through_in_place_updates(tp2, models):
    for rank in tp2:
        check_updates(rank, models)
    assert tp2[0]["updates"] == tp2[1]["updates"]


def test_two_replicas_generate_with_the_training_weights_through_in_place_updates(replicas, models):
    for rank in replicas:
        check_updates(rank, models)


def test_sampled_log_probs_agree_with_transformers(single, tp2, models):
    assert_agrees(single["sampled"], models[0])
    assert_agrees(tp2[0]["sampled"], models[0])
    assert [(c.prompt, c.sample) for c in single["sampled"]] == [(p, s) for p in range(12) for s in range(2)]


def test_the_ranks_of_a_tp_group_give_the_same_responses(tp2):
    assert tp2[0]["sampled"] == tp2[1]["sampled"]
    assert tp2[0]["own"] == tp2[1]["own"]


def test_the_ranks_share_memory_that_leaves_no_name_behind(tp2):
    assert all(rank["shared memory mapped"] for rank in tp2)
    assert [rank["segments left"] for rank in tp2] == [[], []]


def test_replicas_are_independent_and_equal_bit_for_bit(replicas, single):
    assert replicas[0]["sampled"] == replicas[1]["sampled"] == single["sampled"]
    assert replicas[0]["updates"] == replicas[1]["updates"] == single["updates"]
    assert tokens(replicas[0]["own"]) != tokens(replicas[1]["own"])


def test_the_same_call_gives_the_same_bits(single):
    assert single["sampled"] == single["again"]


def test_a_sample_depends_on_its_seed_key_and_number_alone(single):
    whole = tokens(single["sampled"])
    assert tokens(single["alone"]) == whole
    assert tokens(single["reversed"]) == [t for p in reversed(range(12)) for t in whole[2 * p : 2 * p + 2]]
    assert tokens(single["other keys"]) != whole
    assert all(a != b for a, b in zip(whole[::2], whole[1::2]))
    for alone, together in zip(single["alone"], single["sampled"]):
        assert alone.log_probs == pytest.approx(together.log_probs, abs=1e-5)


@pytest.mark.parametrize(("name", "temperature"), [("warm", 1.4), ("nucleus", 0.7), ("top_k", 1.3), ("min_p", 1.3)])
def test_log_probs_are_over_the_full_softmax_at_the_sampling_temperature(single, models, name, temperature):
    assert_agrees(single[name], models[0], temperature)


@torch.no_grad()
def test_top_k_draws_from_the_likeliest_tokens_only(single, models):
    for c in single["top_k"]:
        prompt = PROMPTS[c.prompt]
        logits = models[0](torch.tensor([[*prompt, *c.token_ids]])).logits[0, len(prompt) - 1 : -1]
        for token, row in zip(c.token_ids, logits):
            assert token in row.topk(3).indices


@torch.no_grad()
def test_min_p_draws_from_what_is_likely_enough_only(single, models):
    for c in single["min_p"]:
        prompt = PROMPTS[c.prompt]
        logits = models[0](torch.tensor([[*prompt, *c.token_ids]])).logits[0, len(prompt) - 1 : -1]
        for token, row in zip(c.token_ids, logits):
            probabilities = (row / MIN_P.temperature).softmax(-1)
            assert probabilities[token] > 0.899 * probabilities.max()


@torch.no_grad()
def test_sampled_tokens_follow_the_softmax(single, models):
    counts = single["first tokens"]
    probabilities = models[0](torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    assert counts.total() == 3000
    # Pearson's statistic over the 30 likeliest tokens and the rest: 30 degrees of freedom, 59.7 is p = 0.001.
    best = probabilities.topk(30).indices.tolist()
    seen = [counts[t] for t in best]
    expected = [3000 * probabilities[t].item() for t in best]
    seen, expected = [*seen, 3000 - sum(seen)], [*expected, 3000 - sum(expected)]
    assert sum((s - e) ** 2 / e for s, e in zip(seen, expected)) < 59.7


def test_the_end_token_ends_a_response_and_is_part_of_it(single):
    end, free, ended, ignoring = single["stopping"]
    assert {c.finish for c in ended} == {"stop", "length"}
    for c, whole in zip(ended, free):
        cut = whole.token_ids.index(end) + 1 if end in whole.token_ids else 8
        assert c.token_ids == whole.token_ids[:cut]
        assert len(c.log_probs) == cut
        assert c.finish == ("stop" if end in whole.token_ids else "length")
    assert ignoring == free


def test_a_change_of_the_output_layer_alone_is_seen(single, folder, models):
    model = reference(folder)
    with torch.no_grad():
        model.lm_head.weight.neg_()
    assert_agrees(single["head negated"], model, greedy=True)


def test_nothing_is_generated_asleep_without_a_version_or_from_bad_prompts(single):
    found = single["refusals"]
    assert "no version" in found["no version"]
    assert "asleep" in found["asleep"]
    assert "3 problems found" in found["prompts"]


def test_the_rest_of_the_process_is_left_as_it_was_and_nothing_is_compiled(single):
    assert single["process unchanged"]
    assert single["compiled frames"] == 0


def test_prefixes_of_earlier_requests_are_dropped_and_none_twice(single):
    assert single["prefixes"] == [0, 1, 2, 2]


def test_a_parameter_or_matmul_that_vllm_took_back_is_named(single):
    assert "model.norm.weight: data_ptr" in single["spoiled"]
    assert "lm_head: vLLM packed" in single["spoiled"]


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
OTHERS = {
    "tied": {"tied": True},
    "qwen3": {"family": "Qwen3"},
    "llama": {"family": "Llama", "rope_parameters": LLAMA3},
}


def other_models(rank, world, folders):
    """One engine after the other in the same process, each with the start weights and after an update."""
    out = {}
    for name, folder in folders.items():
        engine, params = start(folder, rank, 1, world)
        engine.serve_version(0)
        before = engine.generate(PROMPTS, KEYS, GREEDY)
        write_shard(params, folder, 1, rank, update=1)
        engine.serve_version(1)
        out[name] = before, engine.generate(PROMPTS, KEYS, GREEDY), report(engine)
        engine.close()
        assert dist.is_initialized()  # vLLM joined this world and must not take it down
    return out


def bare_copy(folder):
    """A folder as the engine gets it: config.json alone."""
    (folder / "bare").mkdir()
    shutil.copy(folder / "config.json", folder / "bare")
    return folder


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    folders = {n: bare_copy(save_checkpoint(tmp_path_factory.mktemp(n), **changes)) for n, changes in OTHERS.items()}
    return folders, run_ranks(other_models, 1, folders)[0]


@pytest.mark.parametrize(("name", "parameters"), [("tied", 30), ("qwen3", 35), ("llama", 27)])
def test_other_models_generate_with_the_training_weights_one_after_the_other(others, name, parameters):
    folder, (before, after, binding) = others[0][name], others[1][name]
    assert_agrees(before, reference(folder), greedy=True)
    assert_agrees(after, reference(folder, update=1), greedy=True)
    assert (binding["parameters"], binding["bytes_added"]) == (parameters, 0)
