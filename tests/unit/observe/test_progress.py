"""The bar on a terminal; plain lines in a pipe."""

from __future__ import annotations

import io
import re

import pytest

from megaverl.observe.console import Console
from megaverl.observe.heartbeat import Heartbeat


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_below_the_lines():
    stream = Terminal()
    console = Console(stream)
    heartbeat = Heartbeat(console)
    with console.progress_bar():
        heartbeat.step(4, 10)
        heartbeat.phase("generating [really]")
        console.line("step 3/10 · reward 0.5")
        console.warn("[not markup]")
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "step 3/10 · reward 0.5\n" in shown
    assert "warning: [not markup]" in shown
    assert re.search(r"step\s+3/10 .*generating \[really\]", shown)
    assert not console.has_bar
    before = len(stream.getvalue())
    console.line("after")
    assert stream.getvalue()[before:] == "after\n"


def test_a_pipe_gets_lines_alone():
    stream = io.StringIO()
    console = Console(stream)
    with console.progress_bar():
        Heartbeat(console).step(4, 10)
        console.line("step 3/10")
        assert not console.has_bar
    assert stream.getvalue() == "step 3/10\n"


def test_an_error_takes_the_bar_away():
    console = Console(Terminal())
    with pytest.raises(RuntimeError), console.progress_bar():
        raise RuntimeError
    assert not console.has_bar


def test_a_bar_within_a_bar_is_one_bar():
    console = Console(Terminal())
    with console.progress_bar():
        with console.progress_bar():
            pass
        assert console.has_bar
