"""Does it learn: validation accuracy on the arithmetic task before and after each algorithm, by seed.

For each seed a tiny checkpoint is built and warmed up by supervised training once; then every algorithm starts from it
with its own recipe. Exit code 1 when an accuracy rises by less than 30 points.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: names in this folder would hide installed packages (kernels)
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.common import ROOT, Result, Table, main, scratch
from megaverl.config.load import load_config
from megaverl.observe.console import Console

RECIPES = {
    "ppo": "ppo_tiny.yaml",
    "grpo": "grpo_tiny.yaml",
    "rloo": "rloo_tiny.yaml",
    "reinforce++": "reinforce_pp_tiny.yaml",
    "dapo": "dapo_tiny.yaml",
    "remax": "remax_tiny.yaml",
    "gspo": "gspo_tiny.yaml",
    "cispo": "cispo_tiny.yaml",
}
LEAST_RISE = 0.30


def measure(arguments: argparse.Namespace) -> Result:
    with scratch() as temporary:
        folder = arguments.keep or temporary
        rows = []
        for seed in arguments.seeds:
            warm, words = warm_up(folder / f"seed_{seed}", seed, arguments.override)
            for algorithm in arguments.algorithms:
                run_dir = folder / f"seed_{seed}" / algorithm
                found = run(RECIPES[algorithm], [*words, f"model.path={warm}", f"trainer.run_dir={run_dir}"])
                rows.append(row_of(algorithm, seed, found))
    ok = all(row["after"] - row["before"] >= LEAST_RISE for row in rows)
    line = f"every accuracy rose by {LEAST_RISE * 100:.0f} points or more" if ok else "an accuracy rose too little"
    return Result({"runs": rows}, [_table(rows)], [line], ok=ok)


def warm_up(folder: Path, seed: int, overrides: list[str]) -> tuple[Path, list[str]]:
    """The checkpoint that knows sums and is careless about the form, and the words that all runs of the seed share.

    A folder that holds it already (``--keep`` of an earlier call) is used as it is.
    """
    from megaverl.data.arithmetic import write_arithmetic
    from megaverl.data.tiny import build_tiny_checkpoint

    warm = folder / "warm"
    common = [f"trainer.seed={seed}", "trainer.loggers=[file,console]", *overrides]
    if not warm.exists():
        start = build_tiny_checkpoint(folder / "start", seed)
        data = write_arithmetic(folder / "data", seed)
        own = [f"model.path={start}", f"data.train_files=[{data['sft']}]", f"trainer.run_dir={folder / 'sft'}"]
        run("sft_tiny.yaml", [*common, *own], export=warm)
    data = {name: folder / "data" / f"{name}.parquet" for name in ("train", "val")}
    return warm, [*common, f"data.train_files=[{data['train']}]", f"data.val_files=[{data['val']}]"]


def run(recipe: str, words: list[str], export: Path | None = None) -> dict[str, Any]:
    """One training from beginning to end; its summary."""
    from megaverl.trainer.trainer import Trainer

    words = [*words, "trainer.resume=never", f"trainer.export_dir={export or 'null'}"]
    if recipe.startswith("ppo"):
        words.append("trainer.export_critic_dir=null")
    config = load_config(ROOT / "configs" / "yaml" / recipe, words)
    with Trainer(config, Console(stream=sys.stderr)) as trainer:
        return trainer.train()


def row_of(algorithm: str, seed: int, summary: dict[str, Any]) -> dict[str, Any]:
    """The numbers of one run; ``reached`` is the first validated step with the rise that is asked for."""
    validations, seconds = summary["validations"], summary["seconds"]
    before = validations[0][1]
    reached = next((step for step, accuracy in validations if accuracy >= before + LEAST_RISE), None)
    return {
        "algorithm": algorithm,
        "seed": seed,
        "layout": summary["layout"],
        "before": before,
        "after": validations[-1][1],
        "reached": reached,
        "steps": summary["steps"],
        "step_seconds": seconds["step"] / summary["steps"],
        "seconds": seconds["step"] + seconds.get("testing", 0.0),
        "phases": seconds,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    columns = ("algorithm", "seed", "before", "after", "points", "+30 by step", "steps", "s/step", "s in all")
    return Table(
        f"Validation accuracy on the arithmetic task, {rows[0]['layout']}",
        columns,
        [
            (
                row["algorithm"],
                row["seed"],
                f"{row['before']:.3f}",
                f"{row['after']:.3f}",
                f"{100 * (row['after'] - row['before']):+.1f}",
                row["reached"] if row["reached"] is not None else "never",
                row["steps"],
                f"{row['step_seconds']:.2f}",
                f"{row['seconds']:.0f}",
            )
            for row in rows
        ],
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds (0 1 2)")
    made.add_argument("--algorithms", nargs="+", choices=list(RECIPES), default=list(RECIPES), help="what to run (all)")
    made.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="a key of all runs")
    made.add_argument("--keep", type=lambda text: Path(text).resolve(), help="folder for checkpoints and runs")
    return made


if __name__ == "__main__":
    sys.exit(main(parser(), measure))
