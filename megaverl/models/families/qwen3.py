"""Qwen3, dense: q and k are normalised per head, no biases, and the head size does not follow from the hidden size."""

from __future__ import annotations

from megaverl.models.families.decoder import Family

QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    model_types=("qwen3",),
    qkv_bias=False,
    qk_norm=True,
    defaults={"head_dim": 128},
    must_be_off=("attention_bias",),
)
