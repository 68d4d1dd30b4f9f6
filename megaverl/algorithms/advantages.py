"""Group advantages: how much better a response scored than the others to the same prompt."""

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
    if norm_by_std:
        variance = _sum_by(member, centred.square(), count) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)[member]
    limit = torch.finfo(dtype).max
    return centred.clamp(-limit, limit).to(dtype)


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
