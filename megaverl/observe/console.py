"""What the user sees while a run goes on: one line a step. Colours on a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from megaverl.observe.metrics import first_of

if TYPE_CHECKING:
    from megaverl.observe.progress import ProgressBar

# The first name that a step has is shown.
REWARD = ("critic/score/mean", "critic/rewards/mean")
KL = ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl")
ENTROPY = ("actor/entropy",)
CLIP = ("actor/pg_clipfrac",)
LOSS = ("train/loss",)
ACCURACY = ("rewards/accuracies",)
GRAD_NORM = ("actor/grad_norm", "train/grad_norm")
THROUGHPUT = ("perf/throughput",)
STEP_SECONDS = ("timing_s/step",)


class Console:
    """Prints lines, from any thread, and knows when it printed last.

    Args:
        stream: where to; standard output at the time of printing when None.
        color: None looks whether the stream is a terminal.
    """

    def __init__(self, stream: TextIO | None = None, color: bool | None = None) -> None:
        self._stream = stream
        self._color = color
        self._lock = threading.Lock()
        self._rich: Any = None
        self._bar: ProgressBar | None = None
        self.last_output = time.monotonic()

    def line(self, text: str, style: str = "") -> None:
        """Prints one line at once. ``style`` is one of rich's (``bold``, ``yellow``), used on a terminal only."""
        with self._lock:
            stream = self._stream or sys.stdout
            if self._bar is not None:
                self._bar.print(text, style)
            elif style and self._has_color(stream):
                self._print_styled(stream, text, style)
            else:
                stream.write(f"{text}\n")
            stream.flush()
            self.last_output = time.monotonic()

    def note(self, text: str) -> None:
        """A line of information."""
        self.line(f"note: {text}", "cyan")

    def warn(self, text: str) -> None:
        """A line of advice or warning."""
        self.line(f"warning: {text}", "yellow")

    @property
    def has_bar(self) -> bool:
        """Whether a progress bar shows what goes on."""
        return self._bar is not None

    def show(self, **news: Any) -> None:
        """Tells the progress bar, where there is one, any of ``step``, ``total`` and ``phase``."""
        if self._bar is not None:
            self._bar.show(**news)

    @contextmanager
    def progress_bar(self) -> Iterator[None]:
        """Keeps a progress bar below the lines while the context is open; none where the stream is no terminal."""
        stream = self._stream or sys.stdout
        if self._bar is not None or not stream.isatty():
            yield
            return
        from megaverl.observe.progress import ProgressBar

        with ProgressBar(stream) as bar:
            self._bar = bar
            try:
                yield
            finally:
                self._bar = None

    def _has_color(self, stream: TextIO) -> bool:
        return stream.isatty() if self._color is None else self._color

    def _print_styled(self, stream: TextIO, text: str, style: str) -> None:
        if self._rich is None or self._rich.file is not stream:
            from rich.console import Console as RichConsole

            self._rich = RichConsole(
                file=stream, highlight=False, markup=False, emoji=False, force_terminal=self._color
            )
        self._rich.print(text, style=style, soft_wrap=True)


def step_line(metrics: Mapping[str, float], step: int, total: int | None) -> str:
    """One line for one training step; RL when there is a reward, else supervised.

    ``step 12/60 · reward 0.61 · KL 0.004 · entropy 1.2 · clip 0.01 · 310 tok/s · 2.1 s``
    ``step 12/60 · loss 1.23 · grad 0.8 · 310 tok/s · 2.1 s``

    A number that the step does not have is left out.
    """
    parts = [f"step {step}/{total}" if total else f"step {step}"]
    reward = first_of(metrics, REWARD)
    if reward is not None:
        parts += _part("reward {}", reward, 2)
        parts += _part("KL {}", first_of(metrics, KL), 3)
        parts += _part("entropy {}", first_of(metrics, ENTROPY), None)
        parts += _part("clip {}", first_of(metrics, CLIP), 2)
    else:
        parts += _part("loss {}", first_of(metrics, LOSS), 2)
        parts += _part("accuracy {}", first_of(metrics, ACCURACY), 2)
        parts += _part("grad {}", first_of(metrics, GRAD_NORM), None)
    parts += _part("{} tok/s", first_of(metrics, THROUGHPUT), 0)
    parts += _part("{} s", first_of(metrics, STEP_SECONDS), 1)
    return " · ".join(parts)


def validation_line(metrics: Mapping[str, float], step: int, seconds: float | None = None) -> str:
    """One line for one validation: ``validation at step 20 · gsm8k/reward/mean@1 0.41 · 3.2 s``.

    Shows the metrics under ``val-core/`` or, without any, those under ``val/``.
    """
    parts = [f"validation at step {step}"]
    prefix = "val-core/" if any(name.startswith("val-core/") for name in metrics) else "val/"
    for name, value in metrics.items():
        if name.startswith(prefix):
            parts += _part(f"{name.removeprefix(prefix)} {{}}", value, 3)
    parts += _part("{} s", seconds, 1)
    return " · ".join(parts)


def short(value: float, digits: int | None) -> str:
    """A number for the eye: ``digits`` after the point, or two significant ones when None.

    A value too small for the digits is shown as ``4e-05``, never as a false 0.
    """
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if digits is None:
        return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}"
    text = f"{value:.{digits}f}"
    if float(text) != 0:
        return text
    return f"{0:.{digits}f}" if value == 0 or digits == 0 else f"{value:.0e}"


def _part(form: str, value: float | None, digits: int | None) -> list[str]:
    return [] if value is None else [form.format(short(value, digits))]
