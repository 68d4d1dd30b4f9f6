"""Packed attention and the norm against plain formulas."""

import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from megaverl.models.attention import PackedAttention, PackedSequences
from megaverl.models.norm import RMSNorm
from megaverl.models.packed import PackLayout
from megaverl.parallel.compat_megatron import TransformerConfig, without_noise


def config(**settings) -> TransformerConfig:
    with without_noise():
        return TransformerConfig(num_layers=1, num_attention_heads=4, **settings)


CONFIG = config(hidden_size=64, num_query_groups=2, kv_channels=16)


def reference(q, k, v, lengths):
    """Softmax attention with a full mask over the pack, in float64."""
    q, k, v = (x.squeeze(1).double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    allowed = (sequence[:, None] == sequence[None]) & torch.ones(len(sequence), len(sequence)).tril().bool()
    scores = torch.einsum("shd,thd->hst", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return torch.einsum("hst,thd->shd", weights, v).flatten(1)


@pytest.mark.parametrize("lengths", [[9], [5, 5], [1, 30, 7, 31, 64, 2, 2], [1] * 5], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_packed_attention_is_causal_attention_of_each_sequence(lengths, kv_heads):
    torch.manual_seed(0)
    tokens = sum(lengths)
    q = torch.randn(tokens, 1, 4, 16, requires_grad=True)
    k, v = (torch.randn(tokens, 1, kv_heads, 16, requires_grad=True) for _ in range(2))
    packed = PackedSequences(layout=PackLayout.of(lengths))
    out = PackedAttention(CONFIG)(q, k, v, None, packed_seq_params=packed)
    expected = reference(q, k, v, lengths)
    assert out.shape == (tokens, 1, 64)
    assert (out.squeeze(1) - expected).abs().max() < 1e-6

    weight = torch.randn(tokens, 64)
    found = torch.autograd.grad((out.squeeze(1) * weight).sum(), (q, k, v))
    wanted = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() < 1e-5


def test_attention_without_a_layout_is_refused():
    x = torch.zeros(3, 1, 4, 16)
    with pytest.raises(ValueError, match="layout of the pack"):
        PackedAttention(CONFIG)(x, x, x, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_transformers_bit_for_bit(dtype):
    own = RMSNorm(config(hidden_size=48, params_dtype=dtype), hidden_size=48, eps=1e-6)
    theirs = Qwen2RMSNorm(48, eps=1e-6).to(dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        weight = torch.randn(48, dtype=dtype)
        own.weight.copy_(weight)
        theirs.weight.copy_(weight)
    x = torch.randn(7, 1, 48, dtype=dtype) * 30
    assert torch.equal(own(x), theirs(x))
