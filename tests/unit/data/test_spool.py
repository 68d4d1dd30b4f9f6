import gc
import os

import pytest

from megaverl.config.schema import DataConfig
from megaverl.data import loading
from megaverl.data.dataset import PromptItem, load_prompts
from megaverl.data.preference_dataset import load_preferences
from megaverl.data.schema import Row
from megaverl.data.spool import Spool
from megaverl.data.write import write_rows, write_table
from megaverl.errors import Problems
from megaverl.files import WriteError


def test_items_come_back_by_position_and_the_file_has_no_name(tmp_path):
    spool = Spool(tmp_path / "run")
    items = [{"number": i, "text": "x" * (7 * i)} for i in range(50)]
    spool.extend(items[:20])
    assert spool[3] == items[3]  # what was appended can be read before more is
    spool.extend(items[20:])
    assert len(spool) == 50
    assert list(spool) == items
    assert spool[-1] == items[-1]
    assert spool[5:9] == items[5:9]
    with pytest.raises(IndexError):
        spool[50]
    assert os.listdir(tmp_path / "run") == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="file"):
        Spool(tmp_path / "file" / "run")


def test_prompts_in_a_file_are_those_in_memory_and_few_are_held(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(loading, "CHUNK", 16)
    held = []
    extend = Spool.extend
    monkeypatch.setattr(Spool, "extend", lambda s, i: (held.append(_alive(PromptItem) - before), extend(s, i))[1])
    rows = [
        Row("openai/gsm8k", [{"role": "user", "content": f"What is {i % 70}+1?"}], "math", "2", {"index": i})
        for i in range(100)
    ]
    file = write_rows(tmp_path / "rows.parquet", rows)
    problems, config = Problems(), DataConfig()
    whole = load_prompts([file], config, tokenizer, problems, vocab=1024)
    before = _alive(PromptItem)
    spooled = load_prompts([file], config, tokenizer, problems, vocab=1024, spool=tmp_path / "run")
    assert problems.found == []
    assert [spooled[i] for i in range(100)] == [whole[i] for i in range(100)]
    assert spooled.report == whole.report
    assert whole.report.duplicates == 30
    assert len(held) == 7
    assert max(held) <= 17  # a chunk, and no row of the chunks before it


def test_preferences_can_lie_in_a_file_as_well(tmp_path, tokenizer):
    rows = [{"prompt": "What is 1+1?", "chosen": str(i), "rejected": "none"} for i in range(9)]
    file = write_table(tmp_path / "pairs.parquet", rows)
    problems, config = Problems(), DataConfig()
    whole = load_preferences([file], config, tokenizer, problems, kind="pair", vocab=1024)
    spooled = load_preferences([file], config, tokenizer, problems, kind="pair", vocab=1024, spool=tmp_path / "run")
    assert problems.found == []
    assert list(spooled.items) == whole.items
    assert spooled.report == whole.report


def _alive(kind):
    gc.collect()
    return sum(type(thing) is kind for thing in gc.get_objects())
