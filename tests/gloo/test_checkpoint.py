import os

import pytest
import torch
import torch.distributed as dist

from megaverl.checkpoint import hf_export
from megaverl.checkpoint.hf_export import export_hf
from megaverl.checkpoint.hf_import import load_hf
from megaverl.checkpoint.train_state import begin_state, commit_state, load_state, save_state
from megaverl.errors import RunError, UserError
from megaverl.parallel.layout import Layout
from tests.gloo.launch import run_ranks
from tests.unit.checkpoint.tiny import empty_params, make_checkpoint, rows_of, tensors_of


def imported(source, tp, rank):
    rows = rows_of(source)
    params = empty_params(rows, tp)
    load_hf(source, rows, params, tp=tp, tp_rank=rank)
    return params, rows


def round_trip(rank, world, source, out, shard_bytes, band):
    hf_export.BAND_BYTES = band
    params, rows = imported(source, world, rank)
    export_hf(
        params,
        rows,
        out,
        tp=world,
        tp_rank=rank,
        tp_group=dist.group.WORLD,
        writer=rank == 0,
        source=source,
        max_shard_bytes=shard_bytes,
    )
    return out.exists()  # on every rank the folder is complete when the call returns


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("shard_bytes", "band"), [(10**9, 10**9), (20_000, 1800)])  # 1800 bytes: 7 rows of 32
def test_import_and_export_over_two_ranks_is_bit_equal(tmp_path, tied, shard_bytes, band):
    source = make_checkpoint(tmp_path / "in", tied=tied)
    assert run_ranks(round_trip, 2, source, tmp_path / "out", shard_bytes, band) == [True, True]
    want, got = tensors_of(source), tensors_of(tmp_path / "out")
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def failing_export(rank, world, source, out, spoil):
    params, rows = imported(source, world, rank)
    if spoil and rank == 1:  # the rank that does not write
        params["decoder.layers.0.mlp.linear_fc2.weight"][0, 0] = float("nan")
    try:
        export_hf(params, rows, out, tp=world, tp_rank=rank, tp_group=dist.group.WORLD, writer=rank == 0, source=source)
    except (UserError, RunError) as error:
        return type(error).__name__, str(error)
    return None


def test_an_export_that_fails_on_the_writer_ends_on_every_rank(tmp_path):
    source = make_checkpoint(tmp_path / "in")
    writer, other = run_ranks(failing_export, 2, source, tmp_path / "out", True, timeout=60)
    assert writer[0] == other[0] == "RunError"
    assert "tensor model.layers.0.mlp.down_proj.weight holds NaN" in writer[1]
    assert "the writing rank failed" in other[1]
    assert os.listdir(tmp_path) == ["in"]


def test_a_taken_folder_ends_on_every_rank(tmp_path):
    source = make_checkpoint(tmp_path / "in")
    writer, other = run_ranks(failing_export, 2, source, source, False, timeout=60)
    assert writer[0] == "UserError"
    assert "not an empty folder" in writer[1]
    assert other[0] == "RunError"


def save_and_load(rank, world, run):
    state = {"weights": torch.full((1000,), float(rank))}
    files = save_state(run, 4, rank, world, state, {"step": 4} if rank == 0 else None)
    every = [None] * world
    dist.all_gather_object(every, files)
    if rank == 0:  # the driver's part
        commit_state(run, 4, Layout(dp=world), [f for part in every for f in part])
    dist.barrier()
    mine, shared = load_state(run / "checkpoints" / "step_4", rank, world, Layout(dp=world))
    return mine["weights"].sum().item(), shared


def test_two_ranks_save_at_the_same_time(tmp_path):
    begin_state(tmp_path, 4)
    assert run_ranks(save_and_load, 2, tmp_path) == [(0.0, {"step": 4}), (1000.0, {"step": 4})]
