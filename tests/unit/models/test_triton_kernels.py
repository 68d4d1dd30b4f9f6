"""The Triton kernels in Triton's interpreter, which runs them on a CPU; `tests/gpu` runs them compiled."""

import importlib.util
import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the compiled kernels in this process", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined, so before the imports below

from megaverl.models import triton_log_probs, triton_rotation, triton_swiglu
from megaverl.models.log_probs import vocab_parallel_log_probs

if not triton_swiglu.triton.knobs.runtime.interpret:
    pytest.skip("Triton was imported before without its interpreter", allow_module_level=True)

TEMPERATURE, VOCAB, PADDED = 1.3, 5000, 5056  # more than one block of columns


@pytest.fixture
def inputs():
    g = torch.Generator().manual_seed(0)
    h = torch.randn(9, 16, generator=g).requires_grad_()
    w = torch.randn(PADDED, 16, generator=g)
    w[VOCAB:] = 30.0  # padding that would win every softmax if it entered
    return h, w.requires_grad_(), torch.randint(0, VOCAB, (9,), generator=g)


@pytest.mark.parametrize("chunk", [4, 100])
@pytest.mark.parametrize("parts", ["both", "log_probs", "entropy"])
def test_fused_log_probs_equal_float64(inputs, chunk, parts):
    h, w, t = inputs
    got, entropy = vocab_parallel_log_probs(
        h, w, t, vocab=VOCAB, temperature=TEMPERATURE, chunk=chunk, with_entropy=True, entropy_grad=True, fused=True
    )
    logp = torch.log_softmax(h.double() @ w.double()[:VOCAB].T / TEMPERATURE, dim=-1)
    want, want_entropy = logp.gather(1, t[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=1e-5, rtol=1e-5)

    scale = torch.linspace(-1, 2, len(t))
    weights = {"both": (1, 1), "log_probs": (1, None), "entropy": (None, 1)}[parts]

    def pick(*values):
        return sum((v * scale).sum() for v, wanted in zip(values, weights, strict=True) if wanted)

    got_grads = torch.autograd.grad(pick(got, entropy), (h, w))
    want_grads = torch.autograd.grad(pick(want, want_entropy), (h, w))
    for x, y in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=1e-5)
    assert torch.all(got_grads[1][VOCAB:] == 0)


def test_the_gradient_of_the_weight_goes_into_main_grad(inputs):
    h, w, t = inputs
    plain = vocab_parallel_log_probs(h, w, t, vocab=VOCAB, temperature=1.0, chunk=4, fused=True)[0].sum()
    (want,) = torch.autograd.grad(plain, w)
    main_grad = torch.full_like(w, 0.5)
    vocab_parallel_log_probs(h, w, t, vocab=VOCAB, temperature=1.0, chunk=4, fused=True, main_grad=main_grad)[
        0
    ].sum().backward()
    assert w.grad is None
    torch.testing.assert_close(main_grad, want + 0.5, atol=1e-5, rtol=1e-5)


def test_targets_of_other_ranks_count_nothing():
    stats = torch.empty(4, 2)
    logits = torch.randn(2, 64)
    triton_log_probs.row_statistics(logits, torch.tensor([-3, 60]), stats, real=50, temperature=1.0)
    assert torch.equal(stats[3], torch.zeros(2))
    torch.testing.assert_close(stats[0], logits[:, :50].amax(1))


def test_swiglu_and_its_gradient_equal_float64():
    g = torch.Generator().manual_seed(1)
    joined = torch.randn(3, 1, 2 * 2500, generator=g).requires_grad_()
    gate, up = joined.double().chunk(2, dim=-1)
    want = torch.nn.functional.silu(gate) * up
    got = triton_swiglu.swiglu(joined)
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-6)
    slope = torch.randn(want.shape, generator=g)
    (got_grad,) = torch.autograd.grad(got, joined, slope)
    (want_grad,) = torch.autograd.grad(want, joined, slope.double())
    torch.testing.assert_close(got_grad, want_grad, atol=1e-6, rtol=1e-5)


def turned(x, cos, sin):
    """Plain rotation of [tokens, 1, heads, d]."""
    low, high = x.chunk(2, dim=-1)
    c, s = cos[:, None, None], sin[:, None, None]
    return torch.cat((low * c - high * s, high * c + low * s), dim=-1)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 16), (7, 1, 12), (14, 2, 64)])
def test_qkv_are_split_and_rotated(heads, kv_heads, head_dim):
    g = torch.Generator().manual_seed(2)
    angles = torch.randn(5, head_dim // 2, generator=g)
    cos, sin = angles.cos(), angles.sin()
    sizes = [n * head_dim for n in (heads, kv_heads, kv_heads)]
    mixed = torch.randn(5, 1, sum(sizes), generator=g).requires_grad_()
    q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in mixed.split(sizes, dim=-1))
    want = (turned(q, cos, sin), turned(k, cos, sin), v)
    got = triton_rotation.split_rotated(mixed, (cos, sin), heads, kv_heads)
    for a, b in zip(got, want, strict=True):
        assert a.is_contiguous()
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    slopes = [torch.randn(x.shape, generator=g) for x in want]
    got_grad, want_grad = (torch.autograd.grad(outputs, mixed, slopes, retain_graph=True)[0] for outputs in (got, want))
    torch.testing.assert_close(got_grad, want_grad, atol=1e-6, rtol=1e-6)

    both = triton_rotation.rotated(q, k, (cos, sin))
    for a, b in zip(both, want, strict=False):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    (got_grad,) = torch.autograd.grad(both, mixed, slopes[:2])
    want_grad = torch.cat([want_grad[..., : -sizes[2]], torch.zeros(5, 1, sizes[2])], dim=-1)
    torch.testing.assert_close(got_grad, want_grad, atol=1e-6, rtol=1e-6)
