import json

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from megaverl.data.files import read_all, resolve_files
from megaverl.errors import Problems

ROWS = [{"a": i, "b": f"text {i}"} for i in range(5)]


def _parquet(path, rows=ROWS):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)


def _jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _arrow(path, rows=ROWS, stream=True):
    table = pa.Table.from_pylist(rows)
    opener = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with opener(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def _arrow_file(path):
    _arrow(path, stream=False)


@pytest.mark.parametrize(
    ("name", "write"),
    [("r.parquet", _parquet), ("r.jsonl", _jsonl), ("r.ndjson", _jsonl), ("r.arrow", _arrow), ("f.arrow", _arrow_file)],
)
def test_every_format_gives_the_rows_with_their_numbers(tmp_path, name, write):
    write(tmp_path / name)
    problems = Problems()
    records = read_all([tmp_path / name], problems)
    assert problems.found == []
    assert [record.values for record in records] == ROWS
    assert [record.row for record in records] == list(range(5))
    assert records[3].where.startswith(f"{tmp_path / name}, row 3")


def test_a_folder_of_save_to_disk_is_read_in_its_own_order(tmp_path):
    for name, rows in (("data-00001-of-00002.arrow", ROWS[3:]), ("data-00000-of-00002.arrow", ROWS[:3])):
        _arrow(tmp_path / name, rows)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (tmp_path / "dataset_info.json").write_text("{}")
    problems = Problems()
    assert [record.values for record in read_all([tmp_path], problems)] == ROWS
    assert problems.found == []


def test_a_folder_with_several_splits_asks_for_one(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (tmp_path / "train").mkdir()
    problems = Problems()
    assert resolve_files([tmp_path], problems) == []
    assert "several splits" in problems.found[0].what
    assert str(tmp_path / "train") in problems.found[0].fix


def test_folders_and_globs_give_their_files_sorted_and_paths_keep_their_order(tmp_path):
    for name in ("b.parquet", "a.parquet"):
        _parquet(tmp_path / name)
    _jsonl(tmp_path / "z.jsonl")
    (tmp_path / "notes.txt").write_text("not data")
    problems = Problems()
    everything = [tmp_path / name for name in ("a.parquet", "b.parquet", "z.jsonl")]
    assert resolve_files([tmp_path], problems) == everything
    assert resolve_files([str(tmp_path / "*.parquet")], problems) == everything[:2]
    assert resolve_files([everything[2], everything[0]], problems) == [everything[2], everything[0]]
    assert problems.found == []


def test_every_path_that_leads_nowhere_is_named_with_its_key(tmp_path):
    (tmp_path / "train.parquet").write_bytes(b"")
    (tmp_path / "text.csv").write_text("a,b")
    (tmp_path / "hollow").mkdir()
    paths = [tmp_path / "trian.parquet", tmp_path / "text.csv", tmp_path / "hollow", tmp_path / "*.jsonl"]
    problems = Problems()
    assert resolve_files(paths, problems, key="data.train_files") == []
    assert [problem.where for problem in problems.found] == [f"{path}, key data.train_files" for path in paths]
    assert "train.parquet" in problems.found[0].fix  # what is there instead
    assert "'.csv'" in problems.found[1].what


def test_unreadable_and_hollow_files_are_named(tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 is not enough")
    (tmp_path / "broken.arrow").write_bytes(b"nothing of Arrow here")
    (tmp_path / "hollow.jsonl").write_text("")
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "hollow.parquet")
    problems = Problems()
    assert read_all([tmp_path], problems) == []
    assert {problem.where for problem in problems.found} == {str(path) for path in tmp_path.iterdir()}


def test_broken_lines_are_named_by_line_and_the_others_are_read(tmp_path):
    file = tmp_path / "r.jsonl"
    file.write_bytes(b'{"a": 1}\n{"a": \n\n[1]\n\xff\n{"a": 2}\n')
    problems = Problems()
    records = read_all([file], problems)
    assert [(record.row, record.values) for record in records] == [(0, {"a": 1}), (5, {"a": 2})]
    assert [problem.where for problem in problems.found] == [f"{file}, row {i} (line {i + 1})" for i in (1, 2, 3, 4)]
