import json
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from megaverl.checkpoint.train_state import (
    begin_state,
    check_state,
    commit_state,
    complete_steps,
    find_latest,
    load_shared,
    load_state,
    save_state,
)
from megaverl.errors import Problems, RunError, UserError
from megaverl.parallel.layout import Layout

LAYOUT = Layout(tp=2)
SHARED = {"step": 7, "data_position": (1, 32)}


def rank_state(rank):
    return {"weights": torch.full((4, 3), float(rank)), "rng": torch.get_rng_state(), "lr": 1e-3}


def save(run, step=7, layout=LAYOUT):
    begin_state(run, step)
    files = []
    for rank in range(layout.world):
        files += save_state(run, step, rank, layout.world, rank_state(rank), SHARED if rank == 0 else None)
    return commit_state(run, step, layout, files, {"run": "demo"})


def problems_of(folder, layout=LAYOUT):
    problems = Problems()
    check_state(folder, layout, problems)
    return [str(p) for p in problems.found]


def test_what_is_saved_comes_back(tmp_path):
    folder = save(tmp_path)
    assert folder == tmp_path / "checkpoints" / "step_7"
    assert sorted(os.listdir(folder)) == ["manifest.json", "rank_00000.pt", "rank_00001.pt", "shared.pt"]
    assert problems_of(folder) == []
    for rank in (0, 1):
        mine, shared = load_state(folder, rank, 2, LAYOUT)
        assert torch.equal(mine["weights"], rank_state(rank)["weights"])
        assert torch.equal(mine["rng"], torch.get_rng_state())
        assert mine["lr"] == 1e-3
        assert shared == SHARED


def test_an_optimizer_goes_on_as_if_it_had_not_stopped(tmp_path):
    def step(weight, optimizer):
        optimizer.zero_grad()
        (weight**2).sum().backward()
        optimizer.step()

    weight = torch.nn.Parameter(torch.linspace(-1, 1, 5))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    for _ in range(3):
        step(weight, optimizer)
    begin_state(tmp_path, 3)
    files = save_state(tmp_path, 3, 0, 1, {"weight": weight, "optimizer": optimizer.state_dict()}, {})
    folder = commit_state(tmp_path, 3, Layout(), files)
    for _ in range(3):
        step(weight, optimizer)

    mine, _ = load_state(folder, 0, 1, Layout())
    again = torch.nn.Parameter(mine["weight"].detach().clone())
    resumed = torch.optim.AdamW([again], lr=0.1)
    resumed.load_state_dict(mine["optimizer"])
    for _ in range(3):
        step(again, resumed)
    assert torch.equal(again, weight)


def test_the_manifest_says_what_is_in_the_folder(tmp_path):
    folder = save(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["step"], manifest["world"], manifest["layout"]["tp"]) == (7, 2, 2)
    assert manifest["details"] == {"run": "demo"}
    assert manifest["versions"]["torch"] == torch.__version__
    assert [f["size"] for f in manifest["files"]] == [(folder / f["name"]).stat().st_size for f in manifest["files"]]


def test_the_latest_is_the_highest_complete_step(tmp_path):
    assert find_latest(tmp_path) is None
    for step in (9, 10):
        save(tmp_path, step)
    begin_state(tmp_path, 11)  # a run killed while saving
    save_state(tmp_path, 11, 0, 2, rank_state(0), SHARED)
    assert complete_steps(tmp_path) == [9, 10]
    assert find_latest(tmp_path) == tmp_path / "checkpoints" / "step_10"


def test_leftovers_of_a_killed_run_do_not_get_into_the_next(tmp_path):
    begin_state(tmp_path, 7)
    save_state(tmp_path, 7, 5, 6, rank_state(5), None)
    folder = save(tmp_path)
    assert "rank_00005.pt" not in os.listdir(folder)


def test_a_complete_step_is_not_overwritten(tmp_path):
    save(tmp_path)
    with pytest.raises(UserError, match="step_7: exists already"):
        begin_state(tmp_path, 7)


@pytest.mark.parametrize("asked", [Layout(tp=1), Layout(dp=2), Layout(tp=2, dp=2)])
def test_another_layout_is_refused_by_name(tmp_path, asked):
    folder = save(tmp_path)
    (found,) = problems_of(folder, asked)
    assert "was saved with layout tp2-pp1-dp1 (2 workers)" in found
    assert f"this run has {asked} ({asked.world} workers)" in found
    with pytest.raises(UserError, match="was saved with layout"):
        load_state(folder, 0, asked.world, asked)


def flip(file: Path):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["rank_00001.pt", "shared.pt"])
def test_a_damaged_file_is_named(tmp_path, name):
    folder = save(tmp_path)
    flip(folder / name)
    with pytest.raises(UserError, match=f"{name}: damaged: its content"):
        load_state(folder, 1, 2, LAYOUT)


def test_the_driver_reads_the_shared_state_alone(tmp_path):
    folder = save(tmp_path)
    (folder / "rank_00001.pt").unlink()  # none of its business
    assert load_shared(folder) == SHARED
    flip(folder / "shared.pt")
    with pytest.raises(UserError, match=r"shared\.pt: missing or damaged"):
        load_shared(folder)
    with pytest.raises(UserError, match="not a complete checkpoint"):
        load_shared(tmp_path / "nowhere")


def test_cut_and_missing_files_are_named_together(tmp_path):
    folder = save(tmp_path)
    (folder / "rank_00000.pt").unlink()
    file = folder / "rank_00001.pt"
    file.write_bytes(file.read_bytes()[:-1])
    assert [p.partition("\n")[0].split(": ")[:2] for p in problems_of(folder)] == [
        [str(folder / "rank_00000.pt"), "missing"],
        [str(file), "damaged"],
    ]
    with pytest.raises(UserError, match="2 problems found"):
        load_state(folder, 0, 2, LAYOUT)


def test_a_folder_without_manifest_is_not_a_checkpoint(tmp_path):
    folder = save(tmp_path)
    (folder / "manifest.json").unlink()
    (found,) = problems_of(folder)
    assert "not a complete checkpoint" in found
    assert "not a complete checkpoint" in problems_of(tmp_path / "nowhere")[0]


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 2}', '{"format": 2, "layout": {"tp": 0}, "files": []}'])
def test_an_unreadable_manifest_is_named(tmp_path, content):
    folder = save(tmp_path)
    (folder / "manifest.json").write_text(content)
    (found,) = problems_of(folder)
    assert found.startswith(f"{folder / 'manifest.json'}: cannot be read")


def test_a_later_format_is_refused(tmp_path):
    folder = save(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    assert "format 99 is not known, this megaverl reads 2" in problems_of(folder)[0]


@pytest.mark.parametrize("lost", ["rank_00001.pt", "shared.pt"])
def test_a_rank_that_did_not_report_prevents_the_commit(tmp_path, lost):
    begin_state(tmp_path, 7)
    files = [f for rank in (0, 1) for f in save_state(tmp_path, 7, rank, 2, rank_state(rank), None if rank else SHARED)]
    with pytest.raises(RunError, match="the ranks reported"):
        commit_state(tmp_path, 7, LAYOUT, [f for f in files if f.name != lost])
    assert find_latest(tmp_path) is None
    (tmp_path / "checkpoints" / "step_7.tmp" / lost).unlink()
    with pytest.raises(RunError, match="is not what the ranks reported"):
        commit_state(tmp_path, 7, LAYOUT, files)
    assert find_latest(tmp_path) is None


def test_values_that_could_not_be_loaded_again_are_refused_at_once(tmp_path):
    begin_state(tmp_path, 7)
    state = {"a": {"path": [Path("x")]}, "n": np.float64(1.0), "fine": OrderedDict(x=(1, None, "s", torch.float32))}
    with pytest.raises(RunError) as caught:
        save_state(tmp_path, 7, 0, 1, state, None)
    text = str(caught.value)
    assert "a.path[0] is a pathlib.PosixPath" in text
    assert "n is a numpy.float64" in text
    assert "fine" not in text
    assert not (tmp_path / "checkpoints" / "step_7.tmp" / "rank_00000.pt").exists()


def test_every_plain_value_comes_back(tmp_path):
    plain = {
        "values": [None, True, 3, 2.5, 1j, "s", b"b", (1, 2), {4}, torch.float32, torch.Size([2]), torch.device("cpu")],
        2: OrderedDict(a=torch.nn.Parameter(torch.ones(2))),
    }
    begin_state(tmp_path, 7)
    folder = commit_state(tmp_path, 7, Layout(), save_state(tmp_path, 7, 0, 1, plain, {}))
    mine, _ = load_state(folder, 0, 1, Layout())
    assert mine["values"] == plain["values"]
    assert torch.equal(mine[2]["a"], plain[2]["a"])


def test_a_full_disk_or_missing_folder_is_a_failed_run(tmp_path):
    with pytest.raises(RunError, match="could not be written"):
        save_state(tmp_path / "never_begun", 7, 0, 1, {}, None)
