"""Calls to the workers of a real run."""

from __future__ import annotations

import pytest

from megaverl.errors import RunError
from megaverl.observe.console import Console
from megaverl.trainer.preflight import prepare
from megaverl.trainer.run import Run


def test_posted_work_is_done_before_the_next_call_and_its_failure_is_raised_by_it(task, tmp_path):
    run = Run(prepare(task.config("sft_tiny.yaml", tmp_path, "trainer.total_steps=1")), Console())
    try:
        run.start()
        workers = run.workers
        workers.post("load", [[]])
        with pytest.raises(RunError, match="failed in phase memory after load"):
            workers.call("memory")
        assert len(workers.call("memory")) == 2  # what failed is not tried again
        workers.post("export_hf", str(tmp_path / "hf"))
        assert not (tmp_path / "hf").exists()
        assert len(workers.call("info")) == 2
        assert (tmp_path / "hf" / "config.json").exists()
    finally:
        run.close()
