"""Qwen2: Qwen 1.5, 2 and 2.5 (Instruct, Math and Coder too). Llama's shape with biases on q, k and v."""

from __future__ import annotations

from megaverl.models.families.decoder import Family

QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    qkv_bias=True,
    qk_norm=False,
)
