import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaverl.models.log_probs import vocab_parallel_log_probs


def inputs(tokens=13, hidden=8, vocab=50, padded=64, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(tokens, hidden, generator=g, dtype=dtype)
    w = torch.randn(padded, hidden, generator=g, dtype=dtype)
    w[vocab:] = 30.0  # padding that would win every softmax if it entered
    t = torch.randint(0, vocab, (tokens,), generator=g)
    return h.requires_grad_(), w.requires_grad_(), t


def reference(h, w, t, vocab, temperature):
    """Whole-matrix float64 log_softmax with autograd."""
    logp = torch.log_softmax(h.double() @ w.double()[:vocab].T / temperature, dim=-1)
    return logp.gather(1, t[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk", [1, 4, 13, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_values_and_gradients_equal_float64_log_softmax(chunk, temperature):
    h, w, t = inputs()
    got, ent = vocab_parallel_log_probs(
        h, w, t, vocab=50, temperature=temperature, chunk=chunk, with_entropy=True, entropy_grad=True
    )
    want, want_ent = reference(h, w, t, 50, temperature)
    assert got.dtype == ent.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(ent.double(), want_ent, atol=1e-5, rtol=1e-6)

    coefficients = torch.linspace(-1, 2, len(t))
    got_grads = torch.autograd.grad((got * coefficients).sum() + (ent * coefficients.flip(0)).sum(), (h, w))
    want_grads = torch.autograd.grad((want * coefficients).sum() + (want_ent * coefficients.flip(0)).sum(), (h, w))
    for a, b in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)
    assert torch.all(got_grads[1][50:] == 0)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradcheck_by_finite_differences(with_entropy):
    h, w, t = inputs(tokens=5, hidden=3, vocab=7, padded=8, dtype=torch.float64)

    def f(h, w):
        out = vocab_parallel_log_probs(
            h, w, t, vocab=7, temperature=1.3, chunk=2, with_entropy=with_entropy, entropy_grad=True
        )
        return out if with_entropy else out[0]

    assert torch.autograd.gradcheck(f, (h, w))


@pytest.mark.parametrize("chunk", [2, 13])
def test_half_precision_inputs_give_float32_results_and_half_gradients(chunk):
    h, w, t = inputs(dtype=torch.float16)
    logp, ent = vocab_parallel_log_probs(
        h, w, t, vocab=50, temperature=1.0, chunk=chunk, with_entropy=True, entropy_grad=True
    )
    want, want_ent = reference(h, w, t, 50, 1.0)
    assert logp.dtype == ent.dtype == torch.float32
    torch.testing.assert_close(logp.double(), want, atol=1e-2, rtol=0)  # logits of about 8 rounded to half
    got_grads = torch.autograd.grad(logp.sum() + ent.sum(), (h, w))
    want_grads = torch.autograd.grad(want.sum() + want_ent.sum(), (h, w))
    for a, b in zip(got_grads, want_grads, strict=True):
        assert a.dtype == torch.float16
        torch.testing.assert_close(a, b, atol=2e-2, rtol=1e-2)


def test_entropy_without_grad_is_a_constant():
    h, w, t = inputs()
    logp, ent = vocab_parallel_log_probs(h, w, t, vocab=50, temperature=1.0, chunk=4, with_entropy=True)
    assert logp.requires_grad
    assert not ent.requires_grad
    alone, none = vocab_parallel_log_probs(h, w, t, vocab=50, temperature=1.0, chunk=4)
    assert none is None
    assert torch.equal(alone, logp)


def test_only_the_entropy_is_differentiated():
    h, w, t = inputs()
    _, ent = vocab_parallel_log_probs(h, w, t, vocab=50, temperature=1.0, chunk=4, with_entropy=True, entropy_grad=True)
    _, want = reference(h, w, t, 50, 1.0)
    torch.testing.assert_close(
        torch.autograd.grad(ent.sum(), h)[0], torch.autograd.grad(want.sum(), h)[0], atol=1e-5, rtol=1e-5
    )


def test_a_frozen_weight_gets_no_gradient():
    h, w, t = inputs()
    logp, _ = vocab_parallel_log_probs(h, w.detach(), t, vocab=50, temperature=1.0, chunk=4)
    want, _ = reference(h, w, t, 50, 1.0)
    logp.sum().backward()
    torch.testing.assert_close(h.grad, torch.autograd.grad(want.sum(), h)[0], atol=1e-5, rtol=1e-5)


def test_large_logits_stay_finite():
    h, w, t = inputs()
    h = (h.detach() * 1e4).requires_grad_()
    logp, ent = vocab_parallel_log_probs(
        h, w, t, vocab=50, temperature=1.0, chunk=4, with_entropy=True, entropy_grad=True
    )
    (logp.sum() + ent.sum()).backward()
    for x in (logp, ent, h.grad):
        assert torch.isfinite(x).all()


def test_no_tokens():
    h, w, t = inputs(tokens=0)
    logp, ent = vocab_parallel_log_probs(h, w, t, vocab=50, temperature=1.0, chunk=4, with_entropy=True)
    assert logp.shape == ent.shape == (0,)
    logp.sum().backward()
    assert h.grad.shape == (0, 8)
    assert torch.all(w.grad == 0)


class Recorder(TorchDispatchMode):
    """Largest tensor that any operation returns, and the bytes of logits-sized tensors."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return out


def largest(tokens, chunk):
    h, w, t = inputs(tokens=tokens, hidden=4, vocab=1000, padded=1024)
    with Recorder() as seen:
        logp, ent = vocab_parallel_log_probs(
            h, w, t, vocab=1000, temperature=1.0, chunk=chunk, with_entropy=True, entropy_grad=True
        )
        (logp.sum() + ent.sum()).backward()
    return seen.largest


def test_largest_tensor_is_one_chunk_of_logits():
    assert largest(tokens=64, chunk=8) == 8 * 1000
    assert largest(tokens=512, chunk=8) == 8 * 1000
    assert largest(tokens=512, chunk=512) == 512 * 1000  # the recorder does see whole logits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.tensor([50] * 13)}, "outside the vocabulary of 50"),
        ({"targets": torch.tensor([-1] * 13)}, "outside the vocabulary of 50"),
        ({"targets": torch.tensor([0] * 12)}, "do not match the 13 tokens"),
        ({"vocab": 65}, "vocabulary of 65 does not fit"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"chunk": 0}, "chunk at least 1"),
        ({"weight": torch.zeros(64, 8, dtype=torch.float64)}, "hidden is torch.float32 and weight torch.float64"),
        ({"weight": torch.zeros(64, 9)}, "do not fit together"),
    ],
)
def test_misuse_is_refused(change, message):
    h, w, t = inputs()
    call = {"hidden": h, "weight": w, "targets": t, "vocab": 50, "temperature": 1.0, "chunk": 4} | change
    with pytest.raises(ValueError, match=message):
        vocab_parallel_log_probs(**call)
