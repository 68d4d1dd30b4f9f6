"""Published data in other shapes: each is prepared by one command, and loads as a run loads it."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from megaverl.cli import main
from megaverl.config.schema import DataConfig
from megaverl.data.dataset import load_prompts
from megaverl.data.files import read_all
from megaverl.data.mapping import ColumnMap, last_boxed, prepare_pairs, prepare_rows, split_conversations
from megaverl.data.preference import read_preferences
from megaverl.errors import Problems, UserError

NAMES = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
ROWS = [{"question": f"{i}+1?", "answer": str(i + 1), "level": i} for i in range(3)]


def _user(text):
    return {"role": "user", "content": text}


def _assistant(text):
    return {"role": "assistant", "content": text}


def _jsonl(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _arrow_folder(folder, rows):
    """What datasets.save_to_disk writes: a list of stream files, and their names in state.json."""
    folder.mkdir()
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    return folder


def _parquet(file, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def _load(file, tokenizer):
    problems = Problems()
    data = load_prompts([file], DataConfig(), tokenizer, problems, vocab=1024)
    assert problems.found == []
    return data


@pytest.mark.parametrize("form", ["jsonl", "parquet", "arrow"])
def test_rows_with_another_prompt_column_are_prepared_by_one_command(tmp_path, tokenizer, form, capsys):
    make = {"jsonl": _jsonl, "parquet": _parquet, "arrow": _arrow_folder}[form]
    source = make(tmp_path / f"given.{form}" if form != "arrow" else tmp_path / "given", ROWS)
    out = tmp_path / "out" / "rows.parquet"
    words = ["data", "rows", str(source), "--prompt", "question", "--answer", "answer", "--source", "openai/gsm8k"]
    assert main([*words, "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == {"rows": 3}
    data = _load(out, tokenizer)
    expected = tokenizer.hf.apply_chat_template([_user("1+1?")], add_generation_prompt=True, return_dict=False)
    assert data[1].prompt_ids == expected
    assert data[1].ground_truth == "2"
    assert data[1].extra_info == {"level": 1, "index": 1}


def test_gsm8k_as_jsonl_is_prepared_by_one_command(tmp_path, tokenizer):
    for split in ("train", "test"):
        _jsonl(tmp_path / f"{split}.jsonl", [{"question": "1+1?", "answer": "1+1=2\n#### 2"}])
    assert main(["data", "gsm8k", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert _load(tmp_path / "out" / "train.parquet", tokenizer)[0].ground_truth == "2"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
        {"prompt": [_user("1+1?")], "chosen": [_assistant("2")], "rejected": [_assistant("3")]},
        {"prompt": "1+1?", "chosen": [_user("1+1?"), _assistant("2")], "rejected": [_user("1+1?"), _assistant("3")]},
        {"chosen": [_user("1+1?"), _assistant("2")], "rejected": [_user("1+1?"), _assistant("3")]},
    ],
)
def test_preference_pairs_are_prepared_by_one_command(tmp_path, row):
    source, out = _jsonl(tmp_path / "pairs.jsonl", [row]), tmp_path / "out.parquet"
    assert main(["data", "preference", str(source), "--out", str(out)]) == 0
    problems = Problems()
    (pair,) = read_preferences([out], "pair", problems)
    assert problems.found == []
    assert pair.prompt == ("1+1?" if isinstance(row["chosen"], str) else [_user("1+1?")])
    assert (pair.chosen, pair.rejected) == ("2", "3")


def test_conversations_that_do_not_agree_are_left_for_the_check_and_refused(tmp_path):
    first, second = [_user("a"), _assistant("2")], [_user("b"), _assistant("3")]
    for row in (
        {"chosen": first, "rejected": second},
        {"prompt": "c", "chosen": first, "rejected": first},
        {"prompt": [_user("c")], "chosen": first, "rejected": first},
    ):
        assert split_conversations(row) == row
        with pytest.raises(UserError, match="row 0"):
            prepare_pairs([_jsonl(tmp_path / "x.jsonl", [row])], tmp_path / "out.parquet", NAMES)
    assert not (tmp_path / "out.parquet").exists()


def test_nested_columns_an_instruction_and_supervised_rows(tmp_path):
    nested = {"q": {"text": "1+1?"}, "meta": {"truth": "2"}, "solution": "It is 2."}
    out = tmp_path / "rows.parquet"
    columns = ColumnMap("q.text", "meta.truth", "solution", "mine", instruction="Think.")
    prepare_rows([_jsonl(tmp_path / "n.jsonl", [nested])], out, columns)
    (row,) = pyarrow.parquet.read_table(out).to_pylist()
    assert row["prompt"] == [_user("1+1? Think.")]
    assert row["reward_model"]["ground_truth"] == "2"
    assert row["response"] == "It is 2."
    supervised = ColumnMap("q.text", None, "solution", plain=True)
    prepare_rows([tmp_path / "n.jsonl"], out, supervised, overwrite=True)
    (row,) = pyarrow.parquet.read_table(out).to_pylist()
    assert (row["prompt"], row["response"]) == ("1+1?", "It is 2.")


def test_every_bad_row_is_named_and_nothing_is_written(tmp_path, capsys):
    rows = [*ROWS, {"question": "?", "answer": "two"}, {"question": None, "answer": "1"}, {"answer": "1"}]
    words = ["data", "rows", str(_jsonl(tmp_path / "bad.jsonl", rows)), "--prompt", "question", "--answer", "answer"]
    out = tmp_path / "out.parquet"
    assert main([*words, "--source", "openai/gsm8k", "--out", str(out), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)["error"]["problems"]
    assert [p["where"].split(" row ")[1][0] for p in found] == ["3", "4", "5"]
    assert not out.exists()


def test_what_exists_is_kept_and_mixed_types_are_named(tmp_path):
    source, out = _jsonl(tmp_path / "rows.jsonl", ROWS), tmp_path / "out.parquet"
    out.write_text("mine")
    columns = ColumnMap("question", "answer", data_source="openai/gsm8k")
    with pytest.raises(UserError, match="exists already"):
        prepare_rows([source], out, columns)
    assert out.read_text() == "mine"
    mixed = _jsonl(tmp_path / "mixed.jsonl", [{**ROWS[0], "level": "a"}, ROWS[1]])
    with pytest.raises(UserError, match="mixes types"):
        prepare_rows([mixed], out, columns, overwrite=True)
    assert out.read_text() == "mine"


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"So $x=\boxed{4}$.", "4"),
        (r"First \boxed{1}, then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"The set \boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\fbox{7}", "7"),
        (r"nothing", None),
        (r"\boxed{", None),
        (r"\boxed{}", None),
    ],
)
def test_the_last_box_of_a_solution(solution, answer):
    assert last_boxed(solution) == answer


def test_solutions_with_a_box_become_rows_of_math(tmp_path):
    file = tmp_path / "math.jsonl"
    rows = [{"problem": f"What is {n} halves?", "solution": rf"It is $\boxed{{\frac{{{n}}}{{2}}}}$."} for n in (1, 3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ColumnMap("problem", "solution", "solution", data_source="lighteval/MATH", boxed=True)
    prepare_rows([file], tmp_path / "math.parquet", columns)
    (first, _) = [record.values for record in read_all([tmp_path / "math.parquet"], Problems())]
    assert first["reward_model"]["ground_truth"] == r"\frac{1}{2}"
    assert first["response"] == rows[0]["solution"]
    file.write_text(json.dumps({"problem": "?", "solution": "none"}) + "\n")
    with pytest.raises(UserError, match=r"no .boxed"):
        prepare_rows([file], tmp_path / "other.parquet", columns)
