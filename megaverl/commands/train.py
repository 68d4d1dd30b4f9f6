"""``megaverl train``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from megaverl.commands.output import print_json, print_notes, print_text, stdout_to_stderr
from megaverl.config.load import config_yaml, load_config
from megaverl.config.schema import Config
from megaverl.errors import Problem, UserError


def run(path: str, overrides: Sequence[str], *, dry_run: bool, as_json: bool) -> int:
    """Trains, or with ``dry_run`` prints command, configuration and plan; ``as_json`` prints the run's summary."""
    refuse_word_as_file(path)
    config = load_config(path, overrides)
    if dry_run:
        _show(config, [path, *overrides], as_json=as_json)
        return 0
    with stdout_to_stderr(active=as_json):
        summary = _train(config)
    if as_json:
        print_json(summary)
    return 0


def _show(config: Config, words: Sequence[str], *, as_json: bool) -> None:
    """A YAML file that `load_config` reads, with the command and the plan as comments; or all of it as JSON."""
    from megaverl.trainer.dry_run import dry_run

    found = dry_run(config)
    print_notes(found.notes)
    command = shlex.join(["megaverl", "train", *words])
    if as_json:
        document = {"command": command, "layout": str(found.layout), "model": found.model, "plan": found.plan}
        print_json({**document, "config": config.model_dump()})
        return
    comments = "".join(f"# {line}\n" for line in (f"command: {command}", *found.lines()))
    print_text(comments + config_yaml(config))


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
