"""Supervised runs in layouts that the rollout does not take yet: pipelines, chunks, recomputed activations."""

from __future__ import annotations

import dataclasses

import pytest

from megaverl.data.tiny import build_tiny_checkpoint
from megaverl.trainer.trainer import Trainer

SAME = ("train/loss", "actor/grad_norm", "actor/lr")
LAYOUTS = {
    "tp2": ["actor.layout.tp=2", "actor.layout.sequence_parallel=true"],
    "pp2": ["actor.layout.tp=1", "actor.layout.pp=2", "actor.recompute=full"],
    "vpp2": ["actor.layout.tp=1", "actor.layout.pp=2", "actor.layout.vpp=2", "actor.recompute=selective"],
}


@pytest.fixture(scope="module")
def runs(task, tmp_path_factory, read_metrics):
    """Layout -> (rows of metrics, tensors of the export) of four supervised steps from the same four-layer start."""
    from safetensors.torch import load_file

    folder = tmp_path_factory.mktemp("layouts")
    start = dataclasses.replace(task, model=build_tiny_checkpoint(folder / "start", layers=4, seed=0))
    found = {}
    for name, layout in LAYOUTS.items():
        options = ["trainer.total_steps=4", "data.train_batch_size=16", "actor.max_tokens_per_micro_batch=256"]
        options += [f"trainer.export_dir={folder / name / 'hf'}", *layout]
        with Trainer(start.config("sft_tiny.yaml", folder / name, *options)) as trainer:
            trainer.train()
        found[name] = read_metrics(folder / name), load_file(folder / name / "hf" / "model.safetensors")
    return found


@pytest.mark.parametrize("name", ["pp2", "vpp2"])
def test_pipelines_learn_what_tensor_parallel_ranks_learn(runs, name):
    (rows, weights), (wanted_rows, wanted) = runs[name], runs["tp2"]
    assert len(rows) == len(wanted_rows) == 4
    for row, wanted_row in zip(rows, wanted_rows, strict=True):
        assert {key: row[key] for key in SAME} == pytest.approx({key: wanted_row[key] for key in SAME}, rel=1e-4)
    assert weights.keys() == wanted.keys()
    # Adam's first steps follow the gradient's sign, which rounding decides where it is near 0: most weights agree.
    for key, value in weights.items():
        off = (value - wanted[key]).abs()
        assert off.mean() < 1e-5, key
