"""A state that is written while training goes on is the one of the moment it was taken."""

from __future__ import annotations

import threading

import pytest
import torch

from megaverl.checkpoint.background import Writing
from megaverl.checkpoint.train_state import SavedFile
from megaverl.errors import RunError


def test_what_is_written_is_the_state_at_the_call():
    go, seen = threading.Event(), []

    def write(state):
        go.wait(20)
        seen.append(state["model"]["weight"].clone())
        return [SavedFile("rank_00000.pt", 1, "0")]

    weight = torch.ones(3)
    writing = Writing(write, {"model": {"weight": weight}, "step": 1}, background=True)
    assert not writing.done
    weight.add_(1)
    go.set()
    assert writing.result() == [SavedFile("rank_00000.pt", 1, "0")]
    assert writing.done
    assert seen[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("background", [True, False])
def test_a_failure_is_raised_when_the_result_is_asked_for(background):
    def write(state):
        raise RunError("no space left")

    writing = Writing(write, {}, background=background)
    with pytest.raises(RunError, match="no space left"):
        writing.result()
