"""The heartbeat: never silent, never in the way."""

from __future__ import annotations

import io
import threading
import time

import pytest

from megaverl.observe.console import Console
from megaverl.observe.heartbeat import Heartbeat


class Stamped(io.StringIO):
    """A stream that notes when each line came."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def write(self, text: str) -> int:
        self.times.append(time.monotonic())
        return super().write(text)


def heartbeats_running() -> int:
    return sum(thread.name == "megaverl-heartbeat" for thread in threading.enumerate())


def test_silence_is_broken_in_time_and_names_step_and_phase():
    stream = Stamped()
    start = time.monotonic()
    with Heartbeat(Console(stream), every=0.1) as beat:
        beat.step(3, 60)
        beat.phase("generating")
        time.sleep(0.75)
    lines = stream.getvalue().splitlines()
    assert 2 <= len(lines) <= 7
    assert all(line.startswith("... step 3/60 · generating · ") for line in lines)
    gaps = [b - a for a, b in zip([start, *stream.times], stream.times, strict=False)]
    assert max(gaps) < 0.6, gaps


def test_nothing_is_said_while_others_talk():
    stream = io.StringIO()
    console = Console(stream)
    with Heartbeat(console, every=0.6):
        for number in range(18):
            console.line(f"line {number}")
            time.sleep(0.05)
    assert stream.getvalue() == "".join(f"line {number}\n" for number in range(18))


def test_it_stops_at_once_also_after_an_error():
    before = heartbeats_running()
    start = time.monotonic()

    def fail() -> None:
        with Heartbeat(Console(io.StringIO()), every=60):
            assert heartbeats_running() == before + 1
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert time.monotonic() - start < 1
    assert heartbeats_running() == before


def test_it_can_be_used_again_but_not_twice_at_once():
    stream = io.StringIO()
    beat = Heartbeat(Console(stream), every=0.05)
    for _ in range(2):
        with beat:
            with pytest.raises(RuntimeError, match="runs already"):
                beat.__enter__()
            time.sleep(0.12)
    assert stream.getvalue().count("... working") >= 2


def test_a_closed_stream_ends_it_quietly(recwarn):
    stream = io.StringIO()
    with Heartbeat(Console(stream), every=0.05):
        stream.close()
        time.sleep(0.2)
        assert heartbeats_running() == 0
    assert not recwarn.list, "no exception escaped the thread"


def test_an_interval_must_be_positive():
    with pytest.raises(ValueError, match="above 0"):
        Heartbeat(Console(), every=0)
