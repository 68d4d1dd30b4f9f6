"""Supervised runs in pipelines, chunks, with recomputed activations: what they learn, save and export."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from megaverl.cli import main
from megaverl.data.tiny import build_tiny_checkpoint
from megaverl.trainer.trainer import Trainer

SAME = ("train/loss", "actor/grad_norm", "actor/lr")
LAYOUTS = {
    "tp2": ["actor.layout.tp=2", "actor.layout.sequence_parallel=true", "trainer.export_check=vllm"],
    "pp2": ["actor.layout.tp=1", "actor.layout.pp=2", "actor.recompute=full"],
    "vpp2": [
        *("actor.layout.tp=1", "actor.layout.pp=2", "actor.layout.vpp=2", "actor.recompute=selective"),
        "trainer.export_shard_gb=0.0003",
    ],
}


@pytest.fixture(scope="module")
def runs(task, tmp_path_factory, read_metrics):
    """Layout -> (rows of metrics, tensors of the export, folder) of four supervised steps from the same four-layer
    start."""
    folder = tmp_path_factory.mktemp("layouts")
    start = dataclasses.replace(task, model=build_tiny_checkpoint(folder / "start", layers=4, seed=0))
    found = {}
    for name, layout in LAYOUTS.items():
        options = ["trainer.total_steps=4", "data.train_batch_size=16", "actor.max_tokens_per_micro_batch=256"]
        options += [f"trainer.export_dir={folder / name / 'hf'}", "trainer.save_every=4", *layout]
        with Trainer(start.config("sft_tiny.yaml", folder / name, *options)) as trainer:
            trainer.train()
        found[name] = read_metrics(folder / name), tensors_of(folder / name / "hf"), folder / name
    return found


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, of however many files."""
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", ["pp2", "vpp2"])
def test_pipelines_learn_what_tensor_parallel_ranks_learn(runs, name):
    (rows, weights, _), (wanted_rows, wanted, _) = runs[name], runs["tp2"]
    assert len(rows) == len(wanted_rows) == 4
    for row, wanted_row in zip(rows, wanted_rows, strict=True):
        assert {key: row[key] for key in SAME} == pytest.approx({key: wanted_row[key] for key in SAME}, rel=1e-4)
    assert weights.keys() == wanted.keys()
    # Adam's first steps follow the gradient's sign, which rounding decides where it is near 0: most weights agree.
    for key, value in weights.items():
        off = (value - wanted[key]).abs()
        assert off.mean() < 1e-5, key


@pytest.mark.parametrize("name", LAYOUTS)
def test_convert_makes_the_export_from_the_checkpoint(runs, name, tmp_path):
    """The same files byte for byte, each as large as the run's configuration says."""
    folder = runs[name][2]
    assert main(["convert", "to-hf", str(folder / "checkpoints" / "step_4"), str(tmp_path / "out")]) == 0
    exported, converted = (sorted(p.name for p in place.iterdir()) for place in (folder / "hf", tmp_path / "out"))
    assert converted == exported
    for file in exported:
        assert (tmp_path / "out" / file).read_bytes() == (folder / "hf" / file).read_bytes(), file


def test_the_largest_weights_file_is_configured(runs):
    folder = runs["vpp2"][2] / "hf"
    files = {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}
    assert len(files) > 2
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == files.keys()
    largest = max(tensor.nbytes for tensor in runs["vpp2"][1].values())
    assert all(size <= max(300_000, largest) + 10_000 for size in files.values())  # and a header


@pytest.mark.parametrize("given", ["100KB", "1GB"])
def test_converts_own_size_goes_before_the_runs(runs, given, tmp_path):
    checkpoint = runs["vpp2"][2] / "checkpoints" / "step_4"
    assert main(["convert", "to-hf", str(checkpoint), str(tmp_path / "out"), "--shard-size", given]) == 0
    exported, made = (len(list(p.glob("*.safetensors"))) for p in (runs["vpp2"][2] / "hf", tmp_path / "out"))
    assert made == 1 if given == "1GB" else made > exported
