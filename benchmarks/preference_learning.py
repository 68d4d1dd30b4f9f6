"""Does it learn from preferences: accuracy on held-out pairs for rm, dpo and kto, and GRPO with that reward model.

For each seed a tiny checkpoint is built and warmed up by supervised training; each algorithm starts from it with its
own recipe on generated pairs. The reward model then scores GRPO. Exit code 1 when an accuracy stays at 0.9 or below, or
GRPO does not raise the score.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: names in this folder would hide installed packages (kernels)
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.common import Result, Table, main, scratch
from benchmarks.learning import run, warm_up

ROWS = {"rm": "pairs", "dpo": "pairs", "kto": "judged"}
LEAST_ACCURACY = 0.9


def measure(arguments: argparse.Namespace) -> Result:
    with scratch() as temporary:
        rows = []
        for seed in arguments.seeds:
            folder = (arguments.keep or temporary) / f"seed_{seed}"
            warm, words = warm_up(folder, seed, arguments.override)
            for algorithm, kind in ROWS.items():
                own = [
                    *words,
                    f"data.train_files=[{folder / 'data' / f'{kind}.parquet'}]",
                    f"data.val_files=[{folder / 'data' / 'val_pairs.parquet'}]",
                    f"model.path={warm}",
                    f"trainer.run_dir={folder / algorithm}",
                ]
                export = folder / "reward_model" if algorithm == "rm" else None
                rows.append(row_of(algorithm, seed, run(f"{algorithm}_tiny.yaml", own, export)))
            own = [*words, f"model.path={warm}", f"reward.model.path={folder / 'reward_model'}"]
            own += [f"trainer.total_steps={arguments.grpo_steps}", f"trainer.run_dir={folder / 'grpo'}"]
            rows.append(row_of("grpo", seed, run("grpo_tiny.yaml", own)))
    ok = all(map(passes, rows))
    line = f"every accuracy is above {LEAST_ACCURACY} and every score rose" if ok else "a run learnt too little"
    return Result({"runs": rows}, [_table(rows)], [line], ok=ok)


def row_of(algorithm: str, seed: int, summary: dict[str, Any]) -> dict[str, Any]:
    """The numbers of one run: first and last validation (accuracy on pairs; of GRPO the reward model's mean score)."""
    validations = summary["validations"]
    return {
        "algorithm": algorithm,
        "seed": seed,
        "layout": summary["layout"],
        "before": validations[0][1],
        "after": validations[-1][1],
        "steps": summary["steps"],
        "step_seconds": summary["seconds"]["step"] / summary["steps"],
    }


def passes(row: dict[str, Any]) -> bool:
    """Whether a run learnt enough."""
    return row["after"] > (row["before"] if row["algorithm"] == "grpo" else LEAST_ACCURACY)


def _table(rows: list[dict[str, Any]]) -> Table:
    return Table(
        f"Accuracy on 256 held-out pairs (grpo: mean score of the rm of the same seed), {rows[0]['layout']}",
        ("algorithm", "seed", "before", "after", "steps", "s/step"),
        [
            (
                row["algorithm"],
                row["seed"],
                f"{row['before']:.3f}",
                f"{row['after']:.3f}",
                row["steps"],
                f"{row['step_seconds']:.2f}",
            )
            for row in rows
        ],
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds (0 1 2)")
    made.add_argument("--grpo-steps", type=int, default=20, help="steps of GRPO with the reward model (20)")
    made.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="a key of all runs")
    made.add_argument("--keep", type=lambda text: Path(text).resolve(), help="folder for checkpoints and runs")
    return made


if __name__ == "__main__":
    sys.exit(main(parser(), measure))
