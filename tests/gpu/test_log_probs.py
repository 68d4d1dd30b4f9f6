"""Fused log-probabilities on a GPU, at a real vocabulary: numbers against float64, memory against one chunk."""

import pytest
import torch

from megaverl.models.log_probs import vocab_parallel_log_probs
from megaverl.parallel.device import SHORT
from tests.gpu.support import device_with, error

VOCAB, PADDED, HIDDEN = 151643, 151680, 256


@pytest.fixture(scope="module")
def inputs():
    device_with("flash")
    g = torch.Generator("cuda").manual_seed(0)
    h = torch.randn(600, HIDDEN, generator=g, device="cuda").to(SHORT)
    w = torch.randn(PADDED, HIDDEN, generator=g, device="cuda").mul(0.15).to(SHORT)
    w[VOCAB:] = 3.0  # padding that would win every softmax if it entered
    return h, w, torch.randint(0, VOCAB, (600,), generator=g, device="cuda")


def run(h, w, t, **more):
    h, w = h.clone().requires_grad_(), w.clone().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(
        h, w, t, vocab=VOCAB, temperature=0.8, with_entropy=True, entropy_grad=True, fused=True, **more
    )
    weights = torch.linspace(-1, 2, len(t), device="cuda")
    ((log_probs * weights).sum() + (entropy * weights.flip(0)).sum()).backward()
    return log_probs, entropy, h.grad, w.grad


@pytest.mark.parametrize("chunk", [None, 128, 250])
def test_numbers_equal_float64(inputs, chunk):
    h, w, t = inputs
    main_grad = torch.zeros(PADDED, HIDDEN, device="cuda")
    log_probs, entropy, grad_h, grad_w = run(h, w, t, chunk=chunk, main_grad=main_grad)
    assert grad_w is None
    want = run_in_float64(h, w, t)
    torch.testing.assert_close(log_probs.double(), want[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(entropy.double(), want[1], atol=1e-4, rtol=0)
    assert error(grad_h, want[2]) < 5e-3
    assert error(main_grad, want[3]) < 5e-3
    assert torch.all(main_grad[VOCAB:] == 0)


def run_in_float64(h, w, t):
    h, w = h.double().requires_grad_(), w.double().requires_grad_()
    logp = torch.log_softmax(h @ w[:VOCAB].T / 0.8, dim=-1)
    log_probs, entropy = logp.gather(1, t[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    weights = torch.linspace(-1, 2, len(t), device="cuda")
    ((log_probs * weights).sum() + (entropy * weights.flip(0)).sum()).backward()
    return log_probs.detach(), entropy.detach(), h.grad, w.grad


def test_memory_is_that_of_one_chunk(inputs):
    h, w, _ = inputs
    h, chunk = h.repeat(20, 1), 256
    t = torch.randint(0, VOCAB, (len(h),), device="cuda")
    main_grad = torch.zeros(PADDED, HIDDEN, device="cuda")
    run(h, w, t, chunk=chunk, main_grad=main_grad)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(h, w, t, chunk=chunk, main_grad=main_grad)
    peak = torch.cuda.max_memory_allocated() - before
    one_chunk = chunk * PADDED * (4 + 2)
    inputs_and_gradients = 4 * h.numel() * 2 + 2 * w.numel() * 2
    assert peak < 1.1 * one_chunk + inputs_and_gradients
    assert peak < len(h) * VOCAB  # less than a byte per logit


def test_a_target_outside_the_vocabulary_is_noticed_on_the_cpu():
    with pytest.raises(ValueError, match="outside the vocabulary"):
        vocab_parallel_log_probs(
            torch.zeros(1, 4), torch.zeros(8, 4), torch.tensor([8]), vocab=8, temperature=1.0, chunk=1
        )
