import pytest
import torch
import torch.distributed as dist

from megaverl.models.log_probs import vocab_parallel_log_probs
from tests.gloo.launch import run_ranks

TOKENS, HIDDEN = 11, 6
ENTROPY = {"with_entropy": True, "entropy_grad": True}


def whole(vocab, padded):
    g = torch.Generator().manual_seed(3)
    h = torch.randn(TOKENS, HIDDEN, generator=g)
    w = torch.randn(padded, HIDDEN, generator=g)
    w[vocab:] = 30.0
    t = torch.randint(0, vocab, (TOKENS,), generator=g)
    t[0], t[1] = 0, vocab - 1
    return h, w, t


def loss(logp, ent):
    c = torch.linspace(-1, 2, TOKENS, dtype=logp.dtype)
    return (logp * c).sum() + (ent * c.flip(0)).sum()


def on_rank(rank, world, vocab, padded):
    h, w, t = whole(vocab, padded)
    rows = padded // world
    h.requires_grad_()
    own = w[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    logp, ent = vocab_parallel_log_probs(
        h,
        own,
        t,
        vocab=vocab,
        temperature=0.8,
        chunk=4,
        tp_group=dist.group.WORLD,
        **ENTROPY,
    )
    loss(logp, ent).backward()
    return [x.detach().numpy() for x in (logp, ent, h.grad, own.grad)]


# 50 of 64: padding on the last rank only; 20 of 64 on 4 ranks: two ranks hold nothing but padding.
@pytest.mark.parametrize(("world", "vocab"), [(2, 50), (4, 20)])
def test_ranks_agree_bit_for_bit_and_equal_float64_log_softmax(world, vocab):
    padded = 64
    results = [[torch.from_numpy(x) for x in r] for r in run_ranks(on_rank, world, vocab, padded)]

    h, w, t = whole(vocab, padded)
    h, w = h.double().requires_grad_(), w.double().requires_grad_()
    every = torch.log_softmax(h @ w[:vocab].T / 0.8, dim=-1)
    logp, ent = every.gather(1, t[:, None])[:, 0], -(every.exp() * every).sum(-1)
    loss(logp, ent).backward()

    for got in results:
        for a, b in zip(got[:3], results[0][:3], strict=True):
            assert torch.equal(a, b)
    for got, want in zip(results[0][:3], (logp, ent, h.grad), strict=True):
        torch.testing.assert_close(got.double(), want.detach(), atol=3e-6, rtol=3e-6)
    torch.testing.assert_close(torch.cat([r[3] for r in results]).double(), w.grad, atol=3e-6, rtol=3e-6)
