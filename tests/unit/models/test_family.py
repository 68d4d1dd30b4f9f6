import json

import pytest

from megaverl.errors import UserError
from megaverl.models.family import FAMILIES, load_shape, shape_from_config, weight_map

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_the_shape_of_qwen_2_5_0_5b():
    shape = shape_from_config(CONFIG)
    assert (shape.family, shape.layers, shape.hidden, shape.heads, shape.kv_heads) == ("qwen2", 24, 896, 14, 2)
    assert (shape.head_dim, shape.intermediate, shape.vocab, shape.max_positions) == (64, 4864, 151936, 32768)
    assert (shape.norm_eps, shape.rope_theta, shape.tied, shape.qkv_bias, shape.qk_norm) == (
        1e-6,
        1e6,
        True,
        True,
        False,
    )
    assert shape.hf_config == CONFIG


def test_both_ways_of_writing_the_rotary_base():
    new = CONFIG | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    del new["rope_theta"]
    assert shape_from_config(new).rope_theta == 5e5
    assert shape_from_config(CONFIG | {"rope_scaling": None}).rope_theta == 1e6
    neither = {k: v for k, v in CONFIG.items() if k != "rope_theta"}
    assert shape_from_config(neither).rope_theta == 10000.0
    both = new | {"rope_theta": 1e6}
    with pytest.raises(UserError, match=r"rope_theta is 500000\.0 here and 1000000\.0"):
        shape_from_config(both)


def test_transformers_agrees_about_defaults():
    from transformers import Qwen2Config

    theirs = Qwen2Config(**{k: v for k, v in CONFIG.items() if k not in ("rope_theta", "tie_word_embeddings")})
    mine = shape_from_config({k: v for k, v in CONFIG.items() if k not in ("rope_theta", "tie_word_embeddings")})
    assert mine.rope_theta == theirs.rope_parameters["rope_theta"]
    assert mine.tied == theirs.tie_word_embeddings
    assert shape_from_config(json.loads(theirs.to_json_string()) | {"head_dim": 96}).head_dim == 96


def test_absent_key_value_heads_are_refused_and_null_means_heads():
    assert shape_from_config(CONFIG | {"num_key_value_heads": None}).kv_heads == 14
    with pytest.raises(UserError, match="key num_key_value_heads: missing"):
        shape_from_config({k: v for k, v in CONFIG.items() if k != "num_key_value_heads"})


def test_model_type_decides_without_architectures():
    assert shape_from_config({k: v for k, v in CONFIG.items() if k != "architectures"}).family == "qwen2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "architecture FalconForCausalLM is not known"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "mixture-of-experts architecture Qwen2MoeForCausalLM"),
        ({"architectures": None, "model_type": "t5"}, "architecture t5 is not known"),
        ({"architectures": None, "model_type": None}, "neither architectures nor model_type"),
        ({"num_experts": 8}, "mixture of experts"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling 'yarn' with factor is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}}, "rope scaling 'llama3' is not supported"),
        ({"use_sliding_window": True}, "sliding window attention is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layers of type sliding_attention"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({"attention_dropout": 0.1}, "attention dropout 0.1"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised checkpoint"),
        ({"num_hidden_layers": 0}, "key num_hidden_layers: must be a whole number of at least 1, got 0"),
        ({"hidden_size": "896"}, "key hidden_size: must be a whole number"),
        ({"hidden_size": 900}, "hidden_size 900 is not a multiple of 14 heads"),
        ({"num_key_value_heads": 3}, "14 attention heads cannot be shared out over 3"),
        ({"rms_norm_eps": None}, "key rms_norm_eps: must be a number above 0"),
        ({"tie_word_embeddings": "yes"}, "key tie_word_embeddings: must be true or false"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(change, message):
    with pytest.raises(UserError, match=message):
        shape_from_config(CONFIG | change)


def test_known_architectures_are_listed():
    with pytest.raises(UserError, match="known architectures: Qwen2ForCausalLM"):
        shape_from_config(CONFIG | {"architectures": ["GPT2LMHeadModel"]})


def test_all_problems_at_once():
    with pytest.raises(UserError) as caught:
        shape_from_config(CONFIG | {"hidden_act": "relu", "vocab_size": -1, "use_sliding_window": True})
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "there is no such file"), ("{", "cannot be read"), ("[]", "must hold a JSON object")],
)
def test_a_bad_file_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        load_shape(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match="there is no such folder"):
        load_shape(tmp_path / "nowhere")


def test_load_shape_reads_the_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert load_shape(str(tmp_path)) == shape_from_config(CONFIG)


def test_every_family_is_registered_once():
    names = [f.name for f in FAMILIES]
    architectures = [a for f in FAMILIES for a in f.architectures]
    assert len(set(names)) == len(names)
    assert len(set(architectures)) == len(architectures)


@pytest.mark.parametrize("tied", [True, False])
def test_the_rows_name_exactly_the_tensors_of_transformers(tied):
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = CONFIG | {"num_hidden_layers": 2, "vocab_size": 1000, "tie_word_embeddings": tied}
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**config))
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}  # a tied head is listed once
    rows = weight_map(shape_from_config(config))
    assert {name: rows.hf_shape(name) for name in rows.hf_names()} == theirs
    assert len(rows.hf_names()) == len(theirs)
