"""Preparation of published data sets as parquet files in the row schema, and the check of files that exist."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megaverl.data.files import SUFFIXES, Record, read_all, shorten
from megaverl.data.schema import Row
from megaverl.data.write import new_folder, write_rows
from megaverl.errors import Problem, Problems, UserError

if TYPE_CHECKING:
    from megaverl.config.schema import DataConfig
    from megaverl.data.report import DataReport
    from megaverl.data.tokenizer import Tokenizer
    from megaverl.rewards.registry import Registry

GSM8K_SOURCE = "openai/gsm8k"
GSM8K_INSTRUCTION = "Work through the problem step by step, then write the final answer on its own line after ####."
SPLITS = ("train", "test")
_FINAL = re.compile(r"####\s*(-?[0-9][0-9,]*(?:\.[0-9]+)?)\s*$")


@dataclass(frozen=True)
class PrepareReport:
    """What was written: split -> file, and split -> rows."""

    paths: dict[str, Path]
    rows: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"paths": {k: str(v) for k, v in self.paths.items()}, "rows": self.rows}

    def lines(self) -> list[str]:
        """One line a file."""
        return [f"{path}: {self.rows[split]:,} rows" for split, path in self.paths.items()]


def prepare_gsm8k(
    source: str | Path,
    out_dir: str | Path,
    *,
    instruction: str = GSM8K_INSTRUCTION,
    overwrite: bool = False,
) -> PrepareReport:
    """Writes train.parquet and test.parquet from the published GSM8K.

    Args:
        source: folder with a file or a folder per split: ``train.jsonl``, ``train.parquet``, ``train-*.parquet``,
            ``train.arrow``, or an Arrow folder ``train/`` as datasets.save_to_disk writes. Columns question, answer.
        instruction: sentence put after each question.

    Raises:
        UserError: a split is missing, a row has no question or no final answer, or a file exists already.
    """
    problems = Problems()
    inputs = {split: find_split(source, split, problems) for split in SPLITS}
    problems.raise_if_any()
    rows = {
        split: _gsm8k_rows(read_all(paths, problems), split, instruction, problems) for split, paths in inputs.items()
    }
    if problems.found:
        raise UserError(shorten(problems.found, limit=20, what=str(source)))
    folder = new_folder(out_dir, [f"{split}.parquet" for split in SPLITS], overwrite=overwrite)
    paths = {split: write_rows(folder / f"{split}.parquet", rows[split]) for split in SPLITS}
    return PrepareReport(paths, {split: len(rows[split]) for split in SPLITS})


def find_split(source: str | Path, split: str, problems: Problems) -> list[Path]:
    """The files or the folder of one split in the folder ``source``; none or several forms of it are a problem."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        problem = Problem("no such folder", str(folder), f"Give a folder with one of {_forms('train')}.")
        if problem not in problems.found:  # asked once for each split
            problems.found.append(problem)
        return []
    single = [folder / f"{split}{suffix}" for suffix in SUFFIXES if (folder / f"{split}{suffix}").is_file()]
    forms = [[path] for path in single]
    if (folder / split).is_dir():
        forms.append([folder / split])
    parts = sorted(p for p in folder.glob(f"{split}-*") if p.is_file() and p.suffix in SUFFIXES)
    forms += [parts] if parts else []
    if not forms:
        problems.add(f"no {split} split in the folder", where=str(folder), fix=f"It needs one of {_forms(split)}.")
    elif len(forms) > 1:
        names = ", ".join(form[0].name for form in forms)
        problems.add(f"several {split} splits: {names}", where=str(folder), fix="Leave one of them there.")
    return forms[0] if len(forms) == 1 else []


def _forms(split: str) -> str:
    return ", ".join([*(f"{split}{suffix}" for suffix in SUFFIXES), f"{split}-*.parquet", f"{split}/"])


def _gsm8k_rows(records: Sequence[Record], split: str, instruction: str, problems: Problems) -> list[Row]:
    rows = []
    for number, record in enumerate(records):
        texts = {name: record.values.get(name) for name in ("question", "answer")}
        bad = [name for name, text in texts.items() if not isinstance(text, str) or not text.strip()]
        for name in bad:
            state = "is missing" if name not in record.values else f"must be a text, this is {texts[name]!r}"
            problems.add(
                f"the {name} {state}", where=f"{record.where}, key {name}", fix="GSM8K has question and answer."
            )
        if bad:
            continue
        final = _FINAL.search(texts["answer"])
        if final is None:
            fix = "A GSM8K answer ends with a line '#### number'."
            problems.add("no final answer", where=f"{record.where}, key answer", fix=fix)
            continue
        rows.append(
            Row(
                data_source=GSM8K_SOURCE,
                prompt=[{"role": "user", "content": f"{texts['question'].strip()} {instruction}"}],
                ability="math",
                ground_truth=final.group(1).replace(",", ""),
                extra_info={"split": split, "index": number, **texts},
                response=texts["answer"].strip(),  # for supervised training on the worked answers
            )
        )
    return rows


def check_data(
    files: Sequence[str | Path],
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    kind: Literal["rl", "sft", "pair", "kto"] = "rl",
    vocab: int | None = None,
    custom_reward: bool = False,
    registry: Registry | None = None,
    reward_model: bool = False,
    key: str = "data.train_files",
) -> DataReport:
    """Checks files as a run would, and reports counts and lengths.

    Args:
        vocab: rows of the model's embedding; the tokenizer's own size when None.

    Raises:
        UserError: everything that is wrong, together.
    """
    from megaverl.data.dataset import load_prompts
    from megaverl.data.preference_dataset import load_preferences

    problems = Problems()
    options = {"kind": kind, "vocab": tokenizer.size if vocab is None else vocab, "key": key}
    if kind in ("pair", "kto"):
        data = load_preferences(files, config, tokenizer, problems, **options)
    else:
        options |= {"custom_reward": custom_reward, "registry": registry, "reward_model": reward_model}
        data = load_prompts(files, config, tokenizer, problems, **options)
    problems.raise_if_any()
    return data.report
