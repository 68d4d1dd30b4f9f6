"""Losses against a reference in plain Python floats, and their independence of how a batch is cut."""

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.algorithms.losses import (
    Denominators,
    actor_loss,
    actor_loss_fn,
    add_sums,
    aggregate,
    finish_metrics,
    sft_loss,
    sft_loss_fn,
)
from megaverl.algorithms.policy_loss import ppo_loss
from megaverl.config.schema import ActorConfig
from megaverl.data.batch import SequenceBatch, cumulative
from megaverl.data.packing import balance, micro_batches
from megaverl.errors import RunError

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
NORM = 16
CONFIGS = [
    {},
    {"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coef": 0.05},
    {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5, "use_kl_loss": True, "kl_loss_type": "k2"},
    {"clip_ratio_c": None, "entropy_coef": -0.1},
]


def make_batch(seed=0, old=True, empty=True):
    """Ragged, with empty responses, a response inside the sequence (as in several turns), and NaN outside the mask."""
    rng = random.Random(seed)
    counts = [3, 0, 1, 7, 2, 12, 5, 1, 4, 9] if empty else [3, 1, 7, 2, 12, 5, 4]
    prompts = [[1] * rng.randint(1, 4) for _ in counts]
    batch = SequenceBatch.from_lists(prompts, [[2] * n for n in counts])
    batch.response_mask[batch.cu_seqlens[4 if empty else 3] - 2] = False
    total = batch.tokens.numel()
    gen = torch.Generator().manual_seed(seed)
    draw = lambda scale: torch.randn(total, generator=gen, dtype=torch.float64) * scale  # noqa: E731
    base = -torch.rand(total, generator=gen, dtype=torch.float64) * 3
    names = {"advantages": draw(1.0), "ref_log_probs": base + draw(0.3), "current": base + draw(0.4)}
    if old:
        names["old_log_probs"] = base
    names["entropy"] = draw(1.0).abs()
    batch.columns = {k: torch.where(batch.response_mask, v, float("nan")) for k, v in names.items()}
    return batch


def denominators_of(batch):
    return Denominators.of(batch.response_lengths.tolist(), NORM)


def spans(batch):
    """Response positions of each sequence."""
    starts = batch.cu_seqlens.tolist()
    return [[t for t in range(a, b) if batch.response_mask[t]] for a, b in itertools.pairwise(starts)]


def reference_aggregate(values, sequences, mode):
    per_sequence = [[values[t] for t in s] for s in sequences]
    count = len(per_sequence)
    if mode == "token-mean":
        return math.fsum(v for s in per_sequence for v in s) / max(1, sum(map(len, per_sequence)))
    if mode == "seq-mean-token-mean":
        return math.fsum(math.fsum(s) / len(s) for s in per_sequence if s) / count
    if mode == "seq-mean-token-sum":
        return math.fsum(math.fsum(s) for s in per_sequence) / count
    return math.fsum(math.fsum(s) / NORM for s in per_sequence) / count


def reference_token(current, old, advantage, low, high, c):
    """PPO with two clip ranges and dual clip for one token: loss, clipped, clipped_lower."""
    ratio = math.exp(current - old)
    plain, bounded = -advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high)
    loss = max(plain, bounded)
    lower = c is not None and advantage < 0 and loss > -advantage * c
    return (-advantage * c if lower else loss), bounded > plain, lower


def reference_actor(batch, config):
    cols = {k: v.tolist() for k, v in batch.columns.items()}
    old = cols.get("old_log_probs", cols["current"])
    sequences = spans(batch)
    inside = [t for s in sequences for t in s]
    token = {
        t: reference_token(
            cols["current"][t],
            old[t],
            cols["advantages"][t],
            config.clip_ratio_low,
            config.clip_ratio_high,
            config.clip_ratio_c,
        )
        for t in inside
    }
    mode = config.loss_aggregation
    mean = lambda f: math.fsum(f(t) for t in inside) / len(inside)  # noqa: E731
    metrics = {
        "actor/pg_loss": reference_aggregate({t: token[t][0] for t in inside}, sequences, mode),
        "actor/pg_clipfrac": mean(lambda t: token[t][1]),
        "actor/pg_clipfrac_lower": mean(lambda t: token[t][2]),
        "actor/ppo_kl": mean(lambda t: old[t] - cols["current"][t]),
        "actor/entropy": mean(lambda t: cols["entropy"][t]),
    }
    loss = metrics["actor/pg_loss"] - config.entropy_coef * reference_aggregate(cols["entropy"], sequences, mode)
    if config.use_kl_loss:
        estimate = {
            "low_var_kl": lambda d: min(10.0, math.exp(-d) - 1 + d),
            "k2": lambda d: d * d / 2,
        }[config.kl_loss_type]
        kl = {t: estimate(cols["current"][t] - cols["ref_log_probs"][t]) for t in inside}
        metrics["actor/kl_loss"] = reference_aggregate(kl, sequences, mode)
        loss += config.kl_loss_coef * metrics["actor/kl_loss"]
    return loss, metrics


def run_parts(batch, parts, loss_fn):
    """Loss, gradient [tokens] for log-probs and entropy, and sums when the batch is cut into these parts."""
    current = batch.columns["current"].clone().requires_grad_()
    entropy = batch.columns["entropy"].clone().requires_grad_()
    positions = SequenceBatch(
        batch.tokens, batch.cu_seqlens, batch.response_mask, {"at": torch.arange(batch.tokens.numel())}
    )
    total, sums = 0.0, []
    for part in parts:
        at = positions.select(part).columns["at"]
        loss, part_sums = loss_fn(batch.select(part), current[at], entropy[at])
        loss.backward()
        total += loss.item()
        sums.append(part_sums)
    return total, current.grad, entropy.grad, add_sums(sums)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keys", CONFIGS)
@pytest.mark.parametrize("old", [True, False])
def test_actor_loss_and_metrics_against_the_reference(mode, keys, old):
    batch, config = make_batch(1, old=old), ActorConfig(loss_aggregation=mode, **keys)
    denominators = denominators_of(batch)
    loss, sums = actor_loss(config, batch, batch.columns["current"], batch.columns["entropy"], denominators)
    expected_loss, expected = reference_actor(batch, config)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12)
    assert finish_metrics(sums, denominators) == pytest.approx(expected, rel=1e-12, abs=1e-15)
    if old and not keys:
        assert expected["actor/pg_clipfrac"] > 0, "the case must clip something"
    if old and keys.get("clip_ratio_c") == 1.5:
        assert expected["actor/pg_clipfrac_lower"] > 0, "the case must reach the dual clip"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy_loss", ["ppo", "gspo", "cispo"])
def test_case_22_any_cut_gives_the_same_loss_gradient_and_metrics(mode, policy_loss):
    batch = make_batch(2)
    batch.columns["rollout_log_probs"] = batch.columns["old_log_probs"] + 0.3 * batch.columns["advantages"]
    config = ActorConfig(
        loss_aggregation=mode,
        policy_loss=policy_loss,
        use_kl_loss=True,
        kl_loss_coef=0.2,
        entropy_coef=0.01,
        rollout_correction={"importance": "sequence", "mask": "token", "mask_upper": 1.5},
    )
    denominators = denominators_of(batch)
    loss_fn = actor_loss_fn(config, denominators)
    everything = list(range(len(batch)))
    loss, grad, entropy_grad, sums = run_parts(batch, [everything], loss_fn)
    lengths = batch.lengths.tolist()
    cuts = [[[i] for i in everything], [everything[::-1]], micro_batches(lengths, 20), micro_batches(lengths, 35)]
    for dp in (2, 3, 4):
        shares = balance(lengths, dp)
        cuts.append(shares)
        cuts.append([[s[i] for i in m] for s in shares for m in micro_batches([lengths[i] for i in s], 16)])
    for parts in cuts:
        part_loss, part_grad, part_entropy_grad, part_sums = run_parts(batch, parts, loss_fn)
        assert part_loss == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(part_grad, grad, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(part_entropy_grad, entropy_grad, rtol=1e-12, atol=1e-15)
        assert finish_metrics(part_sums, denominators) == pytest.approx(finish_metrics(sums, denominators), rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keys", CONFIGS)
def test_gradient_by_finite_differences(mode, keys):
    batch, config = make_batch(3), ActorConfig(loss_aggregation=mode, **keys)
    denominators = denominators_of(batch)
    start, entropy = batch.columns["current"], batch.columns["entropy"]
    value = lambda lp, ent: actor_loss(config, batch, lp, ent, denominators)[0]  # noqa: E731
    lp, ent = start.clone().requires_grad_(), entropy.clone().requires_grad_()
    value(lp, ent).backward()
    for t in batch.response_mask.nonzero().flatten().tolist():
        for tensor, grad in ((start, lp.grad), (entropy, ent.grad)):
            step = torch.zeros_like(start)
            step[t] = 1e-6
            up, down = ((tensor + s) for s in (step, -step))
            pair = (
                (value(up, entropy), value(down, entropy))
                if tensor is start
                else (value(start, up), value(start, down))
            )
            numeric = (pair[0] - pair[1]).item() / 2e-6
            got = 0.0 if grad is None else grad[t].item()
            assert got == pytest.approx(numeric, rel=1e-6, abs=1e-8)


def test_values_outside_the_mask_reach_neither_loss_nor_gradient():
    batch = make_batch(4)
    config = ActorConfig(use_kl_loss=True, entropy_coef=0.1)
    results = []
    for poison in (float("nan"), float("inf"), -1e30, 0.0):
        poisoned = {k: torch.where(batch.response_mask, v, poison) for k, v in batch.columns.items()}
        copy = SequenceBatch(batch.tokens, batch.cu_seqlens, batch.response_mask, poisoned)
        results.append(run_parts(copy, [list(range(len(batch)))], actor_loss_fn(config, denominators_of(batch))))
    for loss, grad, entropy_grad, sums in results:
        assert loss == results[-1][0]
        assert torch.equal(grad, results[-1][1])
        assert torch.equal(entropy_grad, results[-1][2])
        assert sums == results[-1][3]
        assert (grad[~batch.response_mask] == 0).all()
        assert torch.isfinite(grad).all()
    assert (results[0][1][batch.response_mask] != 0).any()


def test_first_update_without_old_log_probs_has_ratio_one():
    batch = make_batch(5, old=False)
    config, denominators = ActorConfig(), denominators_of(batch)
    loss, grad, _, sums = run_parts(batch, [list(range(len(batch)))], actor_loss_fn(config, denominators))
    metrics = finish_metrics(sums, denominators)
    assert metrics["actor/ppo_kl"] == 0.0
    assert metrics["actor/pg_clipfrac"] == 0.0
    advantages = torch.where(batch.response_mask, batch.columns["advantages"], 0.0)
    assert loss == pytest.approx(-advantages.sum().item() / denominators.tokens, rel=1e-12)
    # the policy gradient itself: -A / T at every response token
    torch.testing.assert_close(grad, -advantages / denominators.tokens, rtol=1e-12, atol=0)


def test_a_batch_of_empty_responses_has_no_loss():
    batch = SequenceBatch.from_lists([[1, 1], [1]], [[], []], response_columns={"advantages": [[], []]})
    denominators = denominators_of(batch)
    for mode in MODES:
        log_probs = torch.full((3,), float("nan"), requires_grad=True)
        loss, sums = actor_loss(ActorConfig(loss_aggregation=mode), batch, log_probs, None, denominators)
        loss.backward()
        assert loss.item() == 0.0
        assert log_probs.grad.tolist() == [0.0, 0.0, 0.0]
        assert set(finish_metrics(sums, denominators).values()) == {0.0}


def test_float32_agrees_with_float64():
    batch = make_batch(6)
    config, denominators = ActorConfig(use_kl_loss=True, entropy_coef=0.1), denominators_of(batch)
    everything = [list(range(len(batch)))]
    loss, grad, _, _ = run_parts(batch, everything, actor_loss_fn(config, denominators))
    batch.columns = {k: v.float() for k, v in batch.columns.items()}
    loss32, grad32, _, sums32 = run_parts(batch, everything, actor_loss_fn(config, denominators))
    assert grad32.dtype == torch.float32
    assert all(v.dtype == torch.float64 and not v.requires_grad for v in sums32.values())
    assert loss32 == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(grad32.double(), grad, rtol=1e-4, atol=1e-7)


def test_policy_loss_at_hand_made_points():
    # ratios 2, 0.5, 2, 0.5, 10 with A = 1, 1, -1, -1, -1; ranges 0.2 and 0.3; dual clip at 3
    ratios = torch.tensor([2.0, 0.5, 2.0, 0.5, 10.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    old = torch.zeros(5, dtype=torch.float64)
    keys = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
    result = ppo_loss(ratios.log(), old, advantages, **keys, clip_ratio_c=3.0)
    torch.testing.assert_close(result.loss, torch.tensor([-1.3, -0.5, 2.0, 0.8, 3.0], dtype=torch.float64))
    assert result.clipped.tolist() == [True, False, False, True, False]
    assert result.clipped_lower.tolist() == [False, False, False, False, True]
    without = ppo_loss(ratios.log(), old, advantages, **keys)
    torch.testing.assert_close(without.loss[4], torch.tensor(10.0, dtype=torch.float64))
    assert not without.clipped_lower.any()


def test_an_extreme_ratio_stays_finite():
    log_probs = torch.tensor([0.0, -500.0], requires_grad=True)
    result = ppo_loss(log_probs, torch.tensor([-500.0, 0.0]), torch.tensor([-1.0, 1.0]))
    result.loss.sum().backward()
    assert torch.isfinite(result.loss).all()
    assert torch.isfinite(log_probs.grad).all()


@pytest.mark.parametrize("mode", MODES)
def test_aggregate_against_the_reference(mode):
    batch = make_batch(7)
    values = batch.columns["entropy"]
    ours = aggregate(values, batch.response_mask, batch.cu_seqlens, mode, denominators_of(batch))
    assert ours.item() == pytest.approx(reference_aggregate(values.tolist(), spans(batch), mode), rel=1e-13)


def test_modes_at_a_hand_made_point():
    # responses [1, 3] and [5]
    batch = SequenceBatch.from_lists([[0], [0]], [[0, 0], [0]], response_columns={"v": [[1.0, 3.0], [5.0]]})
    denominators = Denominators(tokens=3, sequences=2, norm_length=4)
    got = {
        m: aggregate(batch.columns["v"], batch.response_mask, batch.cu_seqlens, m, denominators).item() for m in MODES
    }
    assert got == {
        "token-mean": 3.0,
        "seq-mean-token-mean": 3.5,
        "seq-mean-token-sum": 4.5,
        "seq-mean-token-sum-norm": 1.125,
    }


def test_an_unknown_mode_is_refused():
    batch = make_batch(0)
    with pytest.raises(ValueError, match="unknown loss aggregation 'mean'"):
        aggregate(batch.columns["entropy"], batch.response_mask, batch.cu_seqlens, "mean", denominators_of(batch))


def test_missing_columns_and_entropy_are_named():
    batch = make_batch(0)
    denominators, current = denominators_of(batch), batch.columns["current"]
    with pytest.raises(ValueError, match="entropy_coef is not 0 and no entropy"):
        actor_loss(ActorConfig(entropy_coef=0.1), batch, current, None, denominators)
    del batch.columns["ref_log_probs"], batch.columns["advantages"]
    with pytest.raises(ValueError, match="no column advantages, ref_log_probs"):
        actor_loss(ActorConfig(use_kl_loss=True), batch, current, None, denominators)


def test_metrics_summed_over_the_wrong_tokens_are_refused():
    batch = make_batch(0)
    denominators = denominators_of(batch)
    _, sums = actor_loss(ActorConfig(), batch, batch.columns["current"], None, denominators)
    with pytest.raises(RunError, match="summed over 86 response tokens, but the mini-batch has 43"):
        finish_metrics(add_sums([sums, sums]), denominators)
    with pytest.raises(ValueError, match="different keys"):
        add_sums([sums, {}])


def test_sft_loss_is_the_mean_negative_log_likelihood_for_any_cut():
    batch = make_batch(8)
    denominators = denominators_of(batch)
    inside = [t for s in spans(batch) for t in s]
    expected = -math.fsum(batch.columns["current"][t].item() for t in inside) / len(inside)
    results = [
        run_parts(batch, parts, sft_loss_fn(denominators))
        if with_entropy
        else run_parts(batch, parts, lambda m, lp, ent: sft_loss(m, lp, None, denominators))
        for with_entropy in (True, False)
        for parts in ([list(range(len(batch)))], micro_batches(batch.lengths.tolist(), 18))
    ]
    for loss, grad, _, sums in results:
        assert loss == pytest.approx(expected, rel=1e-12)
        assert finish_metrics(sums, denominators)["train/loss"] == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(grad, -batch.response_mask.double() / len(inside), rtol=1e-12, atol=0)
    assert "actor/entropy" in results[0][3]
    assert "actor/entropy" not in results[-1][3]


def padded(batch, order, pads):
    """The sequences in another order, each with further tokens outside the response mask behind it; positions kept."""
    pieces, mask, at, lengths = [], [], [], []
    starts = batch.cu_seqlens.tolist()
    for i in order:
        span = torch.arange(starts[i], starts[i + 1])
        pieces.append(torch.cat([batch.tokens[span], torch.zeros(pads[i], dtype=torch.int64)]))
        mask.append(torch.cat([batch.response_mask[span], torch.zeros(pads[i], dtype=torch.bool)]))
        at.append(torch.cat([span, torch.full((pads[i],), -1)]))
        lengths.append(len(span) + pads[i])
    source = torch.cat(at)
    nan = torch.tensor(float("nan"), dtype=torch.float64)
    columns = {name: torch.where(source >= 0, values[source], nan) for name, values in batch.columns.items()}
    return SequenceBatch(torch.cat(pieces), cumulative(lengths), torch.cat(mask), columns), source


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(MODES), st.sampled_from(["ppo", "gspo", "cispo"]))
def test_order_and_padding_change_neither_loss_nor_gradient_nor_metrics(data, mode, policy_loss):
    batch = make_batch(data.draw(st.integers(0, 20)))
    batch.columns["rollout_log_probs"] = batch.columns["old_log_probs"] + 0.3 * batch.columns["advantages"]
    config = ActorConfig(
        loss_aggregation=mode,
        policy_loss=policy_loss,
        use_kl_loss=True,
        rollout_correction={"importance": "token", "mask": "sequence"},
    )
    order = data.draw(st.permutations(range(len(batch))))
    pads = data.draw(st.lists(st.integers(0, 5), min_size=len(batch), max_size=len(batch)))
    other, source = padded(batch, order, pads)
    loss_fn = actor_loss_fn(config, denominators_of(batch))
    loss, grad, _, sums = run_parts(batch, [list(range(len(batch)))], loss_fn)
    cut = data.draw(st.integers(1, len(batch)))
    parts = [list(range(i, min(i + cut, len(batch)))) for i in range(0, len(batch), cut)]
    other_loss, other_grad, _, other_sums = run_parts(other, parts, loss_fn)
    assert other_loss == pytest.approx(loss, rel=1e-12, abs=1e-15)
    assert not other_grad[source < 0].any()
    torch.testing.assert_close(other_grad[source >= 0], grad[source[source >= 0]], rtol=1e-12, atol=1e-15)
    finished = finish_metrics(sums, denominators_of(batch))
    assert finish_metrics(other_sums, denominators_of(batch)) == pytest.approx(finished, rel=1e-12, abs=1e-15)
