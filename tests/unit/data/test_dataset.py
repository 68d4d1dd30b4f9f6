import dataclasses
import json
import shutil

import pytest

from megaverl.config.schema import DataConfig
from megaverl.data.dataset import load_prompts
from megaverl.data.schema import Row
from megaverl.data.tokenizer import load_tokenizer
from megaverl.data.write import write_rows
from megaverl.errors import Problems

VOCAB = 1024
LENGTHS = (1, 5, 9, 20, 40)


def _row(content, **changes):
    return Row("openai/gsm8k", [{"role": "user", "content": content}], "math", "2", {"index": 1}, **changes)


def _load(rows, tmp_path, tokenizer, *, vocab=VOCAB, kind="rl", **config):
    file = write_rows(tmp_path / "rows.parquet", rows)
    problems = Problems()
    data = load_prompts([file], DataConfig(**config), tokenizer, problems, kind=kind, vocab=vocab)
    return data, problems.found


def _reference(tokenizer, row):
    return tokenizer.hf.apply_chat_template(row.prompt, add_generation_prompt=True, return_dict=False)


def test_items_hold_the_rendered_ids_and_what_the_scorer_needs(tmp_path, tokenizer):
    rows = [_row("What is 1+1?"), _row("你好, café?")]
    data, problems = _load(rows, tmp_path, tokenizer)
    assert problems == []
    assert [item.prompt_ids for item in data.items] == [_reference(tokenizer, row) for row in rows]
    first = data[0]
    assert (first.key, first.data_source, first.ground_truth, first.extra_info) == (
        0,
        "openai/gsm8k",
        "2",
        {"index": 1},
    )
    assert first.response_ids is None
    assert data.report.rows == data.report.kept == len(data) == 2


@pytest.mark.parametrize("policy", ["error", "filter", "left", "right"])
def test_case_39_the_counted_length_is_that_of_the_ids_sent(tmp_path, tokenizer, policy):
    """Case 39: an overlong filter that counts without the chat template keeps rows that the rollout cannot take."""
    rows = [_row(" apples" * n) for n in LENGTHS]
    sent = [_reference(tokenizer, row) for row in rows]
    overhead = len(sent[0]) - 1
    limit = 9 + overhead  # the third row fits exactly; without the template's tokens the fourth would, too, at 20
    data, problems = _load(rows, tmp_path, tokenizer, truncation=policy, max_prompt_length=limit)
    assert [len(ids) for ids in sent] == [n + overhead for n in LENGTHS]
    assert [item.prompt_ids for item in data.items][:3] == sent[:3]
    assert all(len(item.prompt_ids) <= limit for item in data.items)
    if policy == "error":
        assert [problem.where for problem in problems] == [f"{tmp_path / 'rows.parquet'}, row {i}" for i in (3, 4)]
        assert f"the prompt has {len(sent[3])} tokens, the limit is {limit}" in problems[0].what
        return
    assert problems == []
    assert data.report.prompt_tokens.max == max(len(item.prompt_ids) for item in data.items) == limit
    if policy == "filter":
        assert [item.key for item in data.items] == [0, 1, 2]  # a row keeps its key whatever is left out
        assert (data.report.rows, data.report.kept, data.report.filtered) == (5, 3, 2)
    else:
        cut = [ids[-limit:] if policy == "left" else ids[:limit] for ids in sent[3:]]
        assert [item.prompt_ids for item in data.items][3:] == cut
        assert (data.report.kept, data.report.truncated) == (5, 2)
        assert any(f"2 prompts cut on the {policy}" in line for line in data.report.lines())


def test_case_39_an_empty_data_source_is_found_before_the_run(tmp_path, tokenizer):
    """Case 39: an empty data_source raised NotImplementedError deep in a worker."""
    rows = [_row("fine"), Row("", [{"role": "user", "content": "x"}], "math", "2")]
    _, problems = _load(rows, tmp_path, tokenizer)
    assert [problem.where for problem in problems] == [f"{tmp_path / 'rows.parquet'}, row 1, key data_source"]


def test_all_bad_rows_are_found_the_first_twenty_named_and_the_rest_counted(tmp_path, tokenizer):
    rows = [_row("fine"), *(dataclasses.replace(_row("a"), data_source=f"unknown/{i}") for i in range(30))]
    _, problems = _load(rows, tmp_path, tokenizer)
    assert len(problems) == 21
    assert problems[19].where == f"{tmp_path / 'rows.parquet'}, row 20, key data_source"
    assert "10 more" in problems[20].what


def test_the_same_problem_of_many_rows_is_one(tmp_path, tokenizer):
    _, problems = _load([_row("fine"), *(_row(" ") for _ in range(30))], tmp_path, tokenizer)
    assert [p.where for p in problems] == [f"{tmp_path / 'rows.parquet'}, rows 1 to 30, key prompt[0].content"]


def test_a_missing_file_and_a_bad_row_of_another_are_reported_together(tmp_path, tokenizer):
    file = write_rows(tmp_path / "rows.parquet", [_row("")])
    problems = Problems()
    load_prompts([tmp_path / "no.parquet", file], DataConfig(), tokenizer, problems, vocab=VOCAB, key="data.val_files")
    assert [problem.where for problem in problems.found] == [
        f"{tmp_path / 'no.parquet'}, key data.val_files",
        f"{file}, row 0, key prompt[0].content",
    ]


def test_a_tokenizer_larger_than_the_embedding_is_refused_once(tmp_path, tokenizer):
    file = write_rows(tmp_path / "rows.parquet", [_row("hi")])
    problems = Problems()
    for key in ("data.train_files", "data.val_files"):
        load_prompts([file], DataConfig(), tokenizer, problems, vocab=1000, key=key)
    texts = [problem.what for problem in problems.found]
    assert texts[0] == "the tokenizer has ids up to 1023, the model's embedding has 1000 rows"
    assert texts[1:] == ["token id 1004 is outside the model's embedding of 1000 rows"] * 2  # each file's row


def test_chat_messages_need_a_chat_template(tmp_path, tiny_checkpoint):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "plain")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    plain = load_tokenizer(folder)
    _, problems = _load([_row("a"), _row("b")], tmp_path, plain)
    assert len(problems) == 1
    assert "2 prompts are chat messages" in problems[0].what
    assert problems[0].where == str(folder)
    data, problems = _load([Row("openai/gsm8k", "1+1=", "math", "2")], tmp_path, plain)
    assert problems == []
    assert data[0].prompt_ids == plain.encode(["1+1="])[0]


def test_a_string_goes_to_the_model_as_it_is_and_that_is_told(tmp_path, tokenizer):
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    data, problems = _load([Row("openai/gsm8k", text, "math", "2")], tmp_path, tokenizer)
    assert problems == []
    assert data[0].prompt_ids == _reference(tokenizer, _row("hi"))
    assert any("1 prompts are strings" in line for line in data.report.lines())


def test_messages_that_the_template_refuses_are_named(tmp_path, tiny_checkpoint):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "strict")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}x"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    rows = [_row("fine"), Row("openai/gsm8k", [{"role": "system", "content": "be good"}], "math", "2")]
    _, problems = _load(rows, tmp_path, load_tokenizer(folder))
    assert [problem.where for problem in problems] == [f"{tmp_path / 'rows.parquet'}, row 1, key prompt"]
    assert "no system here" in problems[0].what


def test_duplicates_are_a_note_and_stay(tmp_path, tokenizer):
    data, problems = _load([_row("a"), _row("b"), _row("a")], tmp_path, tokenizer)
    assert problems == []
    assert (len(data), data.report.duplicates) == (3, 1)


def test_a_filter_that_leaves_nothing_is_refused(tmp_path, tokenizer):
    _, problems = _load([_row(" apples" * 50)], tmp_path, tokenizer, truncation="filter", max_prompt_length=8)
    assert [problem.what for problem in problems] == ["no rows are left"]


def test_supervised_rows_have_the_answer_and_one_end_token(tmp_path, tokenizer):
    rows = [_row("1+1?", response="1+1=2\n#### 2"), _row("1+1?", response="2<|im_end|>")]
    data, problems = _load(rows, tmp_path, tokenizer, kind="sft")
    assert problems == []
    assert data[0].prompt_ids == _reference(tokenizer, rows[0])
    assert tokenizer.hf.decode(data[0].response_ids) == "1+1=2\n#### 2<|im_end|>"
    assert tokenizer.hf.decode(data[1].response_ids) == "2<|im_end|>"
    assert data.report.duplicates == 0
    assert data.report.response_tokens.max == len(data[0].response_ids)


@pytest.mark.parametrize("policy", ["error", "filter", "left", "right"])
def test_a_long_supervised_answer_follows_the_policy_and_is_cut_on_the_right(tmp_path, tokenizer, policy):
    rows = [_row("1?", response="#### 1"), _row("1?", response="#### 1 2 3 4 5 6 7 8 9")]
    data, problems = _load(rows, tmp_path, tokenizer, kind="sft", truncation=policy, max_response_length=6)
    whole = [*tokenizer.encode([rows[1].response])[0], tokenizer.end_id]
    if policy == "error":
        assert f"the response has {len(whole)} tokens, the limit is 6" in problems[0].what
    elif policy == "filter":
        assert (len(data), data.report.filtered) == (1, 1)
    else:
        assert data[1].response_ids == whole[:6]
        assert data.report.responses_truncated == 1


def test_the_real_qwen_tokenizer_on_gsm8k(tmp_path, shared_assets):
    from megaverl.data.prepare import prepare_gsm8k

    real = load_tokenizer(shared_assets / "qwen2.5-tokenizer")
    paths = prepare_gsm8k(shared_assets / "gsm8k", tmp_path / "out").paths
    problems = Problems()
    config = DataConfig(max_prompt_length=120, truncation="filter")
    data = load_prompts([paths["test"]], config, real, problems, vocab=151_936)
    assert problems.found == []
    report = data.report
    assert (report.rows, report.kept + report.filtered, len(data)) == (1319, 1319, report.kept)
    assert 0 < report.filtered < 1319
    assert report.prompt_tokens.max <= 120
    assert real.hf.decode(data[0].prompt_ids).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_rows_are_counted_by_the_entry_that_they_come_from(tmp_path, tokenizer):
    first, second = tmp_path / "first.parquet", tmp_path / "second.parquet"
    write_rows(first, [_row("a"), _row("b" * 900), _row("c")])
    write_rows(second, [_row("d")])
    problems = Problems()
    config = DataConfig(truncation="filter", max_prompt_length=60)
    data = load_prompts([second, first, second], config, tokenizer, problems, vocab=VOCAB)
    assert problems.found == []
    assert data.parts == [1, 2, 1]
