"""Llama 2 and 3, and the models that share their architecture: SmolLM2, TinyLlama and others."""

from __future__ import annotations

from megaverl.models.families.decoder import Family

LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    qkv_bias=False,
    qk_norm=False,
    defaults={"num_key_value_heads": None},  # as many as attention heads
    must_be_off=("attention_bias", "mlp_bias"),
    recomputed=("model.layers.{i}.self_attn.rotary_emb.inv_freq",),
)
