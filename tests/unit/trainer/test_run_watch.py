"""What a run opens and writes before its workers start, and how it is seen from outside. Needs no Ray."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.request import urlopen

import pytest

from megaverl.config.load import load_config
from megaverl.data.arithmetic import write_arithmetic
from megaverl.data.tiny import build_tiny_checkpoint
from megaverl.observe.console import Console
from megaverl.observe.status import read_status
from megaverl.trainer.preflight import prepare
from megaverl.trainer.run import Run
from megaverl.trainer.trainer import Trainer
from megaverl.workers import cluster

RECIPE = Path(__file__).parents[3] / "configs" / "yaml" / "grpo_tiny.yaml"


class NoCluster(Exception):
    """Where the test ends the start."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return build_tiny_checkpoint(folder / "model"), write_arithmetic(folder / "rows", 0, train=32, val=8, sft=8)


@pytest.fixture
def config(inputs, tmp_path):
    model, rows = inputs
    words = [f"model.path={model}", f"data.train_files=[{rows['train']}]", f"data.val_files=[{rows['val']}]"]
    return load_config(RECIPE, [*words, f"trainer.run_dir={tmp_path / 'run'}", "observe.health_port=0"])


class Lines(Console):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def line(self, text: str, style: str = "") -> None:
        self.lines.append(text)


def test_a_start_records_its_inputs_and_can_be_watched(config, monkeypatch):
    """Looked at from inside the start, when Ray would be started."""
    console, seen = Lines(), {}
    run = Run(prepare(config), console)

    def look(_):
        port = re.search(r"http://127\.0\.0\.1:(\d+)/healthz", "\n".join(console.lines))[1]
        seen["health"] = json.loads(urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10).read())
        seen["provenance"] = json.loads((run.directory / "provenance.json").read_text())
        raise NoCluster

    monkeypatch.setattr(cluster, "attach", look)
    with pytest.raises(NoCluster):
        run.start()
    assert (seen["health"]["status"], seen["health"]["phase"]) == ("starting", "starting Ray")
    found = seen["provenance"]
    assert (found["layout"], found["resumed_from"], found["plan"]["bytes_received"]) == ("tp2-pp1-dp1", None, 0)
    assert {Path(file["name"]).name for file in found["model"]["files"]} >= {"config.json", "model.safetensors"}
    assert len(found["data"]["train"]) == len(found["data"]["val"]) == 1
    run.board.finish("failed", "no cluster")
    run.close()
    status = read_status(config.trainer.run_dir)
    assert (status.state, status.error) == ("failed", "no cluster")


def test_a_start_that_fails_is_a_failed_run_to_those_who_look(config, monkeypatch):
    def fail(_):
        raise NoCluster("nobody answers")

    monkeypatch.setattr(cluster, "attach", fail)
    with pytest.raises(NoCluster), Trainer(config, Lines()) as trainer:
        trainer.train()
    status = read_status(config.trainer.run_dir)
    assert (status.state, status.error, status.phase) == ("failed", "nobody answers", "")


def test_what_an_earlier_start_recorded_is_kept_aside(config, monkeypatch):
    monkeypatch.setattr(cluster, "attach", lambda _: (_ for _ in ()).throw(NoCluster()))
    for _ in range(2):
        with pytest.raises(NoCluster), Trainer(config, Lines()) as trainer:
            trainer.train()
    names = {path.name for path in Path(config.trainer.run_dir).iterdir()}
    assert {"provenance.json", "provenance.1.json", "config.yaml", "config.1.yaml"} <= names
