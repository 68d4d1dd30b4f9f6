"""Writes ``docs/from-verl.md`` from the table: ``python -m megaverl.config.verl_keys_doc > docs/from-verl.md``."""

from __future__ import annotations

import json

from megaverl.config.verl_keys import DEFAULTS, SECTIONS
from megaverl.config.verl_keys_convert import ESTIMATORS, Row

HEAD = """\
# Coming from verl

A command line of verl's runs with the module's name changed:

    python -m megaverl.train algorithm.adv_estimator=grpo data.train_files=gsm8k/train.parquet data.val_files=gsm8k/test.parquet \\
        actor_rollout_ref.model.path=models/Qwen2.5-7B-Instruct actor_rollout_ref.rollout.n=5 ... trainer.n_gpus_per_node=8

Every word is translated, and what it became is printed. Keys without effect here are listed with the reason; a key that nobody knows is refused with the
nearest name, and so is a value that asks for what megaverl does not do. Hydra's `+key=value` and `++key=value` are `key=value`; `~key` takes a default of verl's
away and has no effect. `--config-path` and `--config-name` are taken and have no effect. `--dry-run` shows the whole configuration that comes out, to be kept as a
file of your own. Keys of ours may stand among verl's, and verl's after a file of ours: `megaverl train mine.yaml actor_rollout_ref.rollout.n=16`.

Where they differ from ours, verl's defaults hold for a command line that names no file of ours:

{defaults}

What else differs:

- `model.path` is a folder; no hub is asked. A run directory holds everything: configuration, metrics, checkpoints, logs.
- Micro-batches are made by tokens. A number of rows becomes that many of the longest sequence.
- `actor.optimizer.warmup_steps` counts updates, verl's `lr_warmup_steps` steps; the translation multiplies.
- `trainer.logger` without the key is verl's `[console, wandb]`; here it is `[console, file]`.
- `algorithm.adv_estimator` becomes `algorithm.name`: {estimators}. One that this version lacks is refused.

This page is made from the table in `megaverl/config/verl_keys.py`.
"""


def page() -> str:
    """The whole page."""
    defaults = "\n".join(f"    {key}={value}" for key, value in DEFAULTS.items())
    estimators = ", ".join(f"`{verl}` is `{ours}`" for verl, ours in ESTIMATORS.items())
    parts = [HEAD.replace("{defaults}", defaults).replace("{estimators}", estimators)]
    for title, rows in SECTIONS.items():
        lines = [f"## {title}", "", "| verl | here | remark |", "| --- | --- | --- |"]
        parts.append("\n".join([*lines, *map(_line, rows)]) + "\n")
    return "\n".join(parts)


def _line(row: Row) -> str:
    here, remark = ", ".join(f"`{key.strip()}`" for key in row.to.split(",") if key), row.text
    if row.kind == "same":
        here, remark = "the same", row.text
    elif row.kind == "nothing":
        here, remark = "no effect", row.text
    elif row.kind == "only":
        values = " or ".join(f"`{v if isinstance(v, str) else json.dumps(v)}`" for v in row.values)
        here = f"{values} only, no effect" if values else "refused"
    return f"| `{row.key}` | {here} | {remark} |"


if __name__ == "__main__":
    print(page(), end="")
