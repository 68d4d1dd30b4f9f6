"""``megaverl train``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megaverl.commands.config import print_config
from megaverl.commands.output import print_json, print_notes, stdout_to_stderr
from megaverl.config.load import load_config
from megaverl.config.rules import check_rules
from megaverl.config.schema import Config
from megaverl.errors import Problem, Problems, UserError


def run(path: str, overrides: Sequence[str], *, dry_run: bool, as_json: bool) -> int:
    """Trains, or with ``dry_run`` prints the resolved configuration; ``as_json`` prints the run's summary."""
    refuse_word_as_file(path)
    config = load_config(path, overrides)
    if dry_run:
        problems = Problems()
        notes = check_rules(config, problems)
        problems.raise_if_any()
        print_notes(notes)
        print_config(config, as_json=as_json)
        return 0
    with stdout_to_stderr(active=as_json):
        summary = _train(config)
    if as_json:
        print_json(summary)
    return 0


def refuse_word_as_file(path: str) -> None:
    """``megaverl train rollout.n=8`` lacks the file: say so, instead of looking for a file of that name.

    Raises:
        UserError: the word is of the form key=value with a dotted key.
    """
    key, equals, _ = path.partition("=")
    if equals and "." in key and not path.endswith((".yaml", ".yml")):
        raise UserError(
            Problem(
                f"the first word must be the configuration file, got {path}",
                where="command line",
                fix=f"e.g. configs/yaml/grpo_gsm8k.yaml {path}",
            )
        )


def _train(config: Config) -> dict[str, Any]:
    from megaverl.trainer.trainer import Trainer

    with Trainer(config) as trainer:
        return trainer.train()
