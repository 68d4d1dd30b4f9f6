"""Signs of life between a worker and the driver, over real sockets."""

from __future__ import annotations

import socket
import time

from megaverl.workers.beats import Pulse, Watch, ask


def wait_for(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_worker_says_its_phase_and_where_it_is():
    pulse = Pulse("127.0.0.1")
    try:
        assert ask("127.0.0.1", pulse.port).phase == ""
        pulse.phase("update_actor")
        answer = ask("127.0.0.1", pulse.port)
        assert answer.phase == "update_actor"
        assert 0 <= answer.seconds < 20
        assert "beats.py" in answer.place  # this process' innermost frame of the package: it asks
    finally:
        pulse.close()


def test_a_silent_process_and_one_that_is_gone_are_told_apart(monkeypatch):
    monkeypatch.setattr("megaverl.workers.beats.ROUND_SECONDS", 0.05)
    monkeypatch.setattr("megaverl.workers.beats.ANSWER_SECONDS", 0.2)
    pulse = Pulse("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as deaf, socket.create_server(("127.0.0.1", 0)) as closed:
        gone = closed.getsockname()[1]
        closed.close()
        watch = Watch([("127.0.0.1", pulse.port), ("127.0.0.1", deaf.getsockname()[1]), ("127.0.0.1", gone)])
        try:
            wait_for(lambda: watch.silent(0.2) == [1, 2] and watch.gone(0.2) == [2])
            assert watch.heard[0].answer is not None
            assert not watch.all_answered_since(0.0)
            assert watch.heard[0].at > 0
        finally:
            watch.close()
            pulse.close()
