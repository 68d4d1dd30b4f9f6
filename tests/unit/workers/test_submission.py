"""The command of a submitted job, as a shell on the head node takes it. The cluster's side is an end-to-end test."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megaverl.config.load import load_config
from megaverl.errors import UserError
from megaverl.workers.submission import cluster_address, entrypoint


def test_the_job_does_the_same_words_in_the_same_folder_on_the_cluster_that_runs_it(tmp_path):
    folder = tmp_path / "my runs"
    folder.mkdir()
    words = ["c.yaml", "trainer.experiment=a b", "data.train_files=['x y', $HOME]", "cluster.address=http://head:8265"]
    command = entrypoint(words, folder)
    shown = "import os, sys; print(os.getcwd()); print(*sys.argv[1:], sep='\\n')"
    program = command.replace("-m megaverl", f'-c "{shown}"')
    done = subprocess.run(["sh", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(folder), "train", *words, "cluster.address=null"]
    assert f"exec {sys.executable} " in command
    assert load_config(None, [*words[3:], "cluster.address=null"]).cluster.address is None, "the last one wins"


def test_the_address_is_the_configurations_before_the_environments(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://one:8265")
    assert cluster_address(load_config()) == "http://one:8265"
    assert cluster_address(load_config(None, ["cluster.address=http://two:8265"])) == "http://two:8265"
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(UserError, match="no cluster is named"):
        cluster_address(load_config())
