"""GSPO's and CISPO's losses against plain float64 references; the adaptive KL controller."""

import itertools
import math

import pytest
import torch

from megaverl.algorithms.kl_control import KlController
from megaverl.algorithms.losses import Denominators, actor_loss
from megaverl.algorithms.policy_loss import cispo_loss, gspo_loss
from megaverl.config.schema import ActorConfig, AlgorithmConfig
from megaverl.data.batch import SequenceBatch

LENGTHS = [(2, 4), (1, 1), (3, 0), (2, 9), (1, 6)]  # a fully masked response is among them
LOW, HIGH = 0.1, 0.2


def draw(seed=0, spread=0.4):
    g = torch.Generator().manual_seed(seed)
    batch = SequenceBatch.from_lists([[0] * p for p, _ in LENGTHS], [[0] * r for _, r in LENGTHS])
    old = -torch.rand(batch.tokens.numel(), generator=g, dtype=torch.float64) * 3
    new = old + torch.randn(old.shape, generator=g, dtype=torch.float64) * spread
    advantages = torch.randn(len(batch), generator=g, dtype=torch.float64).repeat_interleave(batch.lengths)
    zero = lambda x: torch.where(batch.response_mask, x, 0.0)  # noqa: E731
    batch.columns = {"old_log_probs": zero(old), "advantages": zero(advantages)}
    return batch, zero(new)


def responses(batch):
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        yield [t for t in range(start, end) if batch.response_mask[t]]


def counts_of(batch):
    return Denominators.of(batch.response_lengths.tolist(), 16)


def gspo_reference(batch, new):
    """Mean over sequences of PPO's loss with the sequence's ratio: equation 5 of the paper."""
    old, advantages, terms = batch.columns["old_log_probs"], batch.columns["advantages"], []
    for inside in responses(batch):
        if not inside:
            terms.append(torch.zeros((), dtype=torch.float64))
            continue
        ratio = (sum(new[t] - old[t] for t in inside) / len(inside)).exp()
        a = advantages[inside[0]]
        terms.append(-torch.minimum(ratio * a, ratio.clamp(1 - LOW, 1 + HIGH) * a))
    return sum(terms) / len(terms)


@pytest.mark.parametrize("seed", range(4))
def test_gspo_has_value_and_gradient_of_the_sequence_form(seed):
    batch, new = draw(seed)
    config = ActorConfig(
        policy_loss="gspo", loss_aggregation="seq-mean-token-mean", clip_ratio_low=LOW, clip_ratio_high=HIGH
    )
    mine, theirs = new.clone().requires_grad_(), new.clone().requires_grad_()
    loss, _ = actor_loss(config, batch, mine, None, counts_of(batch))
    expected = gspo_reference(batch, theirs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-15)


def test_gspo_clips_whole_responses():
    batch, new = draw(1)
    old, advantages = batch.columns["old_log_probs"], batch.columns["advantages"]
    clip = {"clip_ratio_low": LOW, "clip_ratio_high": HIGH}
    found = gspo_loss(new, old, advantages, batch.response_mask, batch.cu_seqlens, **clip)
    clipped = [found.clipped[inside].tolist() for inside in responses(batch) if inside]
    assert all(len(set(of_response)) == 1 for of_response in clipped)
    assert any(of_response[0] for of_response in clipped)


@pytest.mark.parametrize("seed", range(3))
def test_cispo_keeps_the_gradient_of_clipped_tokens(seed):
    batch, new = draw(seed, spread=0.8)
    old, advantages = batch.columns["old_log_probs"], batch.columns["advantages"]
    new.requires_grad_()
    found = cispo_loss(new, old, advantages, clip_ratio_low=1.0, clip_ratio_high=HIGH)
    found.loss.sum().backward()
    for t in batch.response_mask.nonzero().flatten().tolist():
        weight = min(math.exp(new[t].item() - old[t].item()), 1 + HIGH)
        assert found.loss[t].item() == pytest.approx(-weight * advantages[t].item() * new[t].item(), rel=1e-12)
        assert new.grad[t].item() == pytest.approx(-weight * advantages[t].item(), rel=1e-12)
    assert found.clipped.any()
    assert (new.grad[found.clipped] != 0).all()


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
def test_extreme_and_fully_masked_responses_stay_finite(kind):
    batch, new = draw(0)
    extreme = torch.where(batch.response_mask, new * 400, float("nan")).requires_grad_()
    loss, sums = actor_loss(ActorConfig(policy_loss=kind), batch, extreme, None, counts_of(batch))
    loss.backward()
    assert math.isfinite(loss.item())
    assert torch.isfinite(extreme.grad).all()
    assert all(torch.isfinite(value) for value in sums.values())


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
def test_on_policy_all_losses_have_the_policy_gradient(kind):
    batch, new = draw(2)
    del batch.columns["old_log_probs"]
    mine, counts = new.clone().requires_grad_(), counts_of(batch)
    actor_loss(ActorConfig(policy_loss=kind), batch, mine, None, counts)[0].backward()
    torch.testing.assert_close(mine.grad, -batch.columns["advantages"] / counts.tokens)


def test_importance_weights_scale_the_loss_of_tokens():
    batch, new = draw(3)
    rollout = batch.columns["old_log_probs"] + 0.2
    batch.columns["rollout_log_probs"] = torch.where(batch.response_mask, rollout, float("nan"))
    counts, correction = counts_of(batch), {"importance": "token", "threshold": 1.0}
    plain = actor_loss(ActorConfig(), batch, new, None, counts)[0]
    weighted = actor_loss(ActorConfig(rollout_correction=correction), batch, new, None, counts)[0]
    assert weighted.item() == pytest.approx(plain.item() * math.exp(-0.2), rel=1e-12)
    nothing = actor_loss(ActorConfig(rollout_correction={"mask": "token", "mask_upper": 1.1}), batch, new, None, counts)
    assert nothing[0].item() == 0.0
    del batch.columns["rollout_log_probs"]
    with pytest.raises(ValueError, match="no column rollout_log_probs"):
        actor_loss(ActorConfig(rollout_correction=correction), batch, new, None, counts)


def test_the_kl_weight_follows_the_kl():
    adaptive = KlController.of(AlgorithmConfig(kl_coef=0.1, kl_controller="adaptive", kl_target=0.5, kl_horizon=100))
    for kl, error in ((5.0, 0.2), (0.0, -0.2), (0.55, 0.1)):
        adaptive.coef = 0.1
        adaptive.update(kl, 10)
        assert adaptive.coef == pytest.approx(0.1 * (1 + error * 10 / 100))
    adaptive.update(0.0, 10**9)
    assert adaptive.coef == 0.0
    fixed = KlController.of(AlgorithmConfig(kl_coef=0.1))
    fixed.update(5.0, 10)
    assert fixed.coef == 0.1
