import ast
import errno
import os
import pickle
from pathlib import Path

import pytest

import megaverl
from megaverl import files
from megaverl.files import WriteError, cause_of, replacing, write_bytes, write_json, write_text

PACKAGE = Path(megaverl.__file__).parent
FULL = Path("/dev/full")


def test_content_rights_and_folder(tmp_path):
    path = tmp_path / "new" / "a.json"
    write_json(path, {"a": 1})
    assert path.read_text() == '{\n  "a": 1\n}\n'
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask
    path.chmod(0o600)
    write_text(path, "b\n")
    write_bytes(tmp_path / "c", iter([b"1", b"2"]))
    assert path.stat().st_mode & 0o777 == 0o600
    assert (path.read_text(), (tmp_path / "c").read_bytes()) == ("b\n", b"12")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a.json", "c", "new"]


def test_a_write_that_fails_half_way_leaves_what_was_there(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines([b"new", "text"])
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_full_disk_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    """The temporary file is on a device that is always full."""
    path = tmp_path / "a"
    path.write_text("old")
    made = tmp_path / ".a.x.tmp"

    def on_the_full_device(**_):
        made.touch()
        return os.open(FULL, os.O_WRONLY), str(made)

    monkeypatch.setattr(files.tempfile, "mkstemp", on_the_full_device)
    with pytest.raises(WriteError, match=r"a could not be written: the disk is full.*\n    -> free some space"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert not made.exists()


@pytest.mark.parametrize(
    ("code", "said"), [(errno.EROFS, "read-only"), (errno.EACCES, "may not write"), (errno.EMFILE, "open files")]
)
def test_causes_have_names_and_a_remedy(code, said):
    what, fix = cause_of(OSError(code, os.strerror(code)))
    assert said in what
    assert "folder" in fix


def test_a_file_in_the_way_of_a_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="a file is where a folder should be") as caught:
        write_text(tmp_path / "file" / "inner" / "a", "x")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# Files that are written in place on purpose, by function.
IN_PLACE = {
    ("trainer/run.py", "_claim_directory"): "the lock",
    ("checkpoint/shard_writer.py", "_start"): "in a folder that is renamed when it is whole",
    ("checkpoint/train_state.py", "_save"): "in a folder that is renamed when it is whole",
    ("rewards/child.py", "_take_pipes"): "a pipe",
    ("files.py", "replacing"): "the helper itself",
}


def writes_in_place(source):
    """(function, line) of calls that write to a path directly."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.Call):
                continue
            owner = ast.unparse(node.func)
            name = owner.rsplit(".", 1)[-1]
            modes = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            opened = name in ("open", "fdopen") and any(set(m) <= set("wxb+t") and set(m) & set("wx") for m in modes)
            method = name in ("write_text", "write_bytes") and "." in owner and not owner.startswith("files.")
            if opened or method:
                yield function.name, node.lineno


def test_everything_is_written_by_the_helpers():
    found = [
        (str(file.relative_to(PACKAGE)), *place)
        for file in sorted(PACKAGE.rglob("*.py"))
        for place in writes_in_place(file.read_text())
    ]
    assert [place for place in found if place[:2] not in IN_PLACE] == []


def test_the_search_finds_what_it_looks_for():
    source = "def f(p):\n    p.write_text('a')\n    open(p, 'w')\n    p.open('rb')\n    write_text(p, 'a')\n"
    assert list(writes_in_place(source)) == [("f", 2), ("f", 3)]
