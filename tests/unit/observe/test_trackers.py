"""Trackers, each the real one."""

from __future__ import annotations

import io
import json
import sys

import pytest

from megaverl.config.load import load_config
from megaverl.errors import Problems, UserError
from megaverl.observe.console import Console
from megaverl.observe.trackers import ConsoleTracker, Trackers, check_loggers, open_trackers


def open_with(tmp_path, loggers, stream=None, **options):
    config = load_config(None, [f"trainer.run_dir={tmp_path}", f"trainer.loggers=[{loggers}]"])
    return open_trackers(config, Console(stream or io.StringIO()), **options)


def test_console_and_file_get_the_same_steps(tmp_path):
    stream = io.StringIO()
    with open_with(tmp_path, "console,file", stream, total_steps=2) as trackers:
        trackers.log({"val-core/x/acc/mean@1": 0.25, "timing_s/testing": 1.0}, 0)
        trackers.log({"critic/score/mean": 0.5}, 1)
        trackers.log({"critic/score/mean": 0.5, "val-core/x/acc/mean@1": 0.5}, 2)
    assert stream.getvalue().splitlines() == [
        "validation at step 0 · x/acc/mean@1 0.250 · 1.0 s",
        "step 1/2 · reward 0.50",
        "step 2/2 · reward 0.50",
        "validation at step 2 · x/acc/mean@1 0.500",
    ]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[2] == {"step": 2, "critic/score/mean": 0.5, "val-core/x/acc/mean@1": 0.5}


def test_advice_follows_the_line():
    stream = io.StringIO()
    tracker = ConsoleTracker(Console(stream), 9)
    for step in (1, 2):
        tracker.log({"critic/score/mean": 0.5, "actor/entropy": 0.0}, step)
    lines = stream.getvalue().splitlines()
    assert [line.split(" ", 1)[0] for line in lines] == ["step", "warning:", "step"]


def test_rows_set_aside_are_spoken_of(tmp_path):
    with open_with(tmp_path, "file") as trackers:
        for step in range(4):
            trackers.log({}, step)
    stream = io.StringIO()
    open_with(tmp_path, "file", stream, first_step=2).close()
    assert "2 rows of an earlier run from step 2 on moved to" in stream.getvalue()


def test_no_loggers_is_fine(tmp_path):
    with open_with(tmp_path, "") as trackers:
        trackers.log({"a": 1}, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_a_user_error_before_anything_is_opened(tmp_path, monkeypatch):
    real = sys.modules["importlib.util"].find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in ("wandb", "tensorboard") else real(name)
    )
    problems = Problems()
    check_loggers(["console", "wandb", "tensorboard"], problems)
    assert len(problems.found) == 2
    with pytest.raises(UserError, match=r"megaverl\[track\]") as caught:
        open_with(tmp_path, "file,wandb,tensorboard")
    assert len(caught.value.problems) == 2
    assert list(tmp_path.iterdir()) == []


def test_all_trackers_are_closed_also_when_one_fails():
    closed = []

    class One:
        def __init__(self, name):
            self.name = name

        def log(self, metrics, step):
            pass

        def close(self):
            closed.append(self.name)
            if self.name == "b":
                raise OSError("b fails")

    with pytest.raises(OSError, match="b fails"), Trackers([One("a"), One("b"), One("c")]):
        pass
    assert sorted(closed) == ["a", "b", "c"]


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra `track` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, steps, value in ((0, range(4), 1.0), (2, range(2, 5), 2.0)):
        with open_with(tmp_path, "tensorboard", first_step=first) as trackers:
            for step in steps:
                trackers.log({"actor/lr": value}, step)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("actor/lr")}
    assert shown == {0: 1.0, 1: 1.0, 2: 2.0, 3: 2.0, 4: 2.0}
    assert len(events.Scalars("actor/lr")) == 5


def test_tables_go_to_the_trackers_that_show_them(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra `track` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_with(tmp_path, "file,tensorboard") as trackers:
        trackers.table("val/generations", ["prompt", "score"], [["a|b\nc", 1.0]], 3)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("val/generations/text_summary")
    assert event.step == 3
    text = event.tensor_proto.string_val[0].decode()
    assert text == "| prompt | score |\n| --- | --- |\n| a\\|b<br>c | 1.0 |"


def test_wandb_works_offline_and_a_resume_goes_on_in_the_same_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra `track` is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for first in (0, 1):
        with open_with(tmp_path, "wandb", first_step=first) as trackers:
            trackers.log({"actor/lr": 1e-6}, first)
            trackers.table("val/generations", ["prompt", "score"], [["a", 1.0]], first)
            ids.append(trackers.trackers[0]._run.id)
    assert ids[0] == ids[1] == (tmp_path / "wandb_run_id.txt").read_text()
    assert list((tmp_path / "wandb").glob(f"offline-run-*/run-{ids[0]}.wandb"))
