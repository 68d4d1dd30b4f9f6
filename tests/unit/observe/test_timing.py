"""Seconds by phase."""

from __future__ import annotations

import time

import pytest

from megaverl.observe.timing import PhaseTimer


def test_phases_add_up_under_verls_names_and_start_anew():
    timer = PhaseTimer()
    for _ in range(2):
        with timer.phase("step"):
            with timer.phase("gen"):
                time.sleep(0.02)
            with timer.phase("update_actor"):
                time.sleep(0.01)
    timer.add("handoff", 1.5)
    metrics = timer.metrics()
    assert list(metrics) == ["timing_s/gen", "timing_s/update_actor", "timing_s/step", "timing_s/handoff"]
    assert 0.04 <= metrics["timing_s/gen"] < 0.2
    assert metrics["timing_s/step"] >= metrics["timing_s/gen"] + metrics["timing_s/update_actor"]
    assert metrics["timing_s/handoff"] == 1.5
    assert timer.metrics() == {}
    assert timer.total["gen"] == metrics["timing_s/gen"]


def test_the_listener_hears_the_phase_around_again():
    heard = []
    timer = PhaseTimer(heard.append)
    with timer.phase("step"), timer.phase("old_log_prob"):
        pass
    with timer.phase("export_hf"):
        pass
    assert heard == ["step", "log-probabilities of the actor", "step", "export hf"]


def test_a_phase_that_fails_is_timed_too():
    timer = PhaseTimer()
    with pytest.raises(RuntimeError), timer.phase("gen"):
        raise RuntimeError
    assert "timing_s/gen" in timer.metrics()
    with timer.phase("reward"):
        pass
    assert timer._open == []
