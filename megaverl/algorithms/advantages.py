"""Advantages of whole responses: how much better one scored than the others to the same prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def group_advantages(scores: Tensor, groups: Tensor | Sequence[int], *, norm_by_std: bool, eps: float = 1e-6) -> Tensor:
    """Scores relative to their group's mean, optionally in units of the group's standard deviation.

    With ``norm_by_std`` it is GRPO's outcome advantage (arXiv 2402.03300, section 4.1.2), ``(r - mean) / (std + eps)``;
    without it Dr.GRPO's (arXiv 2503.20783, section 3.2), ``r - mean``.

    The standard deviation is the unbiased one (divided by n - 1), as verl takes it. A group of one has no baseline and
    gets 0 (verl passes the raw score on there). Equal scores give exactly 0, never rounding noise divided by ``eps``:
    the mean is taken of differences to the group's first score, in float64.

    Args:
        scores: [sequences], finite.
        groups: [sequences], any integers; sequences of the same prompt have the same number. Order is free.
        norm_by_std: divide by the standard deviation.
        eps: added to the standard deviation.

    Returns:
        [sequences], dtype of ``scores`` (float32 for integers), finite: it saturates at the dtype's range.

    Raises:
        ValueError: shapes that differ, or scores that are not finite (their positions are named).
    """
    centred, member, count, dtype = _centred(scores, groups)
    if norm_by_std:
        variance = _sum_by(member, centred.square(), count) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)[member]
    return _saturated(centred, dtype)


def leave_one_out_advantages(scores: Tensor, groups: Tensor | Sequence[int]) -> Tensor:
    """RLOO (arXiv 2402.14740, section 3.2): the score less the mean score of the *other* samples of the prompt.

    ``r_i - (sum over j != i of r_j) / (n - 1)``, computed as ``n / (n - 1) (r_i - mean)``. Equal scores give exactly 0
    and so does a group of one, which has no others. Arguments, returns and errors as `group_advantages`.
    """
    centred, member, count, dtype = _centred(scores, groups)
    factor = torch.where(count > 1, count.double() / (count - 1).clamp(min=1), 0.0)
    return _saturated(centred * factor[member], dtype)


def batch_normed_advantages(
    scores: Tensor, groups: Tensor | Sequence[int], response_lengths: Tensor, *, eps: float = 1e-8
) -> Tensor:
    """REINFORCE++ with baseline (arXiv 2501.03262, section 3.2): the group's mean is taken off, the batch scales.

    ``a_i = r_i - mean of the group``, then ``(a_i - mean) / sqrt(variance + eps)`` with mean and unbiased variance over
    all response tokens of the batch, as verl whitens: a response weighs as its tokens. A batch whose scores are
    equal within every group gives 0; without any response token all are 0.

    Args:
        response_lengths: [sequences], tokens.
        eps: added to the variance.

    Other arguments, returns and errors as `group_advantages`.
    """
    centred, _, _, dtype = _centred(scores, groups)
    weights = torch.as_tensor(response_lengths, device=scores.device).double()
    tokens = weights.sum()
    if tokens == 0:
        return torch.zeros_like(scores, dtype=dtype)
    mean = (centred * weights).sum() / tokens
    variance = ((centred - mean).square() * weights).sum() / (tokens - 1).clamp(min=1)
    return _saturated((centred - mean) / (variance + eps).sqrt(), dtype)


def to_tokens(values: Tensor, cu_seqlens: Tensor, response_mask: Tensor) -> Tensor:
    """Gives every response token its sequence's value.

    Args:
        values: [sequences].
        cu_seqlens: [sequences + 1].
        response_mask: bool [tokens].

    Returns:
        [tokens], 0 outside the mask.
    """
    spread = torch.repeat_interleave(values, cu_seqlens.diff().long(), output_size=response_mask.numel())
    return torch.where(response_mask, spread, 0.0)


def _sum_by(member: Tensor, values: Tensor, count: Tensor) -> Tensor:
    return values.new_zeros(count.numel()).index_add(0, member, values)


def _centred(scores: Tensor, groups: Tensor | Sequence[int]) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
    """(scores less their group's mean in float64, dense number of each one's group, sizes of the groups, dtype)."""
    groups = torch.as_tensor(groups, dtype=torch.int64, device=scores.device)
    if scores.dim() != 1 or scores.shape != groups.shape:
        raise ValueError(f"scores {list(scores.shape)} and groups {list(groups.shape)} must both be [sequences]")
    if not torch.isfinite(scores).all():
        bad = (~torch.isfinite(scores)).nonzero().flatten().tolist()
        raise ValueError(f"scores are not finite at sequences {bad[:10]} ({len(bad)} in all)")
    dtype = scores.dtype if scores.is_floating_point() else torch.float32

    _, member = torch.unique(groups, return_inverse=True)  # [sequences], dense group number
    count = torch.bincount(member)  # [groups]
    first = torch.full_like(count, scores.numel()).scatter_reduce(
        0, member, torch.arange(scores.numel(), device=scores.device), reduce="amin"
    )
    values = scores.double()
    shifted = values - values[first][member]
    centred = shifted - (_sum_by(member, shifted, count) / count)[member]
    return centred, member, count, dtype


def _saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)
