"""What is said of workers that are lost."""

from __future__ import annotations

import os
import pickle

import pytest

from megaverl.workers.beats import Answer
from megaverl.workers.liveness import Whereabouts, WorkersLost, died, end_of_process, stuck

RAY = "The actor died: SYSTEM_ERROR Worker unexpectedly exits with a connection error code 2. End of file."


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.1")


def test_a_kill_leaves_no_trace_a_crash_its_signal_and_an_exit_its_code(tmp_path):
    log = tmp_path / "rank_0.log"
    log.write_text("all is well\n")
    assert "as after SIGKILL" in end_of_process(RAY, log)
    assert end_of_process("", log).startswith("it left no trace")
    log.write_text("Fatal Python error: Segmentation fault\n\nCurrent thread 0x1:\n")
    assert end_of_process(RAY, log).startswith("signal SIGSEGV: ")
    assert end_of_process("Worker exits with an exit code 3.", log).startswith("exit code 3: ")


def test_the_message_of_a_death_says_who_where_when_how_and_the_last_lines(tmp_path):
    (tmp_path / "rank_1.log").write_text("\n".join(f"line {i}" for i in range(20)))
    error = died(1, Whereabouts("10.0.0.2", 77), ["actor", "rollout"], "generate", RAY, tmp_path / "rank_1.log")
    assert isinstance(error, WorkersLost)
    assert str(error).startswith("rank 1 (node 10.0.0.2, pid 77, actor+rollout) died in phase generate: ")
    assert str(error).endswith("line 19")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_case_33_of_ranks_in_a_collective_the_one_that_is_missing_there_is_named_first(here, tmp_path):
    places = [Whereabouts("10.0.0.2", 5), Whereabouts("10.0.0.2", 6)]
    answers = {
        0: Answer("old_log_probs", 9, "setup.py:9 f", True),
        1: Answer("old_log_probs", 9, "batch.py:3 g", False),
    }
    text = str(stuck([0, 1], places, ["actor"], "old_log_probs", "within 9 s", tmp_path, answers)).splitlines()
    assert text[0] == "2 worker(s) did not finish phase old_log_probs within 9 s:"
    assert text[1] == "  rank 1 (node 10.0.0.2, pid 6, actor), works at batch.py:3 g"
    assert text[2] == "  rank 0 (node 10.0.0.2, pid 5, actor), waits for its peers at setup.py:9 f"


def test_a_process_of_this_node_is_looked_at(here, tmp_path):
    error = stuck([0], [Whereabouts("10.0.0.1", os.getpid())], ["actor"], "load", "within 9 s", tmp_path)
    assert "its process is running" in str(error)
