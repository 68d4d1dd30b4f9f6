"""The lines of a run."""

from __future__ import annotations

import io
import threading

import pytest

from megaverl.observe.console import Console, short, step_line, validation_line

RL = {
    "critic/score/mean": 0.6094,
    "actor/kl_loss": 0.0041,
    "actor/entropy": 1.234,
    "actor/pg_clipfrac": 0.0112,
    "perf/throughput": 309.7,
    "timing_s/step": 2.09,
}


def test_the_line_of_a_step_has_exactly_this_form():
    assert step_line(RL, 12, 60) == "step 12/60 · reward 0.61 · KL 0.004 · entropy 1.2 · clip 0.01 · 310 tok/s · 2.1 s"


def test_the_line_of_a_supervised_step_has_exactly_this_form():
    metrics = {"train/loss": 1.234, "actor/grad_norm": 0.8, "perf/throughput": 310, "timing_s/step": 2.1}
    assert step_line(metrics, 12, 60) == "step 12/60 · loss 1.23 · grad 0.8 · 310 tok/s · 2.1 s"


def test_what_a_step_does_not_have_is_left_out():
    assert step_line({"critic/score/mean": 1}, 3, None) == "step 3 · reward 1.00"
    assert step_line({}, 3, 4) == "step 3/4"


def test_without_a_reference_the_kl_is_that_of_the_update():
    metrics = {name: value for name, value in RL.items() if name != "actor/kl_loss"} | {"actor/ppo_kl": 0.002}
    assert " · KL 0.002 · " in step_line(metrics, 1, 2)


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.0, 3, "0.000"),
        (-0.0, 3, "0.000"),
        (0.0001, 3, "1e-04"),
        (-0.0001, 3, "-1e-04"),
        (-0.002, 3, "-0.002"),
        (0.4, 0, "0"),
        (12345.6, 0, "12346"),
        (0.053, None, "0.053"),
        (9.96, None, "10"),
        (123.4, None, "123"),
        (0.0, None, "0"),
        (float("nan"), 2, "nan"),
        (float("-inf"), None, "-inf"),
    ],
)
def test_short_numbers_never_show_a_false_zero(value, digits, text):
    assert short(value, digits) == text


def test_the_line_of_a_validation():
    metrics = {"val-core/gsm8k/reward/mean@1": 0.41, "val-aux/length": 7, "val/other": 1}
    assert validation_line(metrics, 20, 3.21) == "validation at step 20 · gsm8k/reward/mean@1 0.410 · 3.2 s"
    assert validation_line({"val/accuracy": 0.5}, 0) == "validation at step 0 · accuracy 0.500"


def test_a_pipe_gets_plain_lines_a_terminal_colours():
    pipe, terminal = io.StringIO(), io.StringIO()
    Console(pipe).warn("x [bold]y[/bold] :smile:")
    Console(terminal, color=True).warn("x [bold]y[/bold] :smile:")
    assert pipe.getvalue() == "warning: x [bold]y[/bold] :smile:\n"
    assert "\x1b[" in terminal.getvalue()
    assert "x [bold]y[/bold] :smile:" in terminal.getvalue()


def test_a_long_line_is_not_broken_on_a_terminal():
    stream = io.StringIO()
    Console(stream, color=True).line("word " * 100, "bold")
    assert stream.getvalue().count("\n") == 1


def test_lines_of_many_threads_stay_whole():
    stream = io.StringIO()
    console = Console(stream)
    threads = [threading.Thread(target=lambda i=i: [console.line(f"{i}" * 50) for _ in range(50)]) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 400
    assert all(len(line) == 50 and len(set(line)) == 1 for line in lines)
