"""The critic on Megatron: values and gradients against transformers in every layout, updates, where it starts from."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification, Qwen2ForTokenClassification

from megaverl.algorithms.losses import Denominators
from megaverl.algorithms.value_loss import critic_loss, critic_loss_fn
from megaverl.checkpoint.critic import export_critic
from megaverl.checkpoint.hf_export import ModelRanks
from megaverl.config.schema import CriticConfig, OptimizerConfig
from megaverl.models.critic_map import critic_source
from megaverl.parallel.layout import Layout
from tests.gloo.critic_support import (
    hf_values,
    make_critic,
    make_critic_hf,
    make_reward_hf,
    read_critic,
    value_batch,
)
from tests.gloo.launch import RankError, run_ranks
from tests.gloo.policy_support import RAGGED, join, make_batch, make_hf, share_of

LAYOUTS = [
    (Layout(), False),
    (Layout(tp=2), False),
    (Layout(tp=2), True),
    (Layout(pp=2), False),
    (Layout(tp=2, pp=2), True),
    (Layout(tp=2, dp=2), True),
    (Layout(tp=4), True),  # two KV heads, each on two ranks
    (Layout(pp=3), False),  # four layers: 2, 1, 1 or so
    (Layout(pp=2, vpp=2), False),
]
LAYERS = 4
REPLICATED = OptimizerConfig(lr=0.0, clip_grad=0.0, distributed=False)  # whole gradients stay on every rank
CONFIG = CriticConfig()
COUNTS = Denominators.of([r for _, r in RAGGED], 64)


def relative(found, reference) -> float:
    """Largest difference, as a share of the largest reference value."""
    return float(abs(found - reference).max() / abs(reference).max())


def _values(rank, world, folder, layout, sequence_parallel):
    join(rank, world, layout)
    critic = make_critic(folder, layout, sequence_parallel=sequence_parallel)
    runs = [critic.values(make_batch(RAGGED), max_tokens=limit) for limit in (10_000, 60)]
    return [run.numpy() for run in runs]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("layout", "sequence_parallel"), LAYOUTS, ids=str)
def test_values_equal_transformers_however_cut(tmp_path, tied, layout, sequence_parallel):
    model = make_critic_hf(tmp_path, tied=tied, layers=LAYERS)
    with torch.no_grad():
        expected = hf_values(model, make_batch(RAGGED)).numpy()
    for runs in run_ranks(_values, layout.world, str(tmp_path), layout, sequence_parallel):
        for found in runs:
            assert found.dtype == np.float32
            assert abs(found - expected).max() < 1e-5
    assert abs(expected).max() > 0.5  # the comparison would be empty with values near 0


def _gradients(rank, world, folder, layout, sequence_parallel, expected, parts):
    join(rank, world, layout)
    critic = make_critic(folder, layout, optimizer=REPLICATED, sequence_parallel=sequence_parallel)
    share = share_of(value_batch(), critic)
    mine = parts[critic.grid.at.dp % len(parts)]
    cut = [list(range(i, len(share), mine)) for i in range(mine)]
    result = critic.update(share, cut, critic_loss_fn(CONFIG, COUNTS))
    params = critic.parameters_by_name()
    reference = {name: torch.zeros_like(p) for name, p in params.items()}
    read_critic(critic, expected, reference)
    found = {name: p.main_grad.numpy().copy() for name, p in params.items()}
    sums = {name: value.item() for name, value in result.sums.items()}
    return found, {name: value.numpy() for name, value in reference.items()}, result.grad_norm, sums


def save_hf_gradients(model: Qwen2ForTokenClassification, folder: Path) -> float:
    """Saves a checkpoint whose tensors are the gradients of the critic's loss; returns the gradient's norm."""
    batch = value_batch()
    critic_loss(CONFIG, batch, hf_values(model, batch), COUNTS)[0].backward()
    with torch.no_grad():
        norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters())).item()
        for p in model.parameters():
            p.copy_(p.grad)
    model.save_pretrained(folder)
    return norm


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("layout", "sequence_parallel"), LAYOUTS, ids=str)
def test_gradients_of_all_parameters_equal_transformers(tmp_path, tied, layout, sequence_parallel):
    model = make_critic_hf(tmp_path / "model", tied=tied, layers=LAYERS)
    norm = save_hf_gradients(model, tmp_path / "gradients")
    args = (str(tmp_path / "model"), layout, sequence_parallel, str(tmp_path / "gradients"), [2])
    names = set()
    for found, reference, found_norm, _ in run_ranks(_gradients, layout.world, *args):
        assert found_norm == pytest.approx(norm, rel=1e-5)
        names |= reference.keys()
        for name in reference:
            assert relative(found[name], reference[name]) < 1e-5, name
    assert {"value_head.weight", "value_head.bias", "embedding.word_embeddings.weight"} <= names
    assert "output_layer.weight" not in names


def test_gradient_and_sums_do_not_depend_on_micro_batches_or_data_parallel_size(tmp_path):
    make_critic_hf(tmp_path, tied=True)
    base = None
    for dp, parts in ((1, [1]), (1, [4]), (2, [1]), (2, [3, 1])):
        args = (str(tmp_path), Layout(dp=dp), False, str(tmp_path), parts)
        ranks = run_ranks(_gradients, dp, *args)
        total = {name: sum(sums[name] for *_, sums in ranks) for name in ranks[0][3]}
        base = base or (*ranks[0], total)
        assert total == pytest.approx(base[4], rel=1e-6)
        for found, _, norm, _ in ranks:
            assert norm == pytest.approx(base[2], rel=1e-6)
            assert all(relative(found[name], base[0][name]) < 1e-6 for name in found)


def _trained(rank, world, folder, layout, sequence_parallel):
    join(rank, world, layout)
    config = OptimizerConfig(lr=0.02, eps=1e-2, clip_grad=0.5, weight_decay=0.1)
    critic = make_critic(folder, layout, optimizer=config, sequence_parallel=sequence_parallel)
    for seed in range(3):
        share = share_of(value_batch(seed), critic)
        critic.update(share, [list(range(len(share)))], critic_loss_fn(CONFIG, COUNTS))
    return {n: p.detach().numpy().copy() for n, p in critic.parameters_by_name().items() if n.startswith("value_head")}


@pytest.mark.parametrize(("layout", "sequence_parallel"), LAYOUTS[1:], ids=str)
def test_all_ranks_keep_the_same_head_and_it_is_that_of_one_rank(tmp_path, layout, sequence_parallel):
    make_critic_hf(tmp_path, tied=True, layers=LAYERS)
    (alone,) = run_ranks(_trained, 1, str(tmp_path), Layout(), False)
    heads = [h for h in run_ranks(_trained, layout.world, str(tmp_path), layout, sequence_parallel) if h]
    assert len(heads) == layout.world // layout.pp
    for head in heads:
        for name, value in head.items():
            assert np.array_equal(value, heads[0][name])
            assert abs(value - alone[name]).max() < 2e-6


def _saved_and_loaded(rank, world, folder):
    join(rank, world, Layout(dp=2))
    critic, again = (make_critic(folder, Layout(dp=2), optimizer=OptimizerConfig(lr=0.01)) for _ in range(2))
    step = lambda model, seed: model.update(  # noqa: E731
        share_of(value_batch(seed), model), [[0, 1, 2, 3]], critic_loss_fn(CONFIG, COUNTS)
    )
    step(critic, 0)
    with torch.no_grad():
        for name, parameter in again.parameters_by_name().items():
            parameter.copy_(critic.parameters_by_name()[name])
    again.load_state_dict(copy.deepcopy(critic.state_dict()))  # it is not a copy itself
    for model in (critic, again):
        step(model, 1)
    return all(
        torch.equal(parameter, again.parameters_by_name()[name])
        for name, parameter in critic.parameters_by_name().items()
    )


def test_the_state_of_the_optimizer_goes_on_bit_for_bit(tmp_path):
    make_critic_hf(tmp_path, tied=True)
    assert all(run_ranks(_saved_and_loaded, 2, str(tmp_path)))


def _start(rank, world, folder, layout):
    join(rank, world, layout)
    critic = make_critic(folder, layout)
    head = {n: p.detach().numpy() for n, p in critic.parameters_by_name().items() if n.startswith("value_head")}
    return critic.values(make_batch(RAGGED), max_tokens=1000).numpy(), head


@pytest.mark.parametrize("tied", [True, False])
def test_from_a_language_model_all_first_values_are_zero(tmp_path, tied):
    """The language model's own head is no part of the critic, whether it has one (untied) or not."""
    make_hf(tmp_path, tied=tied)
    for values, head in run_ranks(_start, 2, str(tmp_path), Layout(tp=2)):
        assert set(head) == {"value_head.weight", "value_head.bias"}
        assert not any(part.any() for part in head.values())
        assert not values.any()


def test_from_a_sequence_classification_values_are_its_scores(tmp_path):
    reward_model = make_reward_hf(tmp_path, tied=False)
    batch = make_batch(RAGGED)
    ((values, _),) = run_ranks(_start, 1, str(tmp_path), Layout())
    with torch.no_grad():
        for i, end in enumerate(batch.cu_seqlens[1:].tolist()):
            # The value before the last token is the score of the text up to it.
            text = batch.select([i]).tokens[None, :-1]
            expected = reward_model(input_ids=text).logits.item()
            assert values[end - 1] == pytest.approx(expected, abs=1e-5)


def _exported(rank, world, folder, layout, out):
    join(rank, world, layout)
    critic = make_critic(folder, layout)
    if critic.grid.at.dp:
        return
    at, grid = critic.grid.at, critic.grid
    ranks = ModelRanks(layout.tp, at.tp, grid.tp, layout.pp, at.pp, grid.pp)
    params = {n: p.detach() for n, p in critic.parameters_by_name().items()}
    export_critic(params, critic.shape, out, ranks, source=folder)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=2, pp=2), Layout(dp=2)], ids=str)
def test_export_of_an_untrained_import_is_bit_equal(tmp_path, layout):
    make_critic_hf(tmp_path / "model", tied=True)
    run_ranks(_exported, layout.world, str(tmp_path / "model"), layout, str(tmp_path / "out"))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    assert (tmp_path / "model" / "config.json").read_bytes() == (tmp_path / "out" / "config.json").read_bytes()


@pytest.mark.parametrize("start", ["tied", "untied", "reward"])
def test_what_is_exported_loads_in_transformers_with_the_same_values(tmp_path, start):
    if start == "reward":
        make_reward_hf(tmp_path / "model", tied=True)
    else:
        make_hf(tmp_path / "model", tied=start == "tied")
    run_ranks(_exported, 2, str(tmp_path / "model"), Layout(tp=2), str(tmp_path / "out"))
    model, report = AutoModelForTokenClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(model) is Qwen2ForTokenClassification
    assert not report["missing_keys"] and not report["unexpected_keys"]  # noqa: PT018
    assert model.config.num_labels == 1
    model.train()  # the export says that there is no dropout before the head
    body = load_file(tmp_path / "model" / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, body[name] if name in body else torch.zeros_like(parameter)), name
    ((values, _),) = run_ranks(_start, 1, str(tmp_path / "out"), Layout())
    with torch.no_grad():
        assert abs(hf_values(model, make_batch(RAGGED)).numpy() - values).max() < 1e-5


def _damage(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("score.weight"), "tensor score.weight is missing"),
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "up_proj.weight is missing"),
        (lambda t: t.update(lm_head=torch.zeros(2)), "lm_head belongs to no part"),
        (lambda t: t.update({"score.weight": torch.zeros(2, 128)}), r"has shape \[2, 128\]"),
        (lambda t: t["score.bias"].fill_(float("nan")), "score.bias.*holds NaN"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path, change, message):
    make_critic_hf(tmp_path, tied=True)
    _damage(tmp_path, change)
    with pytest.raises(RankError, match=message):
        run_ranks(_start, 1, str(tmp_path), Layout())


def test_a_classification_of_several_labels_is_no_critic(tmp_path):
    make_critic_hf(tmp_path, tied=True, labels=3)
    with pytest.raises(Exception, match="a classification with 3 labels"):
        critic_source(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert len(config["id2label"]) == 3
