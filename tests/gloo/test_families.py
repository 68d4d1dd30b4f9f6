"""Every family, in every layout that eight processes hold: scores and gradients equal those of transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megaverl.checkpoint.hf_export import ModelRanks, export_hf
from megaverl.config.schema import OptimizerConfig
from megaverl.errors import Problems
from megaverl.models.family import load_shape, weight_map
from megaverl.parallel.layout import Layout
from tests.gloo.family_support import DYNAMIC, LINEAR, LLAMA3, YARN, Tiny, make_tiny
from tests.gloo.launch import run_ranks
from tests.gloo.policy_support import (
    RAGGED,
    VOCAB,
    hf_scores,
    join,
    make_batch,
    make_policy,
    read_weights,
    weighted_loss,
)
from tests.unit.checkpoint.tiny import tensors_of

MODELS = [
    Tiny(model_type, heads, kv_heads, tied)
    for model_type, heads, kv_heads in (
        ("qwen2", 14, 2),
        ("qwen2", 12, 2),
        ("qwen2", 28, 4),
        ("qwen3", 16, 8),
        ("llama", 12, 2),
        ("llama", 16, 8),
    )
    for tied in (True, False)
]
SCALED = [
    Tiny("llama", 16, 8, True, more={"rope_parameters": LLAMA3}),
    Tiny("qwen2", 12, 2, False, more={"rope_parameters": YARN}),
    Tiny("qwen3", 16, 8, True, more={"rope_parameters": YARN | {"attention_factor": 0.8}}),
    Tiny("llama", 12, 2, False, more={"rope_parameters": LINEAR}),
    Tiny("qwen2", 14, 2, True, more={"rope_parameters": DYNAMIC}),
]
LAYOUTS = [Layout(tp=tp, pp=pp) for tp in (1, 2, 4) for pp in (1, 2, 3) if tp * pp <= 8]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Every model with its log-probabilities and entropies by transformers."""
    found, batch = [], make_batch(RAGGED)
    for number, tiny in enumerate(MODELS + SCALED):
        folder = tmp_path_factory.mktemp("original") / str(number)
        with torch.no_grad():
            scores = hf_scores(make_tiny(folder, tiny), batch, 1.0)
        found.append((tiny, str(folder), scores))
    return found


def _scores(rank, world, layout, folders):
    join(rank, world, layout)
    batch, found = make_batch(RAGGED), []
    for folder in folders:
        for sequence_parallel in (False, True) if layout.tp > 1 else (False,):
            policy = make_policy(folder, layout, sequence_parallel=sequence_parallel)
            scores = policy.log_probs(batch, temperature=1.0, max_tokens=80, with_entropy=True)
            found.append([scores["log_probs"].numpy(), scores["entropy"].numpy()])
    return found


def fits(folder: str, tp: int) -> bool:
    problems = Problems()
    weight_map(load_shape(folder)).check_tp(tp, problems)
    return not problems.found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_scores_of_every_family_equal_transformers(originals, layout):
    chosen = [one for one in originals if fits(one[1], layout.tp)]
    assert {tiny.model_type for tiny, _, _ in chosen} == {"qwen2", "qwen3", "llama"}
    want = [(tiny, sp, scores) for tiny, _, scores in chosen for sp in ((False, True) if layout.tp > 1 else (False,))]
    for rank in run_ranks(_scores, layout.world, layout, [folder for _, folder, _ in chosen]):
        for (tiny, sequence_parallel, scores), found in zip(want, rank, strict=True):
            for name, expected, got in zip(("log-probability", "entropy"), scores, found):
                difference = (torch.from_numpy(got) - expected).abs().max().item()
                assert difference < 1e-5, f"{tiny}, sequence parallel {sequence_parallel}: {name} off by {difference}"


def test_the_scalings_change_the_scores(originals):
    """The comparison would be empty if a scaling did not matter at these lengths; dynamic does not, by definition."""
    plain = {str(tiny): scores for tiny, _, scores in originals if not tiny.more}
    for tiny, _, (log_probs, _) in originals:
        if tiny.more:
            other, _ = plain[str(Tiny(tiny.model_type, tiny.heads, tiny.kv_heads, tiny.tied))]
            changed = (log_probs - other).abs().max() > 1e-3
            assert changed == (tiny.more["rope_parameters"]["rope_type"] != "dynamic"), tiny


REPLICATED = OptimizerConfig(lr=0.0, clip_grad=0.0, distributed=False)  # whole gradients stay on every rank


def _gradients(rank, world, layout, folders, sequence_parallel):
    join(rank, world, layout)
    batch, worst = make_batch(RAGGED), []
    for model, gradients in folders:
        policy = make_policy(model, layout, optimizer=REPLICATED, sequence_parallel=sequence_parallel)
        loss = weighted_loss(0.3, 100.0)
        policy.update(batch, [[0, 3, 5], [1, 2], [4, 6, 7]], loss, temperature=0.7, entropy_grad=True)
        params = policy.parameters_by_name()
        expected = {name: torch.zeros_like(p) for name, p in params.items()}
        read_weights(policy, gradients, expected)
        errors = {
            name: float((p.main_grad - expected[name]).abs().max() / expected[name].abs().max())
            for name, p in params.items()
        }
        worst.append(max(errors.items(), key=lambda item: item[1]))
    return worst


@pytest.mark.parametrize(
    ("layout", "sequence_parallel"),
    [(Layout(), False), (Layout(tp=2), True), (Layout(tp=4), False), (Layout(tp=4), True), (Layout(tp=2, pp=2), False)],
    ids=str,
)
def test_gradients_of_every_family_equal_transformers(tmp_path, layout, sequence_parallel):
    batch, folders, chosen = make_batch(RAGGED), [], []
    for number, tiny in enumerate([*MODELS[2:], *SCALED[:3]]):
        model = make_tiny(tmp_path / f"{number}", tiny)
        if not fits(str(tmp_path / f"{number}"), layout.tp):
            continue
        weighted_loss(0.3, 100.0)(batch, *hf_scores(model, batch, 0.7))[0].backward()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.grad)
        model.save_pretrained(tmp_path / f"{number}-gradients")
        folders.append((str(tmp_path / f"{number}"), str(tmp_path / f"{number}-gradients")))
        chosen.append(tiny)
    for rank in run_ranks(_gradients, layout.world, layout, folders, sequence_parallel):
        for tiny, (name, error) in zip(chosen, rank, strict=True):
            assert error < 1e-5, f"{tiny}: {name} off by {error}"


def _round_trips(rank, world, layout, folders):
    join(rank, world, layout)
    for folder in folders:
        policy = make_policy(folder, layout)
        at, grid = policy.grid.at, policy.grid
        ranks = ModelRanks(layout.tp, at.tp, grid.tp, layout.pp, at.pp, grid.pp)
        params = policy.parameters_by_name()
        export_hf(params, weight_map(policy.shape), folder + "-out", ranks, source=folder)


@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(pp=2, vpp=2), Layout(tp=2, pp=2, vpp=2)], ids=str)
def test_round_trip_of_every_family_is_bit_equal(tmp_path, layout):
    """Case 4 on its way: tied models with a virtual pipeline or more than two stages lose nothing."""
    folders = []
    for number, tiny in enumerate([*MODELS, SCALED[0]]):
        folder = tmp_path / str(number)
        make_tiny(folder, dataclasses.replace(tiny, layers=5))
        if fits(str(folder), layout.tp):
            folders.append(folder)
    run_ranks(_round_trips, layout.world, layout, list(map(str, folders)))
    for folder in folders:
        want, got = tensors_of(folder), tensors_of(Path(f"{folder}-out"))
        assert want.keys() == got.keys()
        assert all(torch.equal(want[name], got[name]) and want[name].dtype == got[name].dtype for name in want)
        for name in ("config.json", "generation_config.json"):
            assert (folder / name).read_bytes() == (Path(f"{folder}-out") / name).read_bytes()


def _logits(rank, world, layout, folders, prompts):
    join(rank, world, layout)
    found = []
    for folder in folders:
        policy = make_policy(folder, layout)
        with torch.no_grad():
            pack = policy._pack(prompts)
            own = F.linear(policy.model(pack.tokens, pack.layout)[:, 0], policy.model.output_weight)
        parts = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(parts, own)
        found.append(torch.cat(parts, dim=1)[:, :VOCAB].numpy())
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_case_1_tied_and_untied_models_have_the_logits_of_transformers_on_20_prompts(tmp_path, tp):
    """Qwen2.5-0.5B (14 heads) and 1.5B (12) are tied, 7B (28) is not; all in one process, one after the other."""
    models = [Tiny("qwen2", 14, 2, True), Tiny("qwen2", 28, 4, False), Tiny("qwen2", 12, 2, True)]
    prompts, want = make_batch([(5 + i, 0) for i in range(20)]), []
    for number, tiny in enumerate(models):
        model = make_tiny(tmp_path / str(number), tiny)
        with torch.no_grad():
            rows = [model(input_ids=prompts.select([i]).tokens[None]).logits[0] for i in range(20)]
        want.append(torch.cat(rows))
        assert want[-1].abs().max() > 1
    folders = [str(tmp_path / str(number)) for number in range(len(models))]
    for rank in run_ranks(_logits, tp, Layout(tp=tp), folders, prompts):
        for tiny, expected, got in zip(models, want, rank, strict=True):
            assert (torch.from_numpy(got) - expected).abs().max() < 1e-5, tiny
