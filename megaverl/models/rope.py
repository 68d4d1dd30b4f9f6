"""The rotary frequencies of a model shape. Pure torch.

Rotary embedding: arXiv 2104.09864. Pair j of a head of d dimensions turns by ``position * f_j`` with the plain
frequencies ``f_j = theta^(-2j/d)``. A scaling changes the frequencies, not the positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megaverl.errors import Problems
from megaverl.models.shape import ModelShape, RopeScaling


def inverse_frequencies(shape: ModelShape) -> tuple[Tensor, float]:
    """The frequencies that positions are multiplied by, and the factor of cosines and sines.

    ``dynamic`` gives the plain frequencies: it equals them for sequences up to ``max_positions``, and longer ones are
    refused by `check_length`, because its frequencies then depend on how long a sequence has become so far, so that a
    token's probability would change as the text grows.

    Returns:
        (float32 [head_dim / 2], attention factor). The factor multiplies the rotated queries and the rotated keys;
        attention scores are thus multiplied by its square.
    """
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    wavelengths = shape.rope_theta**exponents  # over 2 pi
    scaling = shape.rope_scaling
    if scaling is None or scaling.type == "dynamic":
        return 1.0 / wavelengths, 1.0
    if scaling.type == "linear":
        return 1.0 / wavelengths / scaling.factor, 1.0
    if scaling.type == "yarn":
        return _yarn(shape, scaling, wavelengths), _yarn_attention_factor(scaling)
    return _llama3(scaling, 1.0 / wavelengths), 1.0


def check_length(shape: ModelShape, longest: int, where: str, problems: Problems) -> None:
    """Adds a problem when a sequence of ``longest`` tokens cannot be trained with the shape's rope scaling."""
    scaling = shape.rope_scaling
    if scaling is not None and scaling.type == "dynamic" and longest > shape.max_positions:
        problems.add(
            f"rope scaling 'dynamic' is supported up to max_position_embeddings = {shape.max_positions} tokens "
            f"(where it scales nothing), sequences may have {longest}",
            where=where,
            fix="make the sequences shorter, or use a checkpoint with yarn, linear or llama3 scaling",
        )


def _yarn(shape: ModelShape, scaling: RopeScaling, wavelengths: Tensor) -> Tensor:
    """Blends plain and by ``factor`` lowered frequencies (arXiv 2309.00071, equations 17 to 23).

    Dimensions that turn more than ``beta_fast`` times over the original context stay, those that turn less than
    ``beta_slow`` times are lowered, in between the share changes linearly with the dimension's number.
    """
    d, context = shape.head_dim, scaling.original_max_positions
    if context is None:
        raise ValueError("yarn needs the context length of the pretraining")

    def dimension(turns: float) -> float:
        """The pair that turns this often over the original context: the frequency's formula solved for 2j / 2."""
        return d * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(shape.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    width = high - low or 0.001  # one pair alone: a step
    lowered_share = ((torch.arange(d // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    plain_share = 1 - lowered_share
    return 1.0 / (scaling.factor * wavelengths) * (1 - plain_share) + 1.0 / wavelengths * plain_share


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    """``0.1 ln(factor) + 1`` (arXiv 2309.00071, equation 22), unless the configuration gives it or its weights."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return grown(scaling.mscale) / grown(scaling.mscale_all_dim)
    return grown(1.0)


def _llama3(scaling: RopeScaling, plain: Tensor) -> Tensor:
    """Llama 3.1's scaling, as its published reference code defines it (``apply_scaling`` in meta-llama/llama-models).

    Frequencies with more than ``high_freq_factor`` turns over the original context stay, those with less than
    ``low_freq_factor`` turns are divided by ``factor``, in between the two are blended linearly in the turns.
    """
    low, high, context = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_positions
    if low is None or high is None or context is None:
        raise ValueError("llama3 scaling needs low_freq_factor, high_freq_factor and the original context")
    wavelength = 2 * math.pi / plain
    share = (context / wavelength - low) / (high - low)
    blended = (1 - share) * plain / scaling.factor + share * plain
    scaled = torch.where(wavelength > context / low, plain / scaling.factor, blended)
    return torch.where(wavelength < context / high, plain, scaled)
