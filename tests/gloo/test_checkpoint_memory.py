"""Peak memory of import and export, as the kernel counts it (resident pages, those of mapped files included)."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from megaverl.checkpoint.hf_export import ModelRanks, export_hf
from megaverl.checkpoint.hf_import import load_hf
from megaverl.checkpoint.shard_writer import ShardedWriter, TensorSpec
from megaverl.models.family import load_shape, weight_map
from tests.gloo.launch import run_ranks
from tests.unit.checkpoint.tiny import change_config, make_checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")

SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10, "vocab_size": 16384}
BANDS = 24 * 2**20
"""What reading or writing may keep besides: a band of rows, its copies while it is checked, pages of one mapping."""


@pytest.fixture(scope="module", params=["safetensors", "bin"])
def source(request, tmp_path_factory):
    """About 230 MB in float32; embedding and head have 34 MB each."""
    folder = make_checkpoint(tmp_path_factory.mktemp("large") / request.param, tied=False)
    change_config(folder, **SIZES, layer_types=["full_attention"] * 10)
    (folder / "model.safetensors").unlink()
    rows = weight_map(load_shape(folder))
    value = {name: torch.randn(1).expand(rows.hf_shape(name)) for name in rows.hf_names()}
    if request.param == "bin":
        torch.save({name: t.contiguous() for name, t in value.items()}, folder / "pytorch_model.bin")
    else:
        writer = ShardedWriter(folder, [TensorSpec(n, "F32", tuple(t.shape)) for n, t in value.items()], 10**9)
        for name, tensor in value.items():
            writer.write(name, [tensor])
        writer.finish()
    return folder


class Peak:
    """Growth of the resident memory to its highest point, in bytes, within a ``with`` block."""

    def __enter__(self) -> Peak:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # sets the recorded peak back to the present
        self.before = psutil.Process().memory_info().rss
        return self

    def __exit__(self, *_: object) -> None:
        status = Path("/proc/self/status").read_text()
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        self.bytes = int(peak.split()[1]) * 1024 - self.before


def sizes(params) -> tuple[int, int]:
    return sum(p.numel() * p.element_size() for p in params.values()), 4 * 16384 * 512


def _load(rank, world, source):
    rows = weight_map(load_shape(source))
    load_hf(source, rows, {}, tp=world, tp_rank=rank, whole_model=False)  # what the libraries keep for good
    with Peak() as peak:
        params = {row.megatron: torch.empty(rows.local_shape(row, world)) for row in rows.expand()}
        load_hf(source, rows, params, tp=world, tp_rank=rank)
    return peak.bytes, *sizes(params)


@pytest.mark.parametrize("tp", [1, 2])
def test_import_needs_less_than_the_shard_and_a_fifth_and_one_tensor(source, tp):
    for peak, shard, largest in run_ranks(_load, tp, source):
        assert peak < 1.2 * shard + largest, f"{peak / 2**20:.0f} MiB for a shard of {shard / 2**20:.0f} MiB"
        assert peak > 0.95 * shard  # the measurement sees the parameters


def _model(rank, world, source, pp):
    """This rank's part of a model, its rows and ranks."""
    rows = weight_map(load_shape(source))
    keep = ("",)
    ranks = ModelRanks(world, rank, dist.group.WORLD)
    if pp > 1:
        ranks, half = ModelRanks(pp=world, pp_rank=rank, pp_group=dist.group.WORLD), rows.shape.layers // 2
        keep = tuple(f"decoder.layers.{i}." for i in range(rank * half, rank * half + half))
        keep += ("decoder.final", "output_layer") if rank else ("embedding",)
    shapes = {row.megatron: rows.local_shape(row, ranks.tp) for row in rows.expand() if row.megatron.startswith(keep)}
    return {name: torch.ones(shape) for name, shape in shapes.items()}, rows, ranks


def _export(rank, world, source, small, out, pp):
    params, rows, ranks = _model(rank, world, small, pp)
    export_hf(params, rows, out / "small", ranks, source=small)  # first calls load code of the libraries
    params, rows, ranks = _model(rank, world, source, pp)
    with Peak() as peak:
        export_hf(params, rows, out / "large", ranks, source=source)
    return peak.bytes, *sizes(params)


@pytest.mark.parametrize(("world", "pp"), [(1, 1), (2, 1), (2, 2)])
def test_export_needs_one_tensor_and_the_bands_beside_the_model(source, tmp_path, world, pp):
    small = make_checkpoint(tmp_path / "in", tied=False)
    for rank, found in enumerate(run_ranks(_export, world, source, small, tmp_path, pp)):
        peak, shard, largest = found
        assert peak < (largest if world > 1 else 0) + BANDS, f"rank {rank}: {peak / 2**20:.0f} MiB"
        assert peak < 0.5 * shard  # another copy of the model would be seen
