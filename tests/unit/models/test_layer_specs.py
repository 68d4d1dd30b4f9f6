import pytest

from megaverl.models.attention import PackedAttention, QkvOrderedSelfAttention
from megaverl.models.gpt import transformer_config
from megaverl.models.layer_specs import kernel_flags, layer_spec, norm_class
from megaverl.models.norm import RMSNorm
from megaverl.models.shape import ModelShape
from megaverl.parallel.device import choose_device
from megaverl.parallel.layout import Layout

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96, "vocab": 100}
MORE = {"max_positions": 64, "norm_eps": 1e-6, "rope_theta": 1e4, "tied": True, "qkv_bias": True}


def shape(qk_norm=False):
    return ModelShape("qwen2", **SIZES, **MORE, qk_norm=qk_norm)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_case_44_eager_layers_are_made_of_modules_that_need_no_other_package(qk_norm):
    layer = layer_spec(shape(qk_norm), "eager").submodules
    attention = layer.self_attention
    assert layer.input_layernorm is layer.pre_mlp_layernorm is norm_class("eager") is RMSNorm
    assert attention.module is QkvOrderedSelfAttention
    assert attention.submodules.core_attention is PackedAttention
    assert attention.submodules.q_layernorm is (RMSNorm if qk_norm else None)
    config = transformer_config(shape(qk_norm), Layout(), choose_device(device="cpu"))
    assert config.kernels == "eager"
    assert config.normalization == "RMSNorm"
    assert not config.persist_layer_norm  # Megatron's default is on, and asserts in torch's norm


def test_eager_asks_megatron_for_no_fused_kernel():
    assert [name for name, value in kernel_flags("eager").items() if value] == ["kernels"]


@pytest.mark.parametrize("backend", ["flash", "te"])
def test_fast_backends_add_weight_gradients_inside_the_product(backend):
    flags = kernel_flags(backend)
    assert flags["gradient_accumulation_fusion"]
    assert flags["use_te_activation_func"]
    assert flags["kernels"] == backend
