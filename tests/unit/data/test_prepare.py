import json

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from megaverl.config.schema import DataConfig
from megaverl.data.files import read_all
from megaverl.data.prepare import GSM8K_INSTRUCTION, check_data, prepare_gsm8k
from megaverl.errors import Problems, UserError
from megaverl.rewards.registry import Registry

ROWS = {
    "train": [
        {"question": "Ann saved 1,000 dollars and 2 more. How much?", "answer": "1000+2=<<1000+2=1002>>\n#### 1,002"},
        {"question": "It is 3 degrees and falls by 8. How cold?", "answer": "3-8=-5\n#### -5"},
    ],
    "test": [{"question": "1+1?", "answer": "1+1=2\n#### 2"}],
}


def _jsonl(folder):
    for split, rows in ROWS.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _parquet(folder):
    for split, rows in ROWS.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")


def _parquet_parts(folder):
    for split, rows in ROWS.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")


def _saved_to_disk(folder):
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split, rows in ROWS.items():
        (folder / split).mkdir()
        table = pa.Table.from_pylist(rows)
        with pyarrow.ipc.new_stream(str(folder / split / "data-00000-of-00001.arrow"), table.schema) as writer:
            writer.write_table(table)
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
        (folder / split / "state.json").write_text(json.dumps(state))


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("write", [_jsonl, _parquet, _parquet_parts, _saved_to_disk])
def test_every_published_form_gives_the_same_rows(source, tmp_path, write):
    write(source)
    report = prepare_gsm8k(source, tmp_path / "out")
    assert report.rows == {"train": 2, "test": 1}
    assert report.lines()[0] == f"{tmp_path / 'out' / 'train.parquet'}: 2 rows"
    problems = Problems()
    first = read_all([report.paths["train"]], problems)[0].values
    assert problems.found == []
    assert first == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{ROWS['train'][0]['question']} {GSM8K_INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1002"},
        "extra_info": {"split": "train", "index": 0, **ROWS["train"][0]},
        "response": ROWS["train"][0]["answer"],
    }
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["test.parquet", "train.parquet"]


def test_files_are_not_overwritten_unless_asked(source, tmp_path):
    _jsonl(source)
    prepare_gsm8k(source, tmp_path / "out")
    with pytest.raises(UserError) as caught:
        prepare_gsm8k(source, tmp_path / "out")
    assert [problem.where for problem in caught.value.problems] == [
        str(tmp_path / "out" / f"{split}.parquet") for split in ("train", "test")
    ]
    assert prepare_gsm8k(source, tmp_path / "out", overwrite=True).rows["train"] == 2


def test_bad_rows_are_named_and_nothing_is_written(source, tmp_path):
    _jsonl(source)
    bad = [{"question": "q"}, {"question": "", "answer": "#### 1"}, {"question": "q", "answer": "no number"}]
    (source / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bad))
    with pytest.raises(UserError) as caught:
        prepare_gsm8k(source, tmp_path / "out")
    where = [problem.where for problem in caught.value.problems]
    keys = ("answer", "question", "answer")
    assert where == [f"{source / 'test.jsonl'}, row {i} (line {i + 1}), key {key}" for i, key in enumerate(keys)]
    assert not (tmp_path / "out").exists()


def test_missing_and_ambiguous_splits_are_named(source, tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        prepare_gsm8k(tmp_path / "nowhere", tmp_path / "out")
    _jsonl(source)
    (source / "test.jsonl").unlink()
    pq.write_table(pa.Table.from_pylist(ROWS["train"]), source / "train.parquet")
    with pytest.raises(UserError) as caught:
        prepare_gsm8k(source, tmp_path / "out")
    assert [problem.what for problem in caught.value.problems] == [
        "several train splits: train.parquet, train.jsonl",
        "no test split in the folder",
    ]


def test_check_data_reports_as_a_run_would_see_it(source, tmp_path, tokenizer):
    _jsonl(source)
    paths = prepare_gsm8k(source, tmp_path / "out").paths
    report = check_data([paths["train"]], DataConfig(), tokenizer)
    assert (report.rows, report.kept, report.data_sources) == (2, 2, {"openai/gsm8k": 2})
    assert json.loads(json.dumps(report.to_dict()))["prompt_tokens"]["max"] == report.prompt_tokens.max
    with pytest.raises(UserError, match="the limit is 8"):
        check_data([paths["train"]], DataConfig(max_prompt_length=8), tokenizer)


def test_gsm8k_is_complete_and_every_gold_answer_scores_one(shared_assets, tmp_path):
    report = prepare_gsm8k(shared_assets / "gsm8k", tmp_path / "out")
    assert report.rows == {"train": 7473, "test": 1319}
    problems = Problems()
    records = read_all(list(report.paths.values()), problems)
    assert problems.found == []
    scores = [
        Registry().compute_score(row["data_source"], row["extra_info"]["answer"], row["reward_model"]["ground_truth"])
        for row in (record.values for record in records)
    ]
    assert len(scores) == 8792
    assert all(type(score) is float and score == 1.0 for score in scores)
    truths = [record.values["reward_model"]["ground_truth"] for record in records]
    wrong = [
        Registry().compute_score("openai/gsm8k", record.values["extra_info"]["answer"], truth + "1")
        for record, truth in zip(records, truths, strict=True)
    ]
    assert set(wrong) == {0.0}
