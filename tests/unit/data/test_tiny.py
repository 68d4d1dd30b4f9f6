import filecmp
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megaverl.data.arithmetic import every_question
from megaverl.data.tiny import build_tiny_checkpoint
from megaverl.errors import UserError


def test_the_checkpoint_loads_with_plain_transformers(tiny_checkpoint):
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    config = model.config
    assert config.model_type == "qwen2"
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (128, 4, 2)
    assert config.vocab_size >= len(tokenizer) == 1024
    assert config.tie_word_embeddings
    assert model.get_output_embeddings().weight.dtype == torch.float32
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.encode("<|im_end|>")[0]
    assert tokenizer.pad_token == "<|endoftext|>"


def test_the_tokenizer_gives_back_any_text_and_splits_numbers_into_digits(tokenizer):
    hf = tokenizer.hf
    for text in ("Ada has 10 apples.\n\n  x", "naïve café 你好 🎉", "don't <|im_end|> <tool_call>"):
        assert hf.decode(hf.encode(text)) == text
    assert [hf.decode([i]) for i in hf.encode("1024+7")] == ["1", "0", "2", "4", "+", "7"]


def test_the_questions_of_the_tiny_task_are_short(tokenizer):
    lengths = [len(ids) for ids in tokenizer.encode([problem.question for problem in every_question()])]
    assert max(lengths) <= 28


def test_the_same_seed_gives_the_same_files_and_another_seed_other_weights(tiny_checkpoint, tmp_path):
    same = build_tiny_checkpoint(tmp_path / "same", seed=0)
    names = sorted(path.name for path in same.iterdir())
    assert filecmp.cmpfiles(same, tiny_checkpoint, names, shallow=False) == (names, [], [])
    other = build_tiny_checkpoint(tmp_path / "other", seed=1)
    assert not filecmp.cmp(other / "model.safetensors", same / "model.safetensors", shallow=False)
    assert filecmp.cmp(other / "tokenizer.json", same / "tokenizer.json", shallow=False)


def test_building_leaves_the_random_state_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_tiny_checkpoint(tmp_path / "model", seed=0, layers=1)
    assert torch.equal(torch.rand(3), expected)


def test_other_shapes(tmp_path):
    folder = build_tiny_checkpoint(tmp_path / "model", layers=3, heads=2, kv_heads=1, hidden=64, vocab=1100, tied=False)
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["vocab_size"], config["tie_word_embeddings"]) == (3, 1100, False)
    assert "lm_head.weight" in AutoModelForCausalLM.from_pretrained(folder).state_dict()
    with pytest.raises(ValueError, match="at least 1024"):
        build_tiny_checkpoint(tmp_path / "small", vocab=100)


def test_a_folder_with_something_in_it_is_not_overwritten_unless_asked(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="exists already"):
        build_tiny_checkpoint(tmp_path / "model")
    assert (tmp_path / "model" / "mine.txt").read_text() == "keep"
    build_tiny_checkpoint(tmp_path / "model", layers=1, overwrite=True)
    assert not (tmp_path / "model" / "mine.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
