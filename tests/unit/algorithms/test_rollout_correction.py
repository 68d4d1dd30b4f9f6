"""Importance correction and its metrics against plain Python floats, for every cut."""

import itertools
import math
import random
import statistics

import pytest
import torch

from megaverl.algorithms.moments import merge_moments
from megaverl.algorithms.rollout_correction import correction_weights, finish_mismatch, mismatch_moments
from megaverl.config.schema import RolloutCorrectionConfig
from megaverl.data.batch import SequenceBatch

EVERYTHING = RolloutCorrectionConfig(importance="token", threshold=1.3, mask="token", mask_upper=1.5, veto=0.3)


def draw(seed=0):
    rng = random.Random(seed)
    counts = [3, 0, 1, 7, 2, 0, 5, 1, 4]
    batch = SequenceBatch.from_lists([[1] * rng.randint(1, 4) for _ in counts], [[2] * n for n in counts])
    g = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(batch.tokens.numel(), generator=g, dtype=torch.float64) * 3
    training = rollout + torch.randn(rollout.shape, generator=g, dtype=torch.float64) * 0.4
    nan = torch.tensor(math.nan, dtype=torch.float64)
    mask = batch.response_mask
    batch.columns = {"rollout": torch.where(mask, rollout, nan), "training": torch.where(mask, training, nan)}
    return batch


def responses(batch):
    """log rho of the response tokens of every sequence, by position."""
    rho = batch.columns["training"] - batch.columns["rollout"]
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        yield {t: rho[t].item() for t in range(start, end) if batch.response_mask[t]}


def reference_weights(config, batch):
    weights = [1.0] * batch.tokens.numel()
    lower = 1 / config.mask_upper if config.mask_lower is None else config.mask_lower
    for inside in responses(batch):
        total = math.fsum(inside.values())
        for t, log_rho in inside.items():
            weight = {"none": 1.0, "token": math.exp(log_rho), "sequence": math.exp(total)}[config.importance]
            if config.importance != "none":
                weight = min(weight, config.threshold)
            by = {"none": 0.0, "token": log_rho, "sequence": total, "geometric": total / len(inside)}[config.mask]
            if config.mask != "none" and not lower <= math.exp(by) <= config.mask_upper:
                weight = 0.0
            if config.veto is not None and min(math.exp(x) for x in inside.values()) < config.veto:
                weight = 0.0
            weights[t] = weight
    return weights


@pytest.mark.parametrize("importance", ["none", "token", "sequence"])
@pytest.mark.parametrize("mask", ["none", "token", "sequence", "geometric"])
@pytest.mark.parametrize("more", [{}, {"veto": 0.6}, {"mask_lower": 0.0, "threshold": 1.1}])
def test_weights_against_the_definition(importance, mask, more):
    config = RolloutCorrectionConfig(importance=importance, mask=mask, mask_upper=1.2, **more)
    batch = draw(3)
    ours = correction_weights(
        config, batch.columns["training"], batch.columns["rollout"], batch.response_mask, batch.cu_seqlens
    )
    assert ours.tolist() == pytest.approx(reference_weights(config, batch), rel=1e-12)
    assert not ours.requires_grad
    if config.masks:
        assert 0 < (ours == 0).sum() < batch.response_mask.sum()


def measure(batch, config=EVERYTHING):
    columns = batch.columns
    return mismatch_moments(config, columns["rollout"], columns["training"], batch.response_mask, batch.cu_seqlens)


def test_metrics_against_plain_floats():
    batch = draw(1)
    ours = finish_mismatch(measure(batch))
    rollout, training = batch.columns["rollout"].tolist(), batch.columns["training"].tolist()
    sequences = [inside for inside in responses(batch) if inside]
    inside = [t for s in sequences for t in s]
    rho = {t: training[t] - rollout[t] for t in inside}
    mean = lambda f: statistics.fmean(f(t) for t in inside)  # noqa: E731
    ppl = lambda column, s: math.exp(-statistics.fmean(column[t] for t in s))  # noqa: E731
    log_gap = [statistics.fmean(-rho[t] for t in s) for s in sequences]
    weights = [math.exp(rho[t]) for t in inside]
    bounded = [min(max(w, 1 / 1.3), 1.3) for w in weights]
    kept = reference_weights(EVERYTHING, batch)
    expected = {
        "training/rollout_probs_diff_mean": mean(lambda t: abs(math.exp(rollout[t]) - math.exp(training[t]))),
        "training/rollout_log_probs_diff_max": max(abs(rho[t]) for t in inside),
        "training/rollout_actor_probs_pearson_corr": statistics.correlation(
            [math.exp(rollout[t]) for t in inside], [math.exp(training[t]) for t in inside]
        ),
        "rollout_corr/kl": mean(lambda t: -rho[t]),
        "rollout_corr/k3_kl": mean(lambda t: math.exp(rho[t]) - rho[t] - 1),
        "rollout_corr/chi2_token": mean(lambda t: math.exp(rho[t]) ** 2) - 1,
        "rollout_corr/chi2_seq": statistics.fmean(math.exp(sum(rho[t] for t in s)) ** 2 for s in sequences) - 1,
        "rollout_corr/training_ppl": statistics.fmean(ppl(training, s) for s in sequences),
        "rollout_corr/rollout_ppl": statistics.fmean(ppl(rollout, s) for s in sequences),
        "rollout_corr/log_ppl_diff": statistics.fmean(log_gap),
        "rollout_corr/log_ppl_diff_max": max(log_gap),
        "rollout_corr/log_ppl_abs_diff": statistics.fmean(map(abs, log_gap)),
        "rollout_corr/ppl_ratio": statistics.fmean(map(math.exp, log_gap)),
        "rollout_corr/rollout_is_mean": statistics.fmean(min(w, 1.3) for w in weights),
        "rollout_corr/rollout_is_std": statistics.stdev(bounded),
        "rollout_corr/rollout_is_max": max(weights),
        "rollout_corr/rollout_is_min": min(weights),
        "rollout_corr/rollout_is_ratio_fraction_high": statistics.fmean(w > 1.3 for w in weights),
        "rollout_corr/rollout_is_ratio_fraction_low": statistics.fmean(w < 1 / 1.3 for w in weights),
        "rollout_corr/rollout_is_eff_sample_size": statistics.fmean(bounded) ** 2
        / statistics.fmean(b * b for b in bounded),
        "rollout_corr/rollout_rs_masked_fraction": statistics.fmean(kept[t] == 0 for t in inside),
        "rollout_corr/rollout_rs_seq_masked_fraction": statistics.fmean(
            all(kept[t] == 0 for t in s) for s in sequences
        ),
    }
    for name, value in expected.items():
        assert ours[name] == pytest.approx(value, rel=1e-9), name


@pytest.mark.parametrize("importance", ["token", "sequence"])
def test_metrics_do_not_depend_on_the_cut(importance):
    batch, config = draw(2), RolloutCorrectionConfig(importance=importance, mask="geometric", mask_upper=1.1)
    whole = finish_mismatch(measure(batch, config))
    for cut in ([[8, 3], [0, 2], [1], [4, 5, 6, 7]], [[i] for i in range(9)], [[7, 6, 5], [4, 3, 2, 1, 0, 8]]):
        parts = finish_mismatch(merge_moments([measure(batch.select(part), config) for part in cut]))
        assert parts == pytest.approx(whole, rel=1e-9)


def test_equal_models_have_no_mismatch():
    batch = draw(0)
    batch.columns["training"] = batch.columns["rollout"]
    metrics = finish_mismatch(measure(batch))
    zero = ["kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_abs_diff", "rollout_rs_masked_fraction"]
    assert {metrics[f"rollout_corr/{name}"] for name in zero} == {0.0}
    assert metrics["rollout_corr/rollout_is_mean"] == metrics["rollout_corr/rollout_is_eff_sample_size"] == 1.0
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)


def test_extreme_ratios_stay_finite():
    batch = draw(0)
    batch.columns["training"] = batch.columns["rollout"] * 200
    for importance in ("token", "sequence"):
        metrics = finish_mismatch(measure(batch, RolloutCorrectionConfig(importance=importance)))
        assert all(map(math.isfinite, metrics.values())), metrics


def test_no_response_tokens_give_no_metrics():
    empty = SequenceBatch.from_lists([[1, 1]], [[]])
    empty.columns = {"rollout": torch.zeros(2), "training": torch.zeros(2)}
    assert finish_mismatch(measure(empty)) == {}
    assert finish_mismatch({}) == {}
