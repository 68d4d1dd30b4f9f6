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

        first, second = workers.ask("export_hf", str(tmp_path / "asked")), workers.ask("memory")
        assert all("perf/cpu_memory_used_gb" in report for report in workers.answers(second))
        assert (tmp_path / "asked" / "config.json").exists()  # ranks do what they are asked in order
        assert workers.answers(first) == [None, None]
        bad = workers.ask("load", [[]])
        assert len(workers.call("info")) == 2
        with pytest.raises(RunError, match="failed in phase load"):
            workers.answers(bad)
    finally:
        run.close()
