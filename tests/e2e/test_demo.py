"""`make demo`, whole: what a new user runs first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaverl.trainer.demo import run_demo


@pytest.mark.timeout(1200)
def test_demo_learns_exports_and_reports(tmp_path, capsys):
    folder = tmp_path / "demo"
    summary = run_demo(seed=0, layout="tp2", directory=folder)
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.3
    assert summary["handoff_bytes"] == 0
    assert summary["layout"] == "tp2-pp1-dp1"
    assert {"sft", "grpo", "total"} == summary["seconds"].keys()
    assert (Path(summary["export_dir"]) / "model.safetensors").is_file()
    assert len(summary["answers"]) == 3
    out = capsys.readouterr().out
    assert "step 40/40 · reward" in out
    assert "bytes moved at handoffs" in out


def test_an_earlier_demo_is_moved_aside(tmp_path):
    from megaverl.observe.console import Console
    from megaverl.trainer.demo import _fresh

    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "mine.txt").write_text("kept")
    _fresh(tmp_path / "demo", Console())
    assert not list((tmp_path / "demo").iterdir())
    assert (tmp_path / "demo.1" / "mine.txt").read_text() == "kept"
