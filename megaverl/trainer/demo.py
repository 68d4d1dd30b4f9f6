"""The demo: from nothing to a trained Hugging Face checkpoint on a CPU, with the parts that a cluster uses.

A tiny Qwen2 model learns arithmetic word problems from an imperfect teacher (supervised), then learns by GRPO to
answer them carefully. Everything lies in one folder, ``runs/demo``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import megaverl
from megaverl.config.load import load_config
from megaverl.data.arithmetic import write_arithmetic
from megaverl.data.tiny import build_tiny_checkpoint
from megaverl.errors import Problem, UserError
from megaverl.files import write_json
from megaverl.observe.console import Console
from megaverl.observe.heartbeat import Heartbeat

LAYOUTS = {"tp2": 2, "dp2": 1}
"""Name -> tensor parallel size on the demo's two workers."""

PHASES = ("start", "gen", "reward", "ref", "update_actor", "update_weights", "testing", "export")


def run_demo(seed: int = 0, layout: str = "tp2", directory: str | Path = "runs/demo") -> dict[str, Any]:
    """Builds, trains, exports and shows; returns what ``summary.json`` in ``directory`` holds.

    An earlier demo in ``directory`` is moved aside, not overwritten.

    Raises:
        UserError: an unknown layout, or the configurations of the repository are not there.
    """
    if layout not in LAYOUTS:
        raise UserError(Problem(f"unknown layout {layout!r}", "--layout", f"one of {', '.join(LAYOUTS)}"))
    console, began = Console(), time.monotonic()
    folder = _fresh(Path(directory), console)
    console.line(f"demo: seed {seed}, layout {layout}, folder {folder}", "bold")
    with Heartbeat(console) as heartbeat:
        heartbeat.phase("building the start checkpoint and the data")
        _without_progress_bars()
        start = build_tiny_checkpoint(folder / "start", seed)
        data = write_arithmetic(folder / "data", seed)
    common = [f"trainer.seed={seed}", f"actor.layout.tp={LAYOUTS[layout]}"]

    console.line("1/3 supervised warm-up on the answers of an imperfect teacher", "bold")
    warm = folder / "warm"
    sft = _train(
        "sft_tiny.yaml",
        [*common, f"model.path={start}", f"data.train_files=[{data['sft']}]", f"trainer.run_dir={folder / 'sft'}"],
        warm,
        console,
    )
    console.line("2/3 GRPO: eight samples a question, reward 1 for the right answer in the right form", "bold")
    files = [f"data.train_files=[{data['train']}]", f"data.val_files=[{data['val']}]"]
    trained = folder / "trained"
    rl = _train(
        "grpo_tiny.yaml",
        [*common, f"model.path={warm}", *files, f"trainer.run_dir={folder / 'grpo'}"],
        trained,
        console,
    )
    console.line("3/3 the exported checkpoints in plain transformers", "bold")
    with Heartbeat(console) as heartbeat:
        heartbeat.phase("answering")
        answers = compare_answers(warm, trained, data["val"])
    summary = {
        "seed": seed,
        "layout": rl["layout"],
        "accuracy_before": rl["validations"][0][1],
        "accuracy_after": rl["validations"][-1][1],
        "validations": rl["validations"],
        "handoff_bytes": rl["handoff_bytes"],
        "seconds": {"sft": sft["seconds"], "grpo": rl["seconds"], "total": round(time.monotonic() - began, 1)},
        "export_dir": str(trained),
        "run_dir": str(folder / "grpo"),
        "answers": answers,
    }
    write_json(folder / "summary.json", summary)
    _show(summary, console)
    return summary


def _fresh(directory: Path, console: Console) -> Path:
    directory = directory.resolve()
    if directory.exists():
        number = 1
        while (aside := directory.with_name(f"{directory.name}.{number}")).exists():
            number += 1
        directory.rename(aside)
        console.note(f"the earlier demo now lies in {aside}")
    directory.mkdir(parents=True)
    return directory


def _train(config_name: str, overrides: Sequence[str], export: Path, console: Console) -> dict[str, Any]:
    from megaverl.trainer.trainer import Trainer

    file = Path(megaverl.__file__).parent.parent / "configs" / "yaml" / config_name
    if not file.exists():
        raise UserError(Problem("the demo's configurations are not there", str(file), "run it from a clone"))
    with Trainer(load_config(file, [*overrides, f"trainer.export_dir={export}"]), console) as trainer:
        return trainer.train()


def compare_answers(
    before: Path, after: Path, val_file: Path, *, shown: int = 3, tried: int = 64
) -> list[dict[str, Any]]:
    """Greedy answers of two checkpoints, by plain transformers.

    Returns:
        ``shown`` of the first ``tried`` validation questions; those whose answer the training changed come first.
    """
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(val_file).slice(0, tried).to_pylist()
    prompts = [row["prompt"] for row in rows]
    first, second = _greedy(before, prompts), _greedy(after, prompts)
    answers = [
        {
            "question": row["prompt"][-1]["content"],
            "ground_truth": row["reward_model"]["ground_truth"],
            "before": old,
            "after": new,
        }
        for row, old, new in zip(rows, first, second, strict=True)
    ]
    return sorted(answers, key=lambda a: a["before"] == a["after"])[:shown]


def _without_progress_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def _greedy(checkpoint: Path, prompts: Sequence[Any]) -> list[str]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    texts = [tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False) for p in prompts]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    return tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def _show(summary: dict[str, Any], console: Console) -> None:
    seconds = summary["seconds"]["grpo"]
    rows = [
        ("accuracy before", f"{summary['accuracy_before']:.3f}"),
        ("accuracy after", f"{summary['accuracy_after']:.3f}"),
        ("bytes moved at handoffs", str(summary["handoff_bytes"])),
        *((f"seconds in {name}", f"{seconds[name]:.1f}") for name in PHASES if name in seconds),
        ("seconds in all", f"{summary['seconds']['total']:.0f}"),
        ("layout", summary["layout"]),
        ("run directory", summary["run_dir"]),
        ("exported checkpoint", summary["export_dir"]),
    ]
    width = max(len(name) for name, _ in rows)
    console.line("")
    for answer in summary["answers"]:
        console.line(f"Q       {answer['question']}   (right: {answer['ground_truth']})")
        console.line(f"before  {answer['before']!r}")
        console.line(f"after   {answer['after']!r}")
        console.line("")
    for name, value in rows:
        console.line(f"{name:<{width}}  {value}")
