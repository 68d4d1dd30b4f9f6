"""The sizes of a model, independent of how it is stored or split. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies differ from the plain ones; `models.rope.inverse_frequencies` has the formulas.

    Attributes:
        type: ``linear``, ``dynamic`` (plain up to the model's ``max_positions``, refused beyond), ``yarn``, ``llama3``.
        factor: how much longer the context became.
        original_max_positions: context length of the pretraining (yarn, llama3).
        beta_fast, beta_slow: rotations over the original context between which yarn blends the two kinds.
        truncate: yarn rounds the blend's ends to whole dimensions.
        attention_factor: yarn's scale of cosines and sines when it is given; else it follows from the factor.
        mscale, mscale_all_dim: weights of that factor's logarithm (yarn), used when both are given.
        low_freq_factor, high_freq_factor: wavelengths in original contexts between which llama3 blends.
    """

    type: Literal["linear", "dynamic", "yarn", "llama3"]
    factor: float
    original_max_positions: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None


@dataclass(frozen=True)
class ModelShape:
    """What every part needs to know of a decoder-only transformer.

    Attributes:
        family: name of the family, e.g. ``qwen2``.
        vocab: rows of the embedding in the checkpoint (the tokenizer may have fewer ids).
        tied: the output layer is the embedding.
        rope_scaling: what scales the rotary frequencies; None for the plain ones.
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
    rope_scaling: RopeScaling | None = None
    hf_config: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)

    def padded_vocab(self, tp: int) -> int:
        """Embedding rows after padding, over all TP ranks.

        vLLM pads to a multiple of 64 and then divides by tp; the training model pads alike so that both
        can share storage. A tp that does not divide 64 pads to a multiple of 64 * tp.
        """
        multiple = 64 if 64 % tp == 0 else 64 * tp
        return -(-self.vocab // multiple) * multiple
