"""``megaverl train``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Any

from megaverl.commands.output import print_json, print_notes, print_text, print_text_as_it_is, stdout_to_stderr
from megaverl.config.load import config_yaml, load_config
from megaverl.config.rules import check_rules
from megaverl.config.schema import Config
from megaverl.config.verl_keys_translate import is_verl, translate
from megaverl.errors import Problem, Problems, UserError


def run(words: Sequence[str], *, dry_run: bool, submit: bool, as_json: bool) -> int:
    """Trains, prints command, configuration and plan (``dry_run``) or has a cluster do it (``submit``).

    ``as_json`` prints the run's summary or, for a submitted run, the job's id without waiting for its end.

    Args:
        words: the configuration file, then ``key=value``; or a command line of verl's, which names no file.
    """
    path, overrides = _file_and_overrides(list(words))
    config = load_config(path, _translated(overrides, whole=path is None))
    if dry_run:
        _show(config, words, as_json=as_json)
        return 0
    if submit:
        return _submit(config, words, as_json=as_json)
    with stdout_to_stderr(active=as_json):
        summary = _train(config)
    if as_json:
        print_json(summary)
    return 0


def _file_and_overrides(words: list[str]) -> tuple[str | None, list[str]]:
    """The configuration file and the rest; no file for a command line of verl's own.

    Raises:
        UserError: there is no file, and the words are not verl's.
    """
    if not words:
        raise UserError(
            Problem(
                "the following arguments are required: CONFIG",
                where="command line",
                fix="e.g. `megaverl train configs/yaml/grpo_gsm8k.yaml model.path=FOLDER`",
            )
        )
    if not _is_override(words[0]):
        return words[0], words[1:]
    if any(map(is_verl, words)):
        return None, words
    raise UserError(  # `megaverl train rollout.n=8` lacks the file: say so, instead of looking for a file of that name
        Problem(
            f"the first word must be the configuration file, got {words[0]}",
            where="command line",
            fix=f"e.g. configs/yaml/grpo_gsm8k.yaml {words[0]}",
        )
    )


def _is_override(word: str) -> bool:
    key, equals, _ = word.partition("=")
    return word[:1] in "+~" or (bool(equals) and "." in key and not word.endswith((".yaml", ".yml")))


def _translated(words: list[str], *, whole: bool) -> list[str]:
    """Our words for those of verl's; what became of them goes to standard error.

    Raises:
        UserError: with every word that is unknown or asks for what there is not.
    """
    if not whole and not any(map(is_verl, words)):
        return words
    problems = Problems()
    done = translate(words, problems, whole=whole)
    for line in done.lines():
        print(f"verl: {line}", file=sys.stderr)
    problems.raise_if_any()
    return done.words


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


def _submit(config: Config, words: Sequence[str], *, as_json: bool) -> int:
    from megaverl.workers.submission import follow
    from megaverl.workers.submission import submit as submit_job

    problems = Problems()
    check_rules(config, problems)
    problems.raise_if_any()
    job = submit_job(config, words)
    if as_json:
        print_json({"job": job})
        return 0
    print(f"job {job}; Ctrl-C leaves it running (`ray job logs -f {job}`, `ray job stop {job}`)", file=sys.stderr)
    try:
        return follow(config, job, print_text_as_it_is)
    except KeyboardInterrupt:
        print(f"the run goes on as job {job}", file=sys.stderr)
        return 0


def _train(config: Config) -> dict[str, Any]:
    from megaverl.trainer.trainer import Trainer

    with Trainer(config) as trainer:
        return trainer.train()
