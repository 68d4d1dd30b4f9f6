"""The first signal asks, the second ends."""

from __future__ import annotations

import os
import pickle
import signal

import pytest

from megaverl.observe.console import Console
from megaverl.trainer.signals import Stopped, StopSignals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_noted_and_the_second_one_ends_the_run(number, capsys):
    before = signal.getsignal(number)
    with StopSignals(Console()) as signals:
        assert signals.received is None
        os.kill(os.getpid(), number)
        assert signals.received == number
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before
    captured = capsys.readouterr()
    assert f"{signal.Signals(number).name}: the run stops after this step" in captured.out + captured.err


def test_the_exit_code_is_that_of_the_signal():
    error = Stopped(signal.SIGTERM, "stopped")
    assert error.exit_code == 143
    assert pickle.loads(pickle.dumps(error)).exit_code == 143
