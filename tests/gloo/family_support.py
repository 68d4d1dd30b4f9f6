"""Tiny models of every family with the head counts of real ones, written by transformers itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.gloo.policy_support import VOCAB


@dataclass(frozen=True)
class Tiny:
    """One tiny model: a family with the (attention, KV) head counts of a real model of it."""

    model_type: str
    heads: int
    kv_heads: int
    tied: bool
    layers: int = 3
    more: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        scaling = self.more.get("rope_parameters", {}).get("rope_type", "")
        return f"{self.model_type} {self.heads}/{self.kv_heads} {'tied' if self.tied else 'untied'} {scaling}".strip()


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def make_tiny(folder: Path, tiny: Tiny, seed: int = 0) -> PreTrainedModel:
    """A random float32 model whose biases and norms are not at their trivial values; saved in ``folder``."""
    torch.manual_seed(seed)
    head_dim = 16 if tiny.model_type == "qwen3" else 8  # Qwen3's is not hidden / heads
    config = AutoConfig.for_model(
        tiny.model_type,
        vocab_size=VOCAB,
        hidden_size=tiny.heads * 8,
        head_dim=head_dim,
        intermediate_size=112,
        num_hidden_layers=tiny.layers,
        num_attention_heads=tiny.heads,
        num_key_value_heads=tiny.kv_heads,
        max_position_embeddings=128,
        tie_word_embeddings=tiny.tied,
        initializer_range=0.08,
        **{key: dict(value) if isinstance(value, dict) else value for key, value in tiny.more.items()},
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                param.normal_(0, 0.1)
            elif "norm" in name:
                param.normal_(1, 0.1)
    model.save_pretrained(folder)
    return model
