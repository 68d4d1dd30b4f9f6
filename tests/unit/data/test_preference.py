"""Preference files: what a row may hold, and that every bad row is named."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from megaverl.data.preference import JudgedCompletion, PreferencePair, check_preference, read_preferences
from megaverl.errors import Problems

CHAT = [{"role": "user", "content": "1+1?"}]
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
KTO = {"prompt": CHAT, "completion": "2", "label": True}


def _assistant(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("chat", [False, True])
def test_pairs_are_read_from_both_formats_as_texts_or_messages(tmp_path, suffix, chat):
    row = {"prompt": CHAT, "chosen": _assistant("2"), "rejected": _assistant("3")} if chat else PAIR
    file = tmp_path / f"pairs{suffix}"
    if suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for _ in range(2)))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 2), file)
    problems = Problems()
    rows = read_preferences([file], "pair", problems)
    assert problems.found == []
    assert [(r.prompt, r.chosen, r.rejected) for r in rows] == [(row["prompt"], "2", "3")] * 2
    assert rows[1].where.startswith(f"{file}, row 1")


def test_a_judged_completion_is_read():
    for label in (True, False):
        row, problems = check_preference({**KTO, "label": label}, "f, row 0", "kto")
        assert problems == []
        assert row == JudgedCompletion(CHAT, "2", label, "f, row 0")


def test_another_prompt_column_and_a_text_answer_to_a_chat():
    row, problems = check_preference(
        {"question": CHAT, "chosen": "2", "rejected": "3"}, "f", "pair", prompt_key="question"
    )
    assert problems == []
    assert row == PreferencePair(CHAT, "2", "3", "f")


@pytest.mark.parametrize(
    ("kind", "change", "place", "words"),
    [
        ("pair", {"prompt": ...}, "prompt", "missing"),
        ("pair", {"prompt": ""}, "prompt", "empty"),
        ("pair", {"prompt": [{"role": "usr", "content": "x"}]}, "prompt[0].role", "unknown role"),
        ("pair", {"chosen": ...}, "chosen", "missing"),
        ("pair", {"chosen": None}, "chosen", "null"),
        ("pair", {"chosen": " "}, "chosen", "empty"),
        ("pair", {"chosen": 4}, "chosen", "int 4"),
        ("pair", {"chosen": _assistant("2")}, "chosen", "the prompt a string"),
        ("pair", {"prompt": CHAT, "chosen": [*CHAT, *_assistant("2")]}, "chosen", "user, assistant"),
        ("pair", {"prompt": CHAT, "chosen": []}, "chosen", "none"),
        ("pair", {"prompt": CHAT, "chosen": ["2"]}, "chosen", "str '2'"),
        ("pair", {"prompt": CHAT, "chosen": _assistant(None)}, "chosen[0].content", "NoneType"),
        ("pair", {"prompt": CHAT, "chosen": _assistant("")}, "chosen", "empty"),
        ("pair", {"rejected": "2"}, "rejected", "the same"),
        ("kto", {"completion": ...}, "completion", "missing"),
        ("kto", {"label": ...}, "label", "missing"),
        ("kto", {"label": None}, "label", "null"),
        ("kto", {"label": "yes"}, "label", "str 'yes'"),
        ("kto", {"label": 1}, "label", "int 1"),
    ],
)
def test_a_bad_row_is_refused_by_file_row_and_key(kind, change, place, words):
    values = {k: v for k, v in {**(PAIR if kind == "pair" else KTO), **change}.items() if v is not ...}
    row, problems = check_preference(values, "p.jsonl, row 7", kind)
    assert row is None
    assert [p.where for p in problems] == [f"p.jsonl, row 7, key {place}"]
    assert words in problems[0].what


def test_twenty_bad_rows_are_named_and_the_others_counted(tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text("".join(json.dumps({**PAIR, "chosen": i}) + "\n" for i in range(25)) + json.dumps(PAIR) + "\n")
    problems = Problems()
    rows = read_preferences([file], "pair", problems)
    assert len(rows) == 1
    assert len(problems.found) == 21
    assert "row 19" in problems.found[19].where
    assert problems.found[20].what == "and 5 more of the 25 problems found in the rows"
