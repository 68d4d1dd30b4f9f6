"""Signs of life: every worker answers on a port of its own, from a thread that goes on while the worker computes.

Ray notices a process that is gone, not one that is stopped or stuck. The answer says which phase the worker is in and
where in the code, so that of the ranks that wait in a collective the one that is not there can be told.
"""

from __future__ import annotations

import json
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROUND_SECONDS = 1.0
ANSWER_SECONDS = 3.0
COLLECTIVES = ("distributed", "c10d")
"""Parts of the path of the innermost frame of a process that waits for its peers."""


@dataclass(frozen=True)
class Answer:
    """What a worker says of itself.

    Attributes:
        phase: what it is doing; empty between phases.
        seconds: how long it has been doing that.
        place: ``file.py:line function`` of the innermost frame of megaverl.
        waits: the innermost frame is a collective or another message between ranks.
    """

    phase: str
    seconds: float
    place: str
    waits: bool


class Pulse:
    """The worker's side: a thread that answers each connection with one line of JSON."""

    def __init__(self, address: str) -> None:
        self._phase, self._since = "", time.monotonic()
        self._main = threading.get_ident()
        pulse = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.sendall(json.dumps(pulse.state()).encode() + b"\n")

        self._server = socketserver.TCPServer((address, 0), Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="pulse", daemon=True).start()

    def phase(self, name: str) -> None:
        """The worker begins ``name``; empty when it is done."""
        self._phase, self._since = name, time.monotonic()

    def state(self) -> dict[str, Any]:
        """The fields of `Answer`."""
        frame = sys._current_frames().get(self._main)
        waits = frame is not None and any(part in frame.f_code.co_filename for part in COLLECTIVES)
        while frame is not None and "megaverl" not in frame.f_code.co_filename:
            frame = frame.f_back
        place = (
            "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
        )
        return {"phase": self._phase, "seconds": time.monotonic() - self._since, "place": place, "waits": waits}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@dataclass
class Heard:
    """What the driver knows of a rank.

    Attributes:
        answer: the last one.
        at: when it came, on the monotonic clock.
        silent: seconds that were spent asking in vain since.
        refused: seconds of those in which nobody held the port.
    """

    answer: Answer | None = None
    at: float = float("-inf")
    silent: float = 0.0
    refused: float = 0.0


@dataclass
class Watch:
    """The driver's side: a thread for each worker that asks it every `ROUND_SECONDS`.

    Time spent asking is counted, not time: a driver that itself was stopped has missed nothing.

    Args:
        places: (address, port) by rank.
    """

    places: Sequence[tuple[str, int]]
    heard: list[Heard] = field(init=False)

    def __post_init__(self) -> None:
        self.heard = [Heard() for _ in self.places]
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask_on, args=(rank,), name=f"watch {rank}", daemon=True)
            for rank in range(len(self.places))
        ]
        for thread in self._threads:
            thread.start()

    def silent(self, seconds: float) -> list[int]:
        """Ranks that have not answered for ``seconds``."""
        return [rank for rank, h in enumerate(self.heard) if h.silent >= seconds]

    def gone(self, seconds: float) -> list[int]:
        """Ranks whose port nobody has held for ``seconds``: the process has ended."""
        return [rank for rank, h in enumerate(self.heard) if h.refused >= seconds]

    def all_answered_since(self, moment: float) -> bool:
        """Whether every worker has answered after ``moment`` of the monotonic clock."""
        return all(h.at > moment for h in self.heard)

    def close(self) -> None:
        self._stop.set()

    def _ask_on(self, rank: int) -> None:
        heard = self.heard[rank]
        while not self._stop.is_set():
            began = time.monotonic()
            refused = False
            try:
                heard.answer = ask(*self.places[rank])
                heard.at, heard.silent, heard.refused = time.monotonic(), 0.0, 0.0
                self._stop.wait(max(0.0, ROUND_SECONDS - (time.monotonic() - began)))
                continue
            except ConnectionRefusedError:
                refused = True
            except (OSError, ValueError):
                pass
            self._stop.wait(max(0.0, ROUND_SECONDS - (time.monotonic() - began)))
            spent = min(time.monotonic() - began, ROUND_SECONDS + ANSWER_SECONDS)
            heard.silent += spent
            heard.refused = heard.refused + spent if refused else 0.0


def ask(address: str, port: int) -> Answer:
    """The worker's state; raises OSError when it does not say within `ANSWER_SECONDS`."""
    with socket.create_connection((address, port), timeout=ANSWER_SECONDS) as connection:
        connection.settimeout(ANSWER_SECONDS)
        with connection.makefile("rb") as lines:
            return Answer(**json.loads(lines.readline()))
