"""Sizes of published models by name, so that a plan can be made before the checkpoint is there. Pure.

Only for plans: a run reads the checkpoint's own config.json. Sizes are those of the models' config.json files.
"""

from __future__ import annotations

import re
from typing import Any

from megaverl.models.family import shape_from_config
from megaverl.models.shape import ModelShape

# name: layers, hidden, heads, KV heads, intermediate, vocabulary, tied
_SIZES = {
    "Qwen2.5-0.5B": (24, 896, 14, 2, 4864, 151936, True),
    "Qwen2.5-1.5B": (28, 1536, 12, 2, 8960, 151936, True),
    "Qwen2.5-3B": (36, 2048, 16, 2, 11008, 151936, True),
    "Qwen2.5-7B": (28, 3584, 28, 4, 18944, 152064, False),
    "Qwen2.5-14B": (48, 5120, 40, 8, 13824, 152064, False),
    "Qwen2.5-32B": (64, 5120, 40, 8, 27648, 152064, False),
    "Qwen2.5-72B": (80, 8192, 64, 8, 29568, 152064, False),
    "Qwen3-0.6B": (28, 1024, 16, 8, 3072, 151936, True),
    "Qwen3-1.7B": (28, 2048, 16, 8, 6144, 151936, True),
    "Qwen3-4B": (36, 2560, 32, 8, 9728, 151936, True),
    "Qwen3-8B": (36, 4096, 32, 8, 12288, 151936, False),
    "Qwen3-14B": (40, 5120, 40, 8, 17408, 151936, False),
    "Qwen3-32B": (64, 5120, 64, 8, 25600, 151936, False),
}


def published_name(path: str) -> str | None:
    """The published model that a path or hub name speaks of (``models/Qwen2.5-7B-Instruct``), or None."""
    found = re.match(r"(Qwen2\.5|Qwen3)-\d+(\.\d+)?B(?=$|-)", path.rstrip("/").rpartition("/")[2])
    return found[0] if found and found[0] in _SIZES else None


def published_shape(name: str) -> ModelShape:
    """The shape of a model that `published_name` found. Raises KeyError for another name."""
    layers, hidden, heads, kv_heads, intermediate, vocab, tied = _SIZES[name]
    config: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
    }
    if name.startswith("Qwen3"):
        config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}
    else:
        config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    return shape_from_config(config, where=name)
