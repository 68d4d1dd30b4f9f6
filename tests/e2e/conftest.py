"""Shared by the end-to-end tests: one tiny checkpoint with its data, one Ray for all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from megaverl.config.load import load_config
from megaverl.config.schema import Config
from megaverl.data.arithmetic import write_arithmetic
from megaverl.data.tiny import build_tiny_checkpoint

RECIPES = Path(__file__).parents[2] / "configs" / "yaml"

SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str) % 7 / 6, "characters": len(solution_str)}
"""


@dataclass(frozen=True)
class Task:
    """The arithmetic task: a random checkpoint, its rows, and a scorer that tells random texts apart."""

    model: Path
    rows: dict[str, Path]
    scorer: Path

    def config(self, recipe: str, run_dir: Path, *overrides: str) -> Config:
        """The recipe on this task; nothing is exported unless asked for."""
        kind = "sft" if recipe.startswith("sft") else "train"
        return load_config(
            RECIPES / recipe,
            [
                f"model.path={self.model}",
                f"data.train_files=[{self.rows[kind]}]",
                *([f"data.val_files=[{self.rows['val']}]"] if kind == "train" else []),
                f"trainer.run_dir={run_dir}",
                "trainer.export_dir=null",
                *([f"reward.function.path={self.scorer}"] if kind == "train" else []),
                *overrides,
            ],
        )


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    folder = tmp_path_factory.mktemp("task")
    model = build_tiny_checkpoint(folder / "model", seed=0)
    scorer = folder / "scorer.py"
    scorer.write_text(SCORER)
    return Task(model, write_arithmetic(folder / "data", 0, train=64, val=16, sft=512, pairs=64), scorer)


@pytest.fixture(scope="session", autouse=True)
def one_ray():
    """Runs of this session share the Ray that the first of them starts."""
    yield
    import ray

    ray.shutdown()


@pytest.fixture(scope="session")
def read_metrics() -> Callable[[Path], list[dict[str, float]]]:
    def read(run_dir: Path) -> list[dict[str, float]]:
        return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]

    return read
