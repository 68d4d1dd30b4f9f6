import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.errors import UserError
from megaverl.models.family import weight_map
from megaverl.models.shape import ModelShape
from megaverl.parallel.layout import Layout
from megaverl.resharding.geometry import Box
from megaverl.resharding.planner import make_plan

TINY = ModelShape(
    family="qwen2",
    layers=2,
    hidden=128,
    heads=8,
    kv_heads=8,
    head_dim=32,
    intermediate=256,
    vocab=1030,
    max_positions=512,
    norm_eps=1e-6,
    rope_theta=1e4,
    tied=False,
    qkv_bias=True,
)
TABLE = weight_map(TINY)


def parameters(shape, tp):
    """Elements of one rank's model, from the architecture alone."""
    q, kv = shape.heads * shape.head_dim // tp, shape.kv_heads * shape.head_dim // tp
    attention = (q + 2 * kv) * (shape.hidden + 1) + shape.hidden * q
    mlp = 3 * shape.hidden * shape.intermediate // tp
    embeddings = (1 if shape.tied else 2) * shape.padded_vocab(tp) // tp * shape.hidden
    return embeddings + shape.layers * (attention + mlp + 2 * shape.hidden) + shape.hidden


@settings(deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 64), st.integers(1, 5), st.booleans(), st.sampled_from([2, 4]))
def test_equal_layouts_alias_every_byte_and_move_none(tp, dp, layers, tied, element_bytes):
    shape = replace(TINY, layers=layers, tied=tied)
    train = Layout(tp=tp, dp=dp)
    plan = make_plan(weight_map(shape), train, tp, element_bytes=element_bytes)
    assert [r.rank for r in plan.ranks] == list(range(train.world))
    assert plan.totals() == {
        "bytes_aliased": parameters(shape, tp) * element_bytes * train.world,
        "bytes_copied": 0,
        "bytes_received": 0,
        "bytes_received_bound": 0,
        "peak_extra_bytes": 0,
    }
    assert plan.bytes_moved == 0


@settings(deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_every_rollout_element_is_written_once_by_the_whole_training_parameter(tp, tied):
    table = weight_map(replace(TINY, tied=tied))
    for rank in make_plan(table, Layout(tp=tp), tp).ranks:
        names = [e.vllm for e in rank.entries]
        assert len(names) == len(set(names)) == len({e.megatron for e in rank.entries})
        assert set(names) == {row.vllm for row in table.expand()}
        for entry in rank.entries:
            assert entry.source == entry.target == Box.whole(entry.shape)
            assert entry.bytes == math.prod(entry.shape) * 4
            assert entry.source_rank is None


def test_a_shard_has_vllms_shapes():
    shapes = {e.vllm: e.shape for e in make_plan(TABLE, Layout(tp=2), 2).ranks[1].entries}
    assert shapes["model.embed_tokens.weight"] == (544, 128)
    assert shapes["model.layers.1.self_attn.qkv_proj.weight"] == (3 * 128, 128)
    assert shapes["model.layers.0.self_attn.qkv_proj.bias"] == (3 * 128,)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (128, 128)
    assert shapes["model.layers.0.mlp.gate_up_proj.weight"] == (256, 128)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (128, 128)
    assert shapes["model.norm.weight"] == (128,)


def test_sizes_that_cannot_be_divided_are_refused():
    with pytest.raises(UserError) as caught:
        make_plan(TABLE, Layout(tp=3), 3)
    text = str(caught.value)
    for part in ("8 attention heads", "8 key-value heads", "256 MLP columns"):
        assert part in text
    with pytest.raises(UserError, match="4 key-value heads"):
        make_plan(weight_map(replace(TINY, heads=24, kv_heads=4, intermediate=384)), Layout(tp=6), 6)


def test_key_value_heads_fewer_than_ranks_are_held_by_several():
    plan = make_plan(weight_map(replace(TINY, kv_heads=2)), Layout(tp=4), 4)
    shapes = {e.vllm: e.shape for e in plan.ranks[0].entries}
    assert shapes["model.layers.0.self_attn.qkv_proj.weight"] == ((2 + 1 + 1) * 32, 128)


def test_a_tp_that_cannot_divide_vllms_vocabulary_is_refused_and_one_that_training_pads_otherwise_is_not():
    shape = replace(TINY, heads=6, kv_heads=6, intermediate=258)
    with pytest.raises(UserError, match="1088 rows and cannot divide them over 3"):
        make_plan(weight_map(shape), Layout(tp=3), 3)
    plan = make_plan(weight_map(shape), Layout(tp=3), 1)  # 1152 rows in training, 1088 in vLLM
    assert next(e.shape for e in plan.ranks[0].entries if e.vllm == "lm_head.weight") == (1088, 128)


def test_worlds_and_stages_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="divided into rollout replicas of 4"):
        make_plan(TABLE, Layout(tp=2), 4)
    with pytest.raises(UserError, match="2 layers cannot fill 4"):
        make_plan(TABLE, Layout(pp=4), 1)
