"""``megaverl demo``."""

from __future__ import annotations

from pathlib import Path

from megaverl.commands.output import print_json, stdout_to_stderr


def run(seed: int, layout: str, directory: str, *, as_json: bool) -> int:
    """Runs the demo; with ``as_json`` its summary is the JSON document."""
    from megaverl.trainer.demo import run_demo

    with stdout_to_stderr(active=as_json):
        summary = run_demo(seed=seed, layout=layout, directory=Path(directory))
    if as_json:
        print_json(summary)
    return 0
