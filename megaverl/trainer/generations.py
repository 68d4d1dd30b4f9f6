"""Responses of a validation that are kept to be read: a JSONL file in the run directory, a table in the trackers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaverl.data.dataset import PromptItem
from megaverl.files import write_text
from megaverl.trainer.experience import Experience
from megaverl.trainer.run import Run

COLUMNS = ("prompt", "response", "ground_truth", "score")


def chosen(prompts: int, wanted: int) -> list[int]:
    """Prompts spread evenly over all, the same at every validation so that their responses can be compared."""
    count = min(prompts, wanted)
    return [i * prompts // count for i in range(count)]


def keep_generations(run: Run, items: Sequence[PromptItem], experience: Experience) -> Path | None:
    """Writes all samples of ``trainer.val_generations`` prompts to ``generations/step_N.jsonl``, the first of each also
    as a table to the trackers. Returns the file; None when nothing is kept.

    A row holds ``step, data_source, row, sample, prompt, response, ground_truth, score`` and what else the scorer
    returned.
    """
    picked = chosen(len(items), run.config.trainer.val_generations) if run.config.trainer.val_generations else []
    if not picked or experience.texts is None:
        return None
    rows = [row for prompt in picked for row in _rows(run, items[prompt], prompt, experience)]
    path = run.directory / "generations" / f"step_{run.step}.jsonl"
    write_text(path, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows))
    table = [[row[name] for name in COLUMNS] for row in rows if row["sample"] == 0]
    run.trackers.table("val/generations", COLUMNS, table, run.step)
    return path


def _rows(run: Run, item: PromptItem, prompt: int, experience: Experience) -> list[dict[str, Any]]:
    assert experience.texts is not None
    tokenizer = run.prepared.tokenizer
    samples = [i for i, group in enumerate(experience.groups) if group == prompt]
    return [
        {
            "step": run.step,
            "data_source": item.data_source,
            "row": item.key,
            "sample": number,
            "prompt": tokenizer.decode(item.prompt_ids),
            "response": experience.texts[i],
            "ground_truth": item.ground_truth,
            "score": experience.scores[i],
            **{f"reward/{name}": value for name, value in experience.extras[i].items()},
        }
        for number, i in enumerate(samples)
    ]
