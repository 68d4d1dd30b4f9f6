"""What a run was made of."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess

import pytest

from megaverl.config.load import load_config
from megaverl.observe import provenance as module
from megaverl.observe.provenance import EDGE, WHOLE, file_hash, git_state, provenance, write_provenance


def test_a_file_is_known_by_its_content_whatever_its_time_says(tmp_path):
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"one")
    stat = file.stat()
    first = file_hash(file)
    assert first["sha256"] == hashlib.sha256(b"one").hexdigest()
    assert (first["bytes"], first["of"]) == (3, "content")
    file.write_bytes(b"two")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file_hash(file)["sha256"] != first["sha256"]


def sparse(path, size: int, writes: dict[int, bytes] | None = None):
    with path.open("wb") as file:
        file.truncate(size)
        for start, content in (writes or {}).items():
            file.seek(start)
            file.write(content)
    return path


def test_a_large_file_is_known_by_its_size_its_ends_its_header_and_samples(tmp_path):
    size = WHOLE + 10_000_000
    header = {0: (2 * EDGE).to_bytes(8, "little")}
    name = tmp_path / "model.safetensors"
    first = file_hash(sparse(name, size, header))
    assert first["of"] == "samples"
    changes = [
        {EDGE + EDGE // 2: b"x"},  # in the header, which is longer than the first piece
        {size - 1: b"x"},
        {size - EDGE: b"x"},
        {(size - module.PIECE) * 3 // (module.SAMPLES + 1): b"x"},
    ]
    for change in changes:
        assert file_hash(sparse(name, size, header | change))["sha256"] != first["sha256"], change
    assert file_hash(sparse(name, size + 1, header))["sha256"] != first["sha256"]
    assert file_hash(sparse(name, size, header)) == first


def test_the_whole_document_names_inputs_versions_and_layout(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-the-user")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "scorer.py").write_text("")
    words = [
        f"model.path={tmp_path / 'model'}",
        f"data.train_files=[{tmp_path / 'rows.jsonl'}]",
        f"reward.function.path={tmp_path / 'scorer.py'}",
        "trainer.seed=5",
    ]
    path = write_provenance(tmp_path, load_config(None, words), layout="tp2-pp1-dp1", resumed_from=None)
    text = path.read_text()
    found = json.loads(text)
    assert {"torch", "ray", "transformers", "megatron-core"} <= found["packages"].keys()
    assert (found["layout"], found["seed"], found["resumed_from"]) == ("tp2-pp1-dp1", 5, None)
    assert found["model"]["files"][0]["sha256"] == hashlib.sha256(b"{}").hexdigest()
    assert found["data"]["train"][0]["bytes"] == 3
    assert found["data"]["val"] == []
    assert found["scorer"]["bytes"] == 0
    assert found["environment"]["NCCL_DEBUG"] == "INFO"
    assert "secret" not in text


def test_the_same_configuration_has_the_same_hash_and_another_another():
    one, two = load_config(None, ["trainer.seed=1"]), load_config(None, ["trainer.seed=2"])
    assert provenance(one)["config"] == provenance(load_config(None, ["trainer.seed=1"]))["config"]
    assert provenance(one)["config"] != provenance(two)["config"]


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True)


def test_git_state_tells_changes_from_none(tmp_path):
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "a")
    clean = git_state(tmp_path)
    assert (clean["dirty"], clean["changes_sha256"], len(clean["commit"])) == (False, None, 40)
    (tmp_path / "a").write_text("2")
    changed = git_state(tmp_path)
    assert changed["dirty"]
    assert changed["commit"] == clean["commit"]
    (tmp_path / "a").write_text("3")
    assert git_state(tmp_path)["changes_sha256"] != changed["changes_sha256"]


@pytest.mark.parametrize("path", ["", "/usr/bin"])
def test_a_machine_without_git_still_runs(tmp_path, monkeypatch, path):
    (tmp_path / ".git").mkdir()  # no repository in it
    monkeypatch.setenv("PATH", path)
    assert git_state(tmp_path) is None
