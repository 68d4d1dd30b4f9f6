"""Preference losses against formulas in float64 written here anew, finite differences, and however cut."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from megaverl.algorithms.losses import add_sums, finish_metrics
from megaverl.algorithms.preference import (
    PREFERRED,
    PreferenceCounts,
    answer_sums,
    bradley_terry_loss,
    dpo_loss,
    dpo_loss_fn,
    kto_baseline,
    kto_loss,
    kto_loss_fn,
    score_loss_fn,
)
from megaverl.config.schema import PreferenceConfig
from megaverl.data.batch import UNIT, SequenceBatch

# chosen and rejected values of pairs: near-equal, equal, one outlier either way
CHOSEN = [0.3, 1.00001, -2.0, 0.0, 60.0, -60.0]
REJECTED = [-0.4, 1.0, -2.0, 0.0, -900.0, 900.0]
LENGTHS = [(3, 5), (3, 2), (1, 9), (1, 1), (6, 4), (6, 30), (2, 7), (2, 8)]  # (prompt, answer), pairs side by side


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return math.exp(log_sigmoid(x))


def reference_dpo(d: float, kind: str, beta: float, e: float) -> float:
    x = beta * d
    if kind == "ipo":
        return (d - 0.5 / beta) ** 2
    if kind == "robust":
        return ((1 - e) * -log_sigmoid(x) + e * log_sigmoid(-x)) / (1 - 2 * e)
    return (1 - e) * -log_sigmoid(x) + e * -log_sigmoid(-x)


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(CHOSEN, dtype=torch.float64), torch.tensor(REJECTED, dtype=torch.float64)


def pairs_batch(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[SequenceBatch, torch.Tensor]:
    """Ragged pairs with reference log-probabilities, and log-probabilities of the policy; NaN outside the answers."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(0, 50, (n,), generator=g).tolist()  # noqa: E731
    batch = SequenceBatch.from_lists([draw(p) for p, _ in LENGTHS], [draw(r) for _, r in LENGTHS])
    tokens = batch.tokens.numel()
    nowhere = torch.full((tokens,), math.nan, dtype=dtype)
    made = [-torch.rand(tokens, generator=g, dtype=torch.float64).to(dtype) * 3 for _ in range(2)]
    policy, batch.columns["ref_log_probs"] = (torch.where(batch.response_mask, values, nowhere) for values in made)
    batch.per_sequence = {
        UNIT: torch.arange(len(batch)) // 2,
        PREFERRED: torch.tensor([1, 0] * (len(batch) // 2)),
    }
    return batch, policy


def counts(batch: SequenceBatch, baseline: float = 0.0, *, judged: bool = False) -> PreferenceCounts:
    chosen = int(batch.per_sequence[PREFERRED].sum())
    lengths = batch.response_lengths.tolist()
    units = len(lengths) if judged else len(lengths) // 2
    return PreferenceCounts(sum(lengths), len(lengths), 64, units, chosen, len(lengths) - chosen, baseline)


def ratios_of(batch: SequenceBatch, policy: torch.Tensor) -> list[float]:
    """Summed log-ratio of each sequence, by plain loops."""
    starts, found = batch.cu_seqlens.tolist(), []
    for start, end in itertools.pairwise(starts):
        inside = [t for t in range(start, end) if batch.response_mask[t]]
        found.append(math.fsum(float(policy[t]) - float(batch.columns["ref_log_probs"][t]) for t in inside))
    return found


@pytest.mark.parametrize("kind", ["sigmoid", "robust", "ipo"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_is_its_formula(kind, smoothing):
    found = dpo_loss(*tensors(), beta=0.3, kind=kind, label_smoothing=smoothing)
    expected = [reference_dpo(c - r, kind, 0.3, smoothing) for c, r in zip(CHOSEN, REJECTED)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert torch.isfinite(found).all()


def test_an_unknown_loss_is_refused():
    with pytest.raises(ValueError, match="hinge"):
        dpo_loss(*tensors(), beta=0.1, kind="hinge")


@pytest.mark.parametrize(("smoothing", "center"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01)])
def test_bradley_terry_is_its_formula(smoothing, center):
    found = bradley_terry_loss(*tensors(), label_smoothing=smoothing, center=center)
    expected = [
        -(1 - smoothing) * log_sigmoid(c - r) - smoothing * log_sigmoid(r - c) + center * (c + r) ** 2
        for c, r in zip(CHOSEN, REJECTED)
    ]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_kto_is_its_formula():
    ratios = [*CHOSEN, *REJECTED]
    wanted = [True, False] * len(CHOSEN)
    found = kto_loss(
        torch.tensor(ratios, dtype=torch.float64),
        torch.tensor(wanted),
        baseline=0.7,
        beta=0.2,
        desirable_weight=1.3,
        undesirable_weight=0.6,
    )
    expected = [
        1.3 * (1 - sigmoid(0.2 * (r - 0.7))) if w else 0.6 * (1 - sigmoid(0.2 * (0.7 - r)))
        for r, w in zip(ratios, wanted)
    ]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)


def test_the_baseline_of_kto_is_a_mean_and_never_negative():
    assert kto_baseline(torch.tensor([1.0, 3.0])) == 2.0
    assert kto_baseline(torch.tensor([1.0, -3.0])) == 0.0


@pytest.mark.parametrize(
    "loss",
    [
        lambda c, r: dpo_loss(c, r, beta=0.3),
        lambda c, r: dpo_loss(c, r, beta=0.3, label_smoothing=0.1),
        lambda c, r: dpo_loss(c, r, beta=0.3, kind="robust", label_smoothing=0.1),
        lambda c, r: dpo_loss(c, r, beta=0.3, kind="ipo"),
        lambda c, r: bradley_terry_loss(c, r, label_smoothing=0.1, center=0.01),
        lambda c, r: kto_loss(torch.cat([c, r]), torch.arange(8) < 4, baseline=0.4, beta=0.3),
    ],
)
def test_gradients_are_finite_differences(loss):
    values = [torch.tensor(part[:4], dtype=torch.float64, requires_grad=True) for part in (CHOSEN, REJECTED)]
    assert torch.autograd.gradcheck(loss, values, eps=1e-6, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "robust"])
def test_dpo_of_a_ragged_batch_is_the_formula(kind):
    batch, policy = pairs_batch()
    config = PreferenceConfig(loss=kind, beta=0.25, label_smoothing=0.1)
    loss, sums = dpo_loss_fn(config, counts(batch))(batch, policy, None)
    ratios = ratios_of(batch, policy)
    compared = [r / length for r, (_, length) in zip(ratios, LENGTHS)] if kind == "ipo" else ratios
    losses = [reference_dpo(c - r, kind, 0.25, 0.1) for c, r in zip(compared[::2], compared[1::2])]
    assert loss.item() == pytest.approx(sum(losses) / 4, rel=1e-12)
    metrics = finish_metrics(sums, counts(batch))
    assert metrics["rewards/chosen"] == pytest.approx(0.25 * sum(ratios[::2]) / 4, rel=1e-12)
    assert metrics["rewards/margins"] == pytest.approx(metrics["rewards/chosen"] - metrics["rewards/rejected"])
    assert metrics["rewards/accuracies"] == sum(c > r for c, r in zip(ratios[::2], ratios[1::2])) / 4


def test_kto_of_a_ragged_batch_is_the_formula():
    batch, policy = pairs_batch(1)
    config = PreferenceConfig(beta=0.25, undesirable_weight=0.5)
    count = counts(batch, 0.3, judged=True)
    loss, sums = kto_loss_fn(config, count)(batch, policy, None)
    ratios = ratios_of(batch, policy)
    wanted = [1 - sigmoid(0.25 * (r - 0.3)) for r in ratios[::2]]
    unwanted = [0.5 * (1 - sigmoid(0.25 * (0.3 - r))) for r in ratios[1::2]]
    assert loss.item() == pytest.approx(sum(wanted + unwanted) / 8, rel=1e-10)
    metrics = finish_metrics(sums, count)
    right = sum(r > 0.3 for r in ratios[::2]) + sum(r <= 0.3 for r in ratios[1::2])
    assert metrics["rewards/accuracies"] == right / 8
    assert metrics["rewards/rejected"] == pytest.approx(0.25 * sum(ratios[1::2]) / 4)


def test_a_mini_batch_of_one_kind_has_no_metric_of_the_other():
    batch, policy = pairs_batch(1)
    wanted = batch.select([0, 2])
    policy = torch.cat([policy[:8], policy[13:23]])
    found = finish_metrics(
        kto_loss_fn(PreferenceConfig(), counts(wanted, judged=True))(wanted, policy, None)[1],
        counts(wanted, judged=True),
    )
    assert "rewards/chosen" in found
    assert not {"rewards/rejected", "rewards/margins", "logps/rejected"} & found.keys()


@pytest.mark.parametrize("algorithm", ["rm", "dpo", "kto"])
def test_loss_gradient_and_metrics_do_not_depend_on_the_cut(algorithm):
    batch, policy = pairs_batch(2)
    scores = torch.linspace(-1, 1, len(batch), dtype=torch.float64)
    config, count = PreferenceConfig(beta=0.5), counts(batch, 0.2, judged=algorithm == "kto")
    make = {"rm": score_loss_fn, "dpo": dpo_loss_fn, "kto": kto_loss_fn}[algorithm]

    def run(cut):
        leaf = (scores if algorithm == "rm" else policy.nan_to_num()).clone().requires_grad_()
        parts, total = [], 0.0
        starts = batch.cu_seqlens.tolist()
        for group in cut:
            micro = batch.select(group)
            own = leaf[group] if algorithm == "rm" else torch.cat([leaf[starts[i] : starts[i + 1]] for i in group])
            loss, sums = make(config, count)(micro, own, *([] if algorithm == "rm" else [None]))
            loss.backward()
            total += loss.item()
            parts.append(sums)
        return total, leaf.grad, finish_metrics(add_sums(parts), count)

    whole = run([list(range(8))])
    for cut in ([[6, 7], [0, 1, 4, 5], [2, 3]], [[2, 3, 0, 1], [4, 5, 6, 7]]):
        loss, gradient, metrics = run(cut)
        assert loss == pytest.approx(whole[0], rel=1e-12)
        torch.testing.assert_close(gradient, whole[1], rtol=1e-12, atol=1e-15)
        assert metrics == pytest.approx(whole[2], rel=1e-12)


@pytest.mark.parametrize("sequences", [[0], [1, 0], [0, 3], [0, 1, 2]])
def test_what_is_no_pair_is_refused(sequences):
    batch, _ = pairs_batch()
    micro = batch.select(sequences)
    with pytest.raises(ValueError, match="directly before"):
        score_loss_fn(PreferenceConfig(), counts(batch))(micro, torch.zeros(len(sequences)))


def test_float32_terms_move_a_sum_by_no_more_than_the_stated_bound():
    batch, exact = pairs_batch(3)
    exact = exact * 7.3
    sums, bound = answer_sums(batch, exact.float()), 2**-24 * answer_sums(batch, exact.abs())
    difference = (sums - answer_sums(batch, exact)).abs()
    assert sums.dtype == torch.float64
    assert (difference <= bound).all()
    assert difference.max() > 0


def test_a_batch_without_reference_is_refused():
    batch, policy = pairs_batch()
    batch.columns.clear()
    with pytest.raises(ValueError, match="ref_log_probs"):
        dpo_loss_fn(PreferenceConfig(), counts(batch))(batch, policy, None)
