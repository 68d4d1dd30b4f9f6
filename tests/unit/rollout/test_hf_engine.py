import pytest
import torch

from megaverl.errors import RunError, UserError
from megaverl.models.family import load_shape, weight_map
from megaverl.parallel.layout import Layout
from megaverl.resharding.planner import make_plan
from megaverl.rollout.engine import Sampling
from megaverl.rollout.hf_engine import HfEngine, Sampler
from tests.unit.rollout.tiny import (
    reference,
    reference_log_probs,
    save_checkpoint,
    some_prompts,
    training_params,
    write_shard,
)

GREEDY = Sampling(n=1, temperature=0.0, top_p=1.0, top_k=-1, max_tokens=8, seed=0)
SAMPLED = Sampling(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8, seed=11)


def make_engine(folder, params, **limits):
    shape = load_shape(folder)
    plan = make_plan(weight_map(shape), Layout(), 1)
    return HfEngine(folder, shape, plan, params, **({"max_model_len": 64} | limits))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    return save_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def bound(checkpoint):
    params = training_params(checkpoint)
    engine = make_engine(checkpoint, params)
    engine.serve_version(0)
    return engine, params


def assert_agrees(completions, prompts, model, temperature, *, greedy=False):
    for c in completions:
        expected, best = reference_log_probs(model, prompts[c.prompt], c.token_ids, temperature)
        assert c.log_probs == pytest.approx(expected, abs=1e-5)
        assert not greedy or c.token_ids == best


def test_greedy_tokens_and_log_probs_agree_with_transformers_before_and_after_an_in_place_update(bound, checkpoint):
    engine, params = bound
    prompts = some_prompts(6)
    before = engine.generate(prompts, range(6), GREEDY)
    assert_agrees(before, prompts, reference(checkpoint), 1.0, greedy=True)

    write_shard(params, checkpoint, 1, 0, update=2)
    engine.serve_version(1)
    after = engine.generate(prompts, range(6), GREEDY)
    assert_agrees(after, prompts, reference(checkpoint, update=2), 1.0, greedy=True)
    assert [c.token_ids for c in after] != [c.token_ids for c in before]
    engine.check_binding()


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(1.0, 1.0, -1), (0.7, 0.8, -1), (1.5, 1.0, 20)])
def test_log_probs_are_over_the_full_softmax_at_the_sampling_temperature(bound, checkpoint, temperature, top_p, top_k):
    prompts = some_prompts(3)
    sampling = Sampling(2, temperature, top_p, top_k, max_tokens=6, seed=5)
    completions = bound[0].generate(prompts, range(3), sampling)
    assert [(c.prompt, c.sample) for c in completions] == [(p, s) for p in range(3) for s in range(2)]
    assert_agrees(completions, prompts, reference(checkpoint), temperature)


def test_every_parameter_is_a_view_of_the_training_storage(bound):
    engine, params = bound
    storage = {p.untyped_storage().data_ptr() for p in params.values()}
    assert {p.untyped_storage().data_ptr() for p in engine.model.parameters()} == storage
    qkv = params["decoder.layers.1.self_attention.linear_qkv.weight"]
    attention = engine.model.model.layers[1].self_attn
    assert attention.q_proj.weight.data_ptr() == qkv.data_ptr()
    assert attention.k_proj.weight.data_ptr() == qkv[128:].data_ptr()
    assert not any(b.is_meta for b in engine.model.buffers())


def test_a_parameter_that_left_the_storage_is_named(bound):
    engine, _ = bound
    engine.model.model.norm.weight.data = engine.model.model.norm.weight.data.clone()
    with pytest.raises(RunError, match=r"model\.norm\.weight"):
        engine.check_binding()


def test_tied_embeddings_are_one_tensor(tmp_path):
    folder = save_checkpoint(tmp_path, tied=True)
    params = training_params(folder)
    engine = make_engine(folder, params)
    engine.serve_version(0)
    assert engine.model.lm_head.weight.data_ptr() == params["embedding.word_embeddings.weight"].data_ptr()
    prompts = some_prompts(2)
    assert_agrees(engine.generate(prompts, range(2), GREEDY), prompts, reference(folder), 1.0, greedy=True)


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_other_families_agree_with_transformers(tmp_path, family):
    folder = save_checkpoint(tmp_path, family=family)
    engine = make_engine(folder, training_params(folder))
    engine.serve_version(0)
    prompts = some_prompts(2)
    assert_agrees(engine.generate(prompts, range(2), GREEDY), prompts, reference(folder), 1.0, greedy=True)


def test_a_sample_depends_on_its_seed_key_and_number_alone(bound, checkpoint):
    engine, params = bound
    prompts = some_prompts(5)
    together = engine.generate(prompts, [10, 11, 12, 13, 14], SAMPLED)
    alone = [c for p, k in zip(prompts, range(10, 15)) for c in engine.generate([p], [k], SAMPLED)]
    small = make_engine(checkpoint, params, max_num_seqs=3)
    small.serve_version(0)
    for other in (alone, small.generate(prompts, range(10, 15), SAMPLED)):
        assert [c.token_ids for c in other] == [c.token_ids for c in together]
    assert together == engine.generate(prompts, [10, 11, 12, 13, 14], SAMPLED)
    assert together[0].token_ids != together[1].token_ids
    moved = engine.generate(prompts, [20, 21, 22, 23, 24], SAMPLED)
    assert [c.token_ids for c in moved] != [c.token_ids for c in together]


def test_the_end_token_ends_a_response_and_is_part_of_it(bound):
    engine, _ = bound
    prompts = some_prompts(4)
    free = engine.generate(prompts, range(4), GREEDY)
    end = free[0].token_ids[2]
    stopping = Sampling(1, 0.0, 1.0, -1, max_tokens=8, seed=0, stop_ids=(end,))
    for c, whole in zip(engine.generate(prompts, range(4), stopping), free):
        cut = whole.token_ids.index(end) + 1 if end in whole.token_ids else 8
        assert c.token_ids == whole.token_ids[:cut]
        assert len(c.log_probs) == cut
        assert c.finish == ("stop" if end in whole.token_ids else "length")
    ignoring = Sampling(1, 0.0, 1.0, -1, max_tokens=8, seed=0, stop_ids=(end,), ignore_end=True)
    assert [c.token_ids for c in engine.generate(prompts, range(4), ignoring)] == [c.token_ids for c in free]


def test_nothing_is_generated_asleep_or_without_a_version(checkpoint):
    engine = make_engine(checkpoint, training_params(checkpoint))
    with pytest.raises(RunError, match="no version"):
        engine.generate([[7]], [0], GREEDY)
    engine.serve_version(3)
    engine.sleep()
    with pytest.raises(RunError, match="asleep"):
        engine.generate([[7]], [0], GREEDY)
    engine.wake_weights()
    engine.wake()
    assert engine.version == 3
    assert len(engine.generate([[7]], [0], GREEDY)) == 1


def test_tensor_parallel_rollout_is_refused_with_the_reason(checkpoint):
    shape = load_shape(checkpoint)
    plan = make_plan(weight_map(shape), Layout(tp=2), 2)
    with pytest.raises(UserError, match=r"rollout\.tp is 2"):
        HfEngine(checkpoint, shape, plan, training_params(checkpoint, 2, 0), max_model_len=64)


def test_a_missing_training_parameter_is_named(checkpoint):
    params = training_params(checkpoint)
    del params["decoder.layers.2.mlp.linear_fc1.weight"]
    with pytest.raises(RunError, match=r"layers\.2\.mlp\.linear_fc1\.weight: the training model has no such"):
        make_engine(checkpoint, params)


def drawn(logits, sampling, count=20_000):
    sampler = Sampler(sampling, range(count))
    tokens, log_probs = sampler(torch.tensor([logits]).expand(count, -1), [False] * count)
    return torch.bincount(tokens, minlength=len(logits)) / count, tokens, log_probs


def test_sampled_tokens_follow_the_softmax():
    logits = [2.0, 1.0, 0.0, -1.0]
    frequency, tokens, log_probs = drawn(logits, Sampling(1, 0.5, 1.0, -1, 1, 0))
    expected = (torch.tensor(logits) / 0.5).softmax(-1)
    assert torch.allclose(frequency, expected, atol=0.012)  # four standard errors
    assert torch.allclose(log_probs, expected.log()[tokens])


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    frequency, _, _ = drawn(logits, Sampling(1, 1.0, 1.0, -1, 1, 0, min_p=0.4))
    assert (frequency > 0).tolist() == [True, True, False, False]
    assert frequency[0].item() == pytest.approx(0.5 / 0.8, abs=0.05)


@pytest.mark.parametrize(("top_p", "top_k", "kept"), [(0.7, -1, 2), (0.6, -1, 1), (1.0, 3, 3), (0.95, 2, 2)])
def test_top_k_and_top_p_keep_the_likeliest_tokens_in_proportion(top_p, top_k, kept):
    logits = [2.0, 1.0, 0.0, -1.0]  # probabilities 0.644, 0.237, 0.087, 0.032
    frequency, _, _ = drawn(logits, Sampling(1, 1.0, top_p, top_k, 1, 0))
    expected = torch.tensor(logits[:kept]).softmax(-1)
    assert torch.allclose(frequency[:kept], expected, atol=0.015)
    assert frequency[kept:].sum() == 0
