"""Generated word problems with one sum each, answered in GSM8K's form: the task of the demo and of the tests.

The starting model of the demo learns from an imperfect demonstrator, so that its samples are sometimes right,
sometimes careless and sometimes in the wrong form; reinforcement learning then has something to choose among.
Questions whose hash is divisible by ten are held out: they are in no training file, only in validation.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megaverl.data.schema import Row
from megaverl.data.write import new_folder, write_rows, write_table

DATA_SOURCE = "megaverl/arithmetic"
NAMES = ("Ada", "Ben", "Chloe", "Dan", "Emma", "Finn")
ITEMS = ("apples", "books", "coins", "eggs", "pens", "shells")
TEMPLATES = (
    ("+", "{name} has {a} {item} and finds {b} more. How many {item} does {name} have now?"),
    ("+", "A box holds {a} {item} and a bag holds {b} {item}. How many {item} are there in all?"),
    ("-", "{name} had {a} {item} and gave away {b}. How many {item} are left?"),
    ("-", "A shop had {a} {item} and sold {b} of them. How many {item} remain?"),
)
MAX_OPERAND = 10
HELD_OUT_SHARE = 10  # one question in ten
CAREFUL, CARELESS = 0.4, 0.3  # the rest of the demonstrations are right, in the wrong form


@dataclass(frozen=True)
class Sum:
    """One question with its two operands (``a >= b`` where ``sign`` is minus)."""

    question: str
    a: int
    b: int
    sign: str

    @property
    def answer(self) -> int:
        return self.a + self.b if self.sign == "+" else self.a - self.b

    @property
    def held_out(self) -> bool:
        """Whether the question is kept for validation; depends on its words alone."""
        return zlib.crc32(self.question.encode()) % HELD_OUT_SHARE == 0

    def worked(self) -> str:
        """The right answer in GSM8K's form."""
        return f"{self.a}{self.sign}{self.b}={self.answer}\n#### {self.answer}"


def draw(rng: random.Random, *, held_out: bool) -> Sum:
    """A random question from one side of the split."""
    while True:
        sign, template = rng.choice(TEMPLATES)
        a, b = rng.randint(1, MAX_OPERAND), rng.randint(1, MAX_OPERAND)
        made = _word(sign, template, rng.choice(NAMES), rng.choice(ITEMS), a, b)
        if made.held_out == held_out:
            return made


def every_question() -> Iterator[Sum]:
    """All different questions of both splits."""
    operands = range(1, MAX_OPERAND + 1)
    choices = itertools.product(TEMPLATES, NAMES, ITEMS, operands, operands)
    problems = (_word(sign, template, name, item, a, b) for (sign, template), name, item, a, b in choices)
    yield from {problem.question: problem for problem in problems}.values()


def _word(sign: str, template: str, name: str, item: str, a: int, b: int) -> Sum:
    if sign == "-" and b > a:
        a, b = b, a
    return Sum(template.format(name=name, item=item, a=a, b=b), a, b, sign)


def demonstrate(problem: Sum, rng: random.Random) -> str:
    """An imperfect answer: careful and right, or one of the operands as a guess, or right in the wrong form."""
    mood = rng.random()
    if mood < CAREFUL:
        return problem.worked()
    if mood < CAREFUL + CARELESS:
        return f"#### {rng.choice((problem.a, problem.b))}"
    return f"The answer is {problem.answer}."


def make_sft_rows(n: int, seed: int) -> list[Row]:
    """``n`` demonstrations on training questions; a question may come again with another answer."""
    rng = random.Random(f"arithmetic/sft/{seed}")
    rows = []
    for index in range(n):
        problem = draw(rng, held_out=False)
        rows.append(_row(problem, "sft", index, response=demonstrate(problem, rng)))
    return rows


def make_rl_rows(n: int, seed: int, split: Literal["train", "val"]) -> list[Row]:
    """``n`` different questions of one split; validation has held-out questions only.

    Raises:
        ValueError: the split has not that many different questions.
    """
    held_out = split == "val"
    available = sum(problem.held_out == held_out for problem in every_question())
    if n > available:
        raise ValueError(f"{n} different questions asked of split {split!r}, which has {available}")
    rng = random.Random(f"arithmetic/{split}/{seed}")
    seen: set[str] = set()
    rows: list[Row] = []
    while len(rows) < n:
        problem = draw(rng, held_out=held_out)
        if problem.question not in seen:
            seen.add(problem.question)
            rows.append(_row(problem, split, len(rows)))
    return rows


def make_pairs(n: int, seed: int, split: Literal["train", "val"]) -> list[dict[str, Any]]:
    """``n`` preference pairs on questions of one split: the worked answer, and one that is wrong or in another form."""
    rng = random.Random(f"arithmetic/pairs/{split}/{seed}")
    rows = []
    for _ in range(n):
        problem = draw(rng, held_out=split == "val")
        prompt = [{"role": "user", "content": problem.question}]
        rows.append({"prompt": prompt, "chosen": problem.worked(), "rejected": blunder(problem, rng)})
    return rows


def make_judged(n: int, seed: int) -> list[dict[str, Any]]:
    """``n`` single answers with a label, about half of them worked; each row has a question of its own."""
    pairs = make_pairs(n, seed, "train")
    rng = random.Random(f"arithmetic/judged/{seed}")
    labels = [rng.random() < 0.5 for _ in pairs]
    return [
        {"prompt": pair["prompt"], "completion": pair["chosen" if label else "rejected"], "label": label}
        for pair, label in zip(pairs, labels, strict=True)
    ]


def blunder(problem: Sum, rng: random.Random) -> str:
    """An answer to be avoided: a guess, a wrong sum, or the right number in the wrong form."""
    wrong = rng.choice([n for n in (problem.a, problem.b, problem.answer + 1) if n != problem.answer])
    mood = rng.random()
    if mood < 0.4:
        return f"#### {wrong}"
    if mood < 0.6:
        return f"{problem.a}{problem.sign}{problem.b}={wrong}\n#### {wrong}"
    return f"The answer is {problem.answer}."


def write_arithmetic(
    out_dir: str | Path,
    seed: int,
    *,
    train: int = 1024,
    val: int = 256,
    sft: int = 19_200,
    pairs: int = 2048,
    overwrite: bool = False,
) -> dict[str, Path]:
    """Writes the rows of each use as one file, ``train.parquet`` and so on; returns name -> path.

    ``train`` and ``val`` are for reinforcement learning, ``sft`` for supervised training, ``pairs``, ``val_pairs`` and
    ``judged`` for preference training.

    Raises:
        UserError: a file exists and ``overwrite`` is not set, or the folder cannot be written.
    """
    names = ("train", "val", "sft", "pairs", "val_pairs", "judged")
    folder = new_folder(out_dir, [f"{name}.parquet" for name in names], overwrite=overwrite)
    tables = {
        "train": make_rl_rows(train, seed, "train"),
        "val": make_rl_rows(val, seed, "val"),
        "sft": make_sft_rows(sft, seed),
    }
    preferences = {
        "pairs": make_pairs(pairs, seed, "train"),
        "val_pairs": make_pairs(val, seed, "val"),
        "judged": make_judged(pairs, seed),
    }
    written = {name: write_rows(folder / f"{name}.parquet", rows) for name, rows in tables.items()}
    return written | {name: write_table(folder / f"{name}.parquet", rows) for name, rows in preferences.items()}


def _row(problem: Sum, split: str, index: int, response: str | None = None) -> Row:
    extra: dict[str, Any] = {"split": split, "index": index, "question": problem.question, "answer": problem.worked()}
    return Row(
        data_source=DATA_SOURCE,
        prompt=[{"role": "user", "content": problem.question}],
        ability="math",
        ground_truth=str(problem.answer),
        extra_info=extra,
        response=response,
    )
