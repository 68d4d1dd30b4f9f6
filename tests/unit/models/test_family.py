import json
from pathlib import Path

import pytest

import megaverl
from megaverl.errors import UserError
from megaverl.models.family import FAMILIES, load_shape, shape_from_config, weight_map
from megaverl.models.shape import RopeScaling

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
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128}, "architecture Qwen3MoeForCausalLM is not"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}, "mixture-of-experts architecture Mixtral"),
        ({"num_experts": 8}, "mixture of experts"),
        ({"rope_scaling": {"type": "su", "factor": 4.0}}, "rope scaling 'su' is not supported; default, linear"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope scaling 'longrope' is not supported"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2]}}, "rope scaling 'mrope' is not supported"),
        ({"rope_scaling": {"type": "linear", "alpha": 4.0, "factor": 2}}, "'linear' with alpha is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling 'linear' without factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, r"factor must be at least 1, got 0\.5"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor must be a number above 0, got '4'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' without low_freq_factor"),
        ({"rope_scaling": [4]}, "must be a mapping or null"),
        ({"partial_rotary_factor": 0.5}, "rotating a part of each head is not supported"),
        ({"head_dim": 33}, "heads of 33 dimensions cannot be rotated in pairs"),
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


LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
QWEN3 = {key: value for key, value in CONFIG.items() if key != "use_sliding_window"} | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "attention_bias": False,
}


def test_the_shape_of_qwen3_0_6b():
    shape = shape_from_config(QWEN3)
    assert (shape.family, shape.heads, shape.kv_heads, shape.head_dim, shape.hidden) == ("qwen3", 16, 8, 128, 1024)
    assert (shape.qkv_bias, shape.qk_norm) == (False, True)
    assert shape_from_config({k: v for k, v in QWEN3.items() if k != "head_dim"}).head_dim == 128


def test_the_shape_of_llama_3_2_1b():
    shape = shape_from_config(LLAMA3)
    assert (shape.family, shape.heads, shape.kv_heads, shape.head_dim, shape.tied) == ("llama", 32, 8, 64, True)
    assert (shape.qkv_bias, shape.qk_norm, shape.norm_eps, shape.rope_theta) == (False, False, 1e-5, 5e5)
    assert shape.rope_scaling == RopeScaling(
        "llama3", 32.0, original_max_positions=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )
    assert hash(shape) == hash(shape_from_config(LLAMA3))


def test_smollm2_is_a_llama_with_all_its_extra_keys():
    """The 135M Instruct configuration: 9 heads, keys of its own that change nothing."""
    extra = {"rope_scaling": None, "is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 1}
    sizes = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
    config = {k: v for k, v in LLAMA3.items() if k not in ("head_dim", "mlp_bias")} | sizes | extra
    shape = shape_from_config(config)
    assert (shape.family, shape.heads, shape.kv_heads, shape.head_dim) == ("llama", 9, 3, 64)
    assert shape.rope_scaling is None


def test_llama_without_key_value_heads_has_as_many_as_heads():
    assert shape_from_config({k: v for k, v in LLAMA3.items() if k != "num_key_value_heads"}).kv_heads == 32


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_biases_of_llama_and_qwen3_are_refused(key):
    with pytest.raises(UserError, match=f"{key} True is not supported"):
        shape_from_config(LLAMA3 | {key: True})
    if key == "attention_bias":
        with pytest.raises(UserError, match=f"{key} True is not supported"):
            shape_from_config(QWEN3 | {key: True})


def test_both_ways_of_writing_a_scaling_mean_the_same():
    old = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}}
    new = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6} | old["rope_scaling"]}
    shape = shape_from_config(CONFIG | old)
    assert shape.rope_scaling == RopeScaling("yarn", 4.0, original_max_positions=8192)
    assert shape_from_config({k: v for k, v in CONFIG.items() if k != "rope_theta"} | new) == shape
    assert shape_from_config(CONFIG | old | new) == shape
    with pytest.raises(UserError, match="do not say the same"):
        shape_from_config(CONFIG | new | {"rope_scaling": {"type": "linear", "factor": 2}})


def test_an_absent_original_context_is_the_configured_one():
    scaling = shape_from_config(CONFIG | {"rope_scaling": {"type": "yarn", "factor": 4.0}}).rope_scaling
    assert scaling.original_max_positions == 32768


def test_known_architectures_are_listed():
    with pytest.raises(UserError, match="architectures: Qwen2ForCausalLM, Qwen3ForCausalLM, LlamaForCausalLM"):
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
@pytest.mark.parametrize("config", [CONFIG, QWEN3, LLAMA3], ids=lambda c: c["model_type"])
def test_the_rows_name_exactly_the_tensors_of_transformers(config, tied):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = config | {"num_hidden_layers": 2, "vocab_size": 1000, "tie_word_embeddings": tied}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}  # a tied head is listed once
    rows = weight_map(shape_from_config(config))
    assert {name: rows.hf_shape(name) for name in rows.hf_names()} == theirs
    assert len(rows.hf_names()) == len(theirs)


def test_a_family_is_one_short_file():
    """docs/add-a-family.md promises it."""
    files = {p.name: p for p in (Path(megaverl.__file__).parent / "models" / "families").glob("*.py")}
    for family in FAMILIES:
        assert len(files[f"{family.name}.py"].read_text().splitlines()) < 100
