"""Which modules Megatron builds a decoder layer from, by kernel backend, and the flags that go with them.

All backends store the same parameters in the same order, so weights are shared with vLLM whichever runs. Transformer
Engine alone names two of them differently (the weight map's ``alternatives``): its norms are part of a linear layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megaverl.models.attention import PackedAttention, QkvOrderedSelfAttention
from megaverl.models.norm import RMSNorm
from megaverl.models.shape import ModelShape
from megaverl.parallel.compat_megatron import (
    ModuleSpec,
    TransformerConfig,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    without_noise,
)
from megaverl.parallel.device import Backend


@dataclass
class DecoderConfig(TransformerConfig):
    """Megatron's configuration, and which kernels the layers use.

    Attributes:
        kernels: the backend, as `parallel.device.Device` names it.
    """

    kernels: Backend = "eager"


def kernel_flags(backend: Backend) -> dict[str, Any]:
    """Fields of `DecoderConfig` that depend on the backend."""
    fast = backend != "eager"
    return {
        "kernels": backend,
        # Weight gradients are added to the float32 buffer inside the matrix product.
        "gradient_accumulation_fusion": fast,
        # The MLP's activation is the module that the layer names, on the joined [gate, up].
        "use_te_activation_func": fast,
        # These need kernels (or torch.compile) that eager does without and that the others have their own of.
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }


def layer_spec(shape: ModelShape, backend: Backend) -> ModuleSpec:
    """The parts of one decoder layer."""
    if backend == "te":
        return _transformer_engine(shape)
    spec = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    norm = norm_class(backend)
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    layer.self_attn_bda = layer.mlp_bda = _add_residual
    attention = layer.self_attention
    attention.module = attention_class(backend)
    attention.submodules.core_attention = PackedAttention
    attention.submodules.q_layernorm = attention.submodules.k_layernorm = norm if shape.qk_norm else None
    if backend == "flash":
        from megaverl.models.flash_layers import FlashAttention, FlashSwiglu

        attention.submodules.core_attention = FlashAttention
        _mlp_parts(layer.mlp).activation_func = FlashSwiglu
    return spec


def attention_class(backend: Backend) -> type:
    """The self-attention around the core attention."""
    if backend == "eager":
        return QkvOrderedSelfAttention
    from megaverl.models.rotating_attention import RotatingSelfAttention

    return RotatingSelfAttention


def norm_class(backend: Backend) -> type:
    """The norm of a layer, and the final one."""
    if backend == "te":
        from megaverl.parallel.compat_megatron import transformer_engine_norm

        return transformer_engine_norm()
    if backend == "flash":
        from megaverl.models.flash_layers import FlashRMSNorm

        return FlashRMSNorm
    return RMSNorm


def _transformer_engine(shape: ModelShape) -> ModuleSpec:
    with without_noise():
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=shape.qk_norm, use_te_activation_func=True)
    layer = spec.submodules
    layer.self_attn_bda = layer.mlp_bda = _add_residual
    layer.self_attention.module = attention_class("te")
    if not shape.qk_norm:
        layer.self_attention.submodules.q_layernorm = layer.self_attention.submodules.k_layernorm = None
    return spec


def _mlp_parts(mlp: Any) -> Any:
    """Megatron's submodules of an MLP, from a spec (0.16) or from a partial call (0.19)."""
    return mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules


def _add_residual(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Megatron's "bias, dropout, add" step for models without output biases and dropout."""
    return lambda x_with_bias, residual, prob: residual + x_with_bias[0]
