"""Preference rows of a run: what is kept, cut and refused, and how they are packed."""

from __future__ import annotations

import json

import pytest

from megaverl.config.schema import DataConfig
from megaverl.data.batch import UNIT
from megaverl.data.preference_dataset import judged_batch, load_preferences, pairs_batch
from megaverl.data.prepare import check_data
from megaverl.errors import Problems, UserError

CHAT = [{"role": "user", "content": "How many apples are left?"}]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path, tokenizer, kind="pair", **limits):
    problems = Problems()
    config = DataConfig(**({"max_prompt_length": 64, "max_response_length": 16} | limits))
    return load_preferences([path], config, tokenizer, problems, kind=kind, vocab=1024), problems.found


def test_pairs_have_rendered_prompts_and_end_tokens(tmp_path, tokenizer):
    rows = [
        {"prompt": CHAT, "chosen": "#### 6", "rejected": "#### 7"},
        {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
    ]
    data, found = load(write(tmp_path / "pairs.jsonl", rows), tokenizer)
    assert found == []
    assert [len(item.answers) for item in data.items] == [2, 2]
    first, second = data.items
    assert first.prompt_ids == tokenizer.encode([tokenizer.render(CHAT)])[0]
    assert second.prompt_ids == tokenizer.encode_plain("2+2=")
    assert all(ids[-1] == tokenizer.end_id for item in data.items for ids in item.answers)
    assert tokenizer.decode(first.answers[0]) == "#### 6"
    assert data.report.kept == 2


def test_every_bad_row_is_named(tmp_path, tokenizer):
    rows = [{"prompt": CHAT, "chosen": "a", "rejected": "a"}, {"prompt": CHAT, "chosen": "a"}, {"prompt": CHAT}]
    _, found = load(write(tmp_path / "pairs.jsonl", rows), tokenizer)
    text = "\n".join(map(str, found))
    assert "row 0" in text
    assert "row 1" in text
    assert "row 2" in text


@pytest.mark.parametrize(("policy", "kept", "problems"), [("error", 1, 1), ("right", 2, 0), ("filter", 1, 0)])
def test_a_long_answer_is_refused_cut_or_left_out(tmp_path, tokenizer, policy, kept, problems):
    rows = [
        {"prompt": CHAT, "chosen": "1 2 3 4 5 6 7 8 9 0 1 2", "rejected": "7"},
        {"prompt": CHAT, "chosen": "1", "rejected": "7"},
    ]
    data, found = load(write(tmp_path / "pairs.jsonl", rows), tokenizer, truncation=policy, max_response_length=8)
    assert len(found) == problems
    assert len(data) == kept
    assert all(len(ids) <= 8 for item in data.items for ids in item.answers)


def test_answers_that_a_cut_makes_equal_are_refused(tmp_path, tokenizer):
    rows = [{"prompt": CHAT, "chosen": "1 2 3 4 5 6", "rejected": "1 2 3 4 5 7"}]
    _, found = load(write(tmp_path / "p.jsonl", rows), tokenizer, truncation="right", max_response_length=3)
    assert "cut to the limit" in str(found[0])


def test_batches_keep_a_row_together(tmp_path, tokenizer):
    rows = [{"prompt": CHAT, "completion": f"#### {n}", "label": n % 2 == 0} for n in range(3)]
    data, found = load(write(tmp_path / "judged.jsonl", rows), tokenizer, kind="kto")
    assert found == []
    batch = judged_batch(data.items, "preferred", -1)
    assert batch.per_sequence["preferred"].tolist() == [1, 0, 1, -1, -1, -1]
    assert batch.per_sequence[UNIT].tolist() == [0, 1, 2, 0, 1, 2]
    answers = [batch.select([i]).tokens[batch.select([i]).response_mask].tolist() for i in range(6)]
    assert answers[3:] == [answers[1], answers[2], answers[0]]

    rows = [{"prompt": CHAT, "chosen": f"#### {n}", "rejected": "?"} for n in range(2)]
    pairs, _ = load(write(tmp_path / "pairs.jsonl", rows), tokenizer)
    batch = pairs_batch(pairs.items, "preferred")
    assert batch.per_sequence["preferred"].tolist() == [1, 0, 1, 0]
    assert batch.per_sequence[UNIT].tolist() == [0, 0, 1, 1]


def test_the_check_of_files_takes_preference_rows(tmp_path, tokenizer):
    config = DataConfig(max_prompt_length=64, max_response_length=16)
    pairs = write(tmp_path / "pairs.jsonl", [{"prompt": CHAT, "chosen": "#### 6", "rejected": "#### 7"}] * 2)
    report = check_data([pairs], config, tokenizer, kind="pair")
    assert (report.rows, report.kept, report.duplicates) == (2, 2, 1)
    with pytest.raises(UserError, match="column 'label' is missing"):
        check_data([pairs], config, tokenizer, kind="kto")
