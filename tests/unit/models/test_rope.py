"""Rotary frequencies against the ones of transformers."""

import dataclasses

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megaverl.errors import Problems
from megaverl.models.family import shape_from_config
from megaverl.models.rope import check_length, inverse_frequencies
from megaverl.models.shape import RopeScaling

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": YARN,
    "yarn, short context": YARN | {"original_max_position_embeddings": 64},
    "yarn, own factor": YARN | {"attention_factor": 1.25},
    "yarn, weights": YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn, one weight": YARN | {"mscale": 0.707},
    "yarn, betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn, no step": YARN | {"beta_fast": 4.0, "beta_slow": 4.0, "truncate": False},
    "yarn, factor 1": YARN | {"factor": 1.0},
    "llama3": LLAMA3,
    "llama3.2": LLAMA3 | {"factor": 32.0},
    "llama3, wide": LLAMA3 | {"low_freq_factor": 0.5, "high_freq_factor": 64.0},
}


def both(entry, **sizes):
    """The configuration of transformers and our shape of the same config.json."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 131072} | sizes
    entry = {"rope_theta": 500000.0} | entry
    config = LlamaConfig(num_hidden_layers=1, vocab_size=100, intermediate_size=8, rope_parameters=dict(entry), **sizes)
    return config, shape_from_config(config.to_dict() | {"architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("sizes", [{}, {"head_dim": 96}, {"hidden_size": 256}], ids=str)
@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_frequencies_and_factor_are_those_of_transformers_bit_for_bit(name, sizes, theta):
    entry = SCALINGS[name] | {"rope_theta": theta}
    config, shape = both(entry, **sizes)
    kind = entry["rope_type"]
    compute = LlamaRotaryEmbedding.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    want, want_factor = compute(config)
    got, factor = inverse_frequencies(shape)
    assert got.dtype == torch.float32
    assert got.shape == (shape.head_dim // 2,)
    assert torch.equal(got, want)
    assert factor == want_factor


def test_the_scalings_differ():
    """The comparison above would be empty if the scaling never reached the numbers."""
    found = {name: inverse_frequencies(both(entry)[1]) for name, entry in SCALINGS.items()}
    plain = found["default"][0]
    same = {name for name, (frequencies, _) in found.items() if torch.equal(frequencies, plain)}
    assert same == {"default", "dynamic", "yarn, factor 1"}
    assert found["yarn"][1] == pytest.approx(1.138629, abs=1e-6)  # 0.1 ln 4 + 1
    assert found["yarn, own factor"][1] == 1.25


def test_dynamic_scaling_is_the_plain_one_in_transformers_up_to_the_configured_context():
    config, shape = both(SCALINGS["dynamic"], max_position_embeddings=256)
    plain, _ = inverse_frequencies(shape)
    assert torch.equal(ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=256)[0], plain)
    assert not torch.equal(ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=257)[0], plain)
    problems = Problems()
    check_length(shape, 256, "data", problems)
    assert problems.found == []
    check_length(shape, 257, "data.max_response_length", problems)
    (found,) = problems.found
    assert "rope scaling 'dynamic' is supported up to max_position_embeddings = 256" in str(found)
    check_length(dataclasses.replace(shape, rope_scaling=None), 257, "data", other := Problems())
    assert other.found == []


def test_a_config_of_transformers_4_means_the_same():
    """Qwen2.5's own recipe for long texts, in the form of its model card."""
    config = {
        "rope_theta": 1e6,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    }
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    theirs = Qwen2Config(**sizes, **{k: dict(v) if isinstance(v, dict) else v for k, v in config.items()})
    written = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 9}
    shape = shape_from_config(written | sizes | config | {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6})
    assert shape.rope_scaling == RopeScaling("yarn", 4.0, original_max_positions=32768)
    want, want_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    got, factor = inverse_frequencies(shape)
    assert torch.equal(got, want)
    assert factor == want_factor
