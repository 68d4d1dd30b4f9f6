"""Estimators of KL(policy || reference) from samples of the policy (John Schulman, "Approximating KL divergence").

With ``d = log policy - log reference`` of a token that the policy sampled:

=================  =====================  ============================================
k1                 ``d``                  unbiased, high variance, may be negative
k2, mse            ``d^2 / 2``            biased, low variance
k3, low_var_kl     ``exp(-d) - 1 + d``    unbiased, low variance, never negative
abs                ``|d|``                a distance, not an estimate
=================  =====================  ============================================

k3 is bounded as in verl: ``d`` to [-20, 20] (else exp overflows) and the result to at most 10, beyond which a token
has no gradient. It is computed as ``expm1(-d) + d``, since ``exp(-d) - 1`` loses all digits of float32 at ``d < 1e-4``.
"""

from __future__ import annotations

import torch
from torch import Tensor

K3_EXPONENT_BOUND = 20.0
K3_VALUE_BOUND = 10.0


def kl_penalty(log_probs: Tensor, reference: Tensor, kind: str) -> Tensor:
    """Per-token KL estimate, differentiable in ``log_probs``.

    Args:
        log_probs: [tokens], the policy's.
        reference: [tokens], the reference model's of the same tokens.
        kind: ``k1``, ``k2``, ``k3``, ``low_var_kl``, ``abs`` or ``mse``.

    Returns:
        [tokens].

    Raises:
        ValueError: an unknown kind.
    """
    difference = log_probs - reference
    match kind:
        case "k1":
            return difference
        case "abs":
            return difference.abs()
        case "k2" | "mse":
            return 0.5 * difference.square()
        case "k3" | "low_var_kl":
            bounded = difference.clamp(-K3_EXPONENT_BOUND, K3_EXPONENT_BOUND)
            return (torch.expm1(-bounded) + bounded).clamp(max=K3_VALUE_BOUND)
    raise ValueError(f"unknown KL estimator {kind!r}: k1, k2, k3, low_var_kl, abs or mse")
