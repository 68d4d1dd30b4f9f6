"""The sizes of a model, independent of how it is stored or split. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """What every part needs to know of a decoder-only transformer.

    Attributes:
        family: name of the family, e.g. ``qwen2``.
        vocab: rows of the embedding in the checkpoint (the tokenizer may have fewer ids).
        tied: the output layer is the embedding.
        rope_scaling: the checkpoint's own rope scaling entry, or None.
        hf_config: the checkpoint's config.json, kept so that an export can give it back unchanged.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool = False
    rope_scaling: dict[str, Any] | None = None
    hf_config: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)

    def padded_vocab(self, tp: int) -> int:
        """Embedding rows after padding, over all TP ranks.

        vLLM pads to a multiple of 64 and then divides by tp; the training model pads alike so that both
        can share storage. A tp that does not divide 64 pads to a multiple of 64 * tp.
        """
        multiple = 64 if 64 % tp == 0 else 64 * tp
        return -(-self.vocab // multiple) * multiple
