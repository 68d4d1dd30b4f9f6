import json
import shutil

import pytest

from megaverl.data.tokenizer import load_tokenizer
from megaverl.errors import UserError


@pytest.fixture
def folder(tiny_checkpoint, tmp_path):
    return shutil.copytree(tiny_checkpoint, tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors"))


def _change(file, **entries):
    content = json.loads(file.read_text())
    content.update(entries)
    file.write_text(json.dumps(content))


def test_end_pad_and_stop_ids(tokenizer):
    assert tokenizer.hf.convert_ids_to_tokens([tokenizer.end_id, tokenizer.pad_id]) == ["<|im_end|>", "<|endoftext|>"]
    assert tokenizer.stop_ids == (tokenizer.end_id,)
    assert tokenizer.size == len(tokenizer.hf)
    assert tokenizer.has_chat_template


def test_stop_ids_of_the_generation_config_are_added(folder):
    _change(folder / "generation_config.json", eos_token_id=[7, 1004])
    assert load_tokenizer(folder).stop_ids == (7, 1004)


def test_the_generation_config_is_that_of_the_model_folder(folder, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert load_tokenizer(folder, tmp_path / "model").stop_ids == (9, 1004)


def test_decoding_leaves_special_tokens_out(tokenizer):
    ids = [*tokenizer.encode(["7+2=9\n#### 9"])[0], tokenizer.end_id]
    assert tokenizer.decode(ids) == "7+2=9\n#### 9"


def test_a_string_prompt_gets_the_start_token_once_where_the_tokenizer_wants_one(folder):
    plain = load_tokenizer(folder)
    text = "Ada has 7"
    assert plain.encode_plain(text) == plain.encode([text])[0]
    start = plain.encode(["<|box_start|>"])[0]
    content = json.loads((folder / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|box_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|box_start|>": {"id": "<|box_start|>", "ids": start, "tokens": ["<|box_start|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    _change(folder / "tokenizer_config.json", bos_token="<|box_start|>", tokenizer_class="PreTrainedTokenizerFast")
    starting = load_tokenizer(folder)
    expected = [*start, *plain.encode([text])[0]]
    assert starting.encode_plain(text) == expected
    assert starting.encode_plain("<|box_start|>" + text) == expected


def test_missing_folder_missing_files_and_broken_files_are_named(folder, tmp_path):
    with pytest.raises(UserError, match=r"nowhere, key model\.tokenizer_path: no such folder"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "hollow").mkdir()
    with pytest.raises(UserError, match=r"no tokenizer in the folder"):
        load_tokenizer(tmp_path / "hollow")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match="cannot load the tokenizer"):
        load_tokenizer(folder)


def test_a_tokenizer_without_an_end_token_is_refused(folder):
    _change(folder / "tokenizer_config.json", eos_token=None, tokenizer_class="PreTrainedTokenizerFast")
    with pytest.raises(UserError, match="no end token"):
        load_tokenizer(folder)


def test_a_bad_generation_config_is_refused(folder):
    _change(folder / "generation_config.json", eos_token_id="<|im_end|>")
    with pytest.raises(UserError, match=r"generation_config\.json, key eos_token_id: must be an id"):
        load_tokenizer(folder)


def test_the_real_qwen_tokenizer_loads(shared_assets):
    real = load_tokenizer(shared_assets / "qwen2.5-tokenizer")
    assert (real.size, real.end_id, real.pad_id, real.stop_ids) == (151_665, 151_645, 151_643, (151_645,))
