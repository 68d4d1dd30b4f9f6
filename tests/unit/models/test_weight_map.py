import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.errors import Problems, UserError
from megaverl.models.family import weight_map
from megaverl.models.shape import ModelShape

SMALL = ModelShape(
    family="qwen2",
    layers=2,
    hidden=8,
    heads=4,
    kv_heads=2,
    head_dim=4,
    intermediate=12,
    vocab=100,
    max_positions=64,
    norm_eps=1e-6,
    rope_theta=1e4,
    tied=True,
    qkv_bias=True,
)


@st.composite
def shapes_and_tp(draw):
    tp = draw(st.sampled_from([1, 2, 3, 4, 8]))
    # As many KV heads as ranks or a multiple, or a divisor: then several ranks hold one head.
    kv = draw(st.sampled_from([tp, 2 * tp, *(n for n in range(1, tp) if tp % n == 0)]))
    shape = dataclasses.replace(
        SMALL,
        layers=draw(st.integers(1, 3)),
        hidden=draw(st.integers(1, 9)),
        kv_heads=kv,
        heads=max(tp, kv) * draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 5)),
        intermediate=tp * draw(st.integers(1, 4)),
        vocab=draw(st.integers(1, 700)),
        tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )
    return shape, tp


@settings(deadline=None, max_examples=60)
@given(shapes_and_tp())
def test_pieces_tile_every_hf_tensor_and_every_parameter_exactly_once(case):
    shape, tp = case
    rows = weight_map(shape)
    read, given = ({name: torch.zeros(rows.hf_shape(name), dtype=torch.int) for name in rows.hf_names()} for _ in "ab")
    assert len(read) == len(rows.hf_names())  # no HF tensor has two rows
    for row in rows.expand():
        for rank in range(tp):
            local = torch.zeros(rows.local_shape(row, tp), dtype=torch.int)
            for piece in rows.pieces(row, tp, rank):
                assert read[piece.hf][piece.source].shape == local[piece.target].shape
                read[piece.hf][piece.source] += 1
                given[piece.hf][piece.source] += piece.copy == 0
                local[piece.target] += 1
            local[rows.padding(row, tp, rank)] += 1
            assert bool((local == 1).all()), row.megatron
        for name in row.hf:
            times = tp if row.split == "replicated" else 1
            if any(part in name for part in ("k_proj", "v_proj")):
                times = max(1, tp // shape.kv_heads)
            assert bool((read[name] == times).all()), name
            assert bool((given[name] == 1).all()), name  # an export takes each element from exactly one rank


@settings(deadline=None, max_examples=30)
@given(shapes_and_tp())
def test_vocabulary_padding_is_the_end_of_the_joined_parameter(case):
    shape, tp = case
    rows = weight_map(shape)
    row = next(r for r in rows.expand() if r.split == "vocab")
    joined = torch.full((shape.padded_vocab(tp),), -1)
    for rank in range(tp):
        size = rows.local_shape(row, tp)[0]
        own = joined[rank * size : (rank + 1) * size]
        for piece in rows.pieces(row, tp, rank):
            own[piece.target[0]] = torch.arange(shape.vocab)[piece.source[0]]
    assert joined[: shape.vocab].tolist() == list(range(shape.vocab))
    assert bool((joined[shape.vocab :] == -1).all())


def test_padding_of_real_and_tiny_vocabularies():
    real = dataclasses.replace(SMALL, vocab=151936)  # 64 * 2374
    assert [real.padded_vocab(tp) for tp in (1, 2, 4, 8, 64)] == [151936] * 5
    tiny = dataclasses.replace(SMALL, vocab=1000)
    assert [tiny.padded_vocab(tp) for tp in (1, 2, 4, 8, 64)] == [1024] * 5
    assert tiny.padded_vocab(3) == 1152  # a multiple of 64 * 3
    rows = weight_map(tiny)
    embedding = rows.by_megatron_name()["embedding.word_embeddings.weight"]
    assert rows.local_shape(embedding, 2) == (512, 8)
    assert rows.padding(embedding, 2, 0) == slice(512, 512)
    assert rows.padding(embedding, 2, 1) == slice(488, 512)


def test_qkv_of_a_rank_is_all_q_all_k_all_v_of_whole_heads():
    rows = weight_map(SMALL)
    qkv = rows.by_megatron_name()["decoder.layers.1.self_attention.linear_qkv.weight"]
    got = [(p.hf.split(".")[-2], p.source[0], p.target[0]) for p in rows.pieces(qkv, 2, 1)]
    assert got == [
        ("q_proj", slice(8, 16), slice(0, 8)),
        ("k_proj", slice(4, 8), slice(8, 12)),
        ("v_proj", slice(4, 8), slice(12, 16)),
    ]


def test_gate_comes_before_up_and_down_is_split_by_columns():
    rows = weight_map(SMALL)
    fc1 = rows.by_megatron_name()["decoder.layers.0.mlp.linear_fc1.weight"]
    assert [(p.hf.split(".")[-2], p.source[0], p.target[0]) for p in rows.pieces(fc1, 2, 1)] == [
        ("gate_proj", slice(6, 12), slice(0, 6)),
        ("up_proj", slice(6, 12), slice(6, 12)),
    ]
    fc2 = rows.by_megatron_name()["decoder.layers.0.mlp.linear_fc2.weight"]
    (piece,) = rows.pieces(fc2, 2, 1)
    assert piece.source == (slice(0, 8), slice(6, 12))
    assert piece.target == (slice(0, 8), slice(0, 6))


def test_names_of_transformer_engine_find_the_same_row():
    names = weight_map(SMALL).by_megatron_name()
    te = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    assert names[te] is not None
    assert names[te] == names["decoder.layers.0.input_layernorm.weight"]
    assert (
        names["decoder.layers.1.mlp.linear_fc1.layer_norm_weight"].vllm
        == "model.layers.1.post_attention_layernorm.weight"
    )


def test_only_an_untied_model_has_a_head():
    tied = weight_map(SMALL)
    untied = weight_map(dataclasses.replace(SMALL, tied=False))
    assert "output_layer.weight" not in tied.by_megatron_name()
    assert "output_layer.weight" in untied.by_megatron_name()
    assert set(untied.hf_names()) - set(tied.hf_names()) == {"lm_head.weight"}


def test_key_value_heads_fewer_than_ranks_are_held_by_neighbours():
    shape = dataclasses.replace(SMALL, heads=12, kv_heads=2)  # Qwen2.5-1.5B's heads, tp 4
    rows = weight_map(shape)
    qkv = rows.by_megatron_name()["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert rows.local_shape(qkv, 4) == (3 * 4 + 4 + 4, 8)
    for rank, (head, copy) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        q, k, v = rows.pieces(qkv, 4, rank)
        assert (q.source[0], q.copy) == (slice(rank * 12, rank * 12 + 12), 0)
        assert (k.source[0], k.target[0], k.copy) == (slice(head * 4, head * 4 + 4), slice(12, 16), copy)
        assert (v.source[0], v.target[0], v.copy) == (slice(head * 4, head * 4 + 4), slice(16, 20), copy)


@pytest.mark.parametrize(("heads", "kv", "tp"), [(12, 2, 4), (14, 2, 14), (16, 8, 16), (28, 4, 2), (16, 2, 2)])
def test_key_value_heads_sit_where_vllm_puts_them(heads, kv, tp):
    """vLLM: a rank holds max(1, kv / tp) heads, beginning at rank // replicas of them (its QKVParallelLinear)."""
    rows = weight_map(dataclasses.replace(SMALL, heads=heads, kv_heads=kv, intermediate=16 * 7))
    qkv = rows.by_megatron_name()["decoder.layers.0.self_attention.linear_qkv.weight"]
    held, replicas = max(1, kv // tp), max(1, tp // kv)
    for rank in range(tp):
        _, k, _ = rows.pieces(qkv, tp, rank)
        assert k.source[0] == slice(rank // replicas * held * 4, (rank // replicas + 1) * held * 4)


def test_an_impossible_tp_is_refused_with_every_size_it_does_not_divide():
    rows = weight_map(SMALL)
    problems = Problems()
    rows.check_tp(5, problems)
    text = str(UserError(problems.found))
    assert len(problems.found) == 3
    assert "4 attention heads cannot be divided over tensor parallel size 5" in text
    assert "2 key-value heads" in text
    assert "divides it or is a multiple of it" in text
    assert "12 MLP columns" in text
    three = weight_map(dataclasses.replace(SMALL, heads=12, kv_heads=3))
    with pytest.raises(UserError, match="3 key-value heads"):  # although 3 * 4 rows could be cut in 4
        three.local_shape(three.by_megatron_name()["decoder.layers.0.self_attention.linear_qkv.weight"], 4)
