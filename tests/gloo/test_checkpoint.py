import os

import pytest
import torch
import torch.distributed as dist

from megaverl.checkpoint import hf_writer
from megaverl.checkpoint.hf_export import ModelRanks, export_hf
from megaverl.checkpoint.hf_import import load_hf
from megaverl.checkpoint.train_state import begin_state, commit_state, load_state, save_state
from megaverl.errors import RunError, UserError
from megaverl.parallel.layout import Layout
from tests.gloo.launch import run_ranks
from tests.unit.checkpoint.tiny import empty_params, make_checkpoint, rows_of, tensors_of


def place(rank, tp, pp):
    """This rank's `ModelRanks` in a world of tp x pp."""
    tp_groups = [dist.new_group(list(range(s * tp, (s + 1) * tp))) for s in range(pp)]
    pp_groups = [dist.new_group(list(range(r, tp * pp, tp))) for r in range(tp)]
    stage, tp_rank = divmod(rank, tp)
    return ModelRanks(tp, tp_rank, tp_groups[stage], pp, stage, pp_groups[tp_rank])


def imported(source, ranks, layers=None):
    """The rank's parameters; ``layers`` are those of its stage, in whatever order the layout puts them."""
    rows = rows_of(source)
    params = empty_params(rows, ranks.tp)
    if ranks.pp > 1:
        first, last = ranks.pp_rank == 0, ranks.pp_rank == ranks.pp - 1
        keep = tuple(f"decoder.layers.{i}." for i in layers[ranks.pp_rank])
        if last:
            keep += ("decoder.final", "output_layer")
        if first or (last and rows.shape.tied):  # the last stage has a copy
            keep += ("embedding",)
        params = {name: p for name, p in params.items() if name.startswith(keep)}
    load_hf(source, rows, params, tp=ranks.tp, tp_rank=ranks.tp_rank, whole_model=ranks.pp == 1)
    if ranks.pp > 1 and last and rows.shape.tied:
        params["embedding.word_embeddings.weight"].zero_()  # a wrong copy: the export must not take it
    return params, rows


def round_trip(rank, world, source, out, tp, layers, shard_bytes, band):
    hf_writer.BAND_BYTES = band
    ranks = place(rank, tp, world // tp)
    params, rows = imported(source, ranks, layers)
    export_hf(params, rows, out, ranks, source=source, max_shard_bytes=shard_bytes)
    return out.exists()  # on every rank the folder is complete when the call returns


LAYOUTS = {
    "tp2": (2, 1, None),
    "pp2": (1, 2, [[0, 1], [2, 3]]),
    "pp3, uneven": (1, 3, [[0], [1, 2], [3]]),
    "pp2 vpp2": (1, 2, [[0, 2], [1, 3]]),
    "tp2 pp2": (2, 2, [[0], [1, 2, 3]]),
    "tp2 pp2 vpp2": (2, 2, [[0, 2], [1, 3]]),
    "tp4, KV heads twice": (4, 1, None),
    "tp4 pp2, KV heads twice": (4, 2, [[0, 1], [2, 3]]),
}


def same(source, out):
    want, got = tensors_of(source), tensors_of(out)
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) and want[name].dtype == got[name].dtype for name in want)
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()


# One file and whole tensors at once; several files and 7 rows of 32 at a time.
@pytest.mark.parametrize(("tied", "shard_bytes", "band"), [(True, 10**9, 10**9), (False, 20_000, 1800)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_import_and_export_are_bit_equal_in_every_layout(tmp_path, layout, tied, shard_bytes, band):
    tp, pp, layers = LAYOUTS[layout]
    source = make_checkpoint(tmp_path / "in", tied=tied, layers=4)
    arguments = (source, tmp_path / "out", tp, layers, shard_bytes, band)
    assert run_ranks(round_trip, tp * pp, *arguments) == [True] * (tp * pp)
    same(source, tmp_path / "out")


def incomplete(rank, world, source, out, layers):
    ranks = place(rank, 1, world)
    params, rows = imported(source, ranks, layers)
    try:
        export_hf(params, rows, out, ranks, source=source)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([[0, 1], [3]], "decoder.layers.2.input_layernorm.weight: no stage has a parameter for model.layers.2.input"),
        ([[0, 1, 2], [2, 3]], "decoder.layers.2.input_layernorm.weight: stages 0 and 1 both hold it"),
    ],
)
def test_a_layer_of_no_stage_or_of_two_is_refused_on_every_rank(tmp_path, layers, message):
    source = make_checkpoint(tmp_path / "in", layers=4)
    for text in run_ranks(incomplete, 2, source, tmp_path / "out", layers, timeout=60):
        assert message in text
    assert os.listdir(tmp_path) == ["in"]


def failing_export(rank, world, source, out, spoil):
    ranks = ModelRanks(world, rank, dist.group.WORLD)
    params, rows = imported(source, ranks)
    if spoil and rank == 1:  # the rank that does not write
        params["decoder.layers.0.mlp.linear_fc2.weight"][0, 0] = float("nan")
    try:
        export_hf(params, rows, out, ranks, source=source)
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
