"""How packed sequences are laid out for one pass through the model: positions, and buckets for attention. Pure torch.

Attention over a pack must stay inside each sequence and must never build a score matrix of the whole pack. Sequences
of similar length are therefore padded to a common length, bucket by bucket, only for the attention itself. Padding goes
behind the tokens, where causal attention never looks, so no mask is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FILL = 0.75
"""A bucket takes sequences down to this share of its longest one ..."""
SLACK = 16
"""... or shorter by this many tokens at most, whichever takes more: short sequences cost less than another bucket."""


@dataclass(frozen=True)
class Bucket:
    """Sequences padded to one length: ``slots[start : start + sequences * length]``."""

    start: int
    sequences: int
    length: int


@dataclass(frozen=True)
class PackLayout:
    """Where each token of a pack sits in the buckets.

    Attributes:
        positions: int64 [tokens], position of each token in its own sequence.
        slots: int64 [slots], the token in each slot of all buckets; padding slots name token 0.
        home: int64 [tokens], the slot of each token; None when the buckets hold the tokens in order, unpadded.
        cu_seqlens: int32 [sequences + 1], where each sequence that is not empty starts, and the end.
        longest: tokens of the longest sequence.
    """

    positions: Tensor
    slots: Tensor
    home: Tensor | None
    buckets: tuple[Bucket, ...]
    cu_seqlens: Tensor
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> PackLayout:
        """The layout of sequences of these lengths, back to back; empty sequences are allowed."""
        starts = [0]
        for n in lengths:
            starts.append(starts[-1] + n)
        tokens = starts[-1]
        size = torch.tensor(lengths, dtype=torch.int64)
        positions = torch.arange(tokens) - torch.repeat_interleave(torch.tensor(starts[:-1], dtype=torch.int64), size)

        slots, home, buckets, at = [], torch.empty(tokens, dtype=torch.int64), [], 0
        for members in _buckets(lengths):
            longest = lengths[members[0]]
            offset = torch.arange(longest)
            first = torch.tensor([starts[m] for m in members]).unsqueeze(1)
            real = offset < size[members].unsqueeze(1)
            token = torch.where(real, first + offset, 0).flatten()
            home[token[real.flatten()]] = at + real.flatten().nonzero().squeeze(1)
            slots.append(token)
            buckets.append(Bucket(at, len(members), longest))
            at += token.numel()
        ends = [0, *(starts[i + 1] for i, n in enumerate(lengths) if n)]
        joined = torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64)
        in_order = torch.equal(joined, torch.arange(tokens))
        return cls(
            positions=positions.to(device),
            slots=joined.to(device),
            home=None if in_order else home.to(device),
            buckets=tuple(buckets),
            cu_seqlens=torch.tensor(ends, dtype=torch.int32).to(device),
            longest=max(lengths, default=0),
        )


def _buckets(lengths: Sequence[int]) -> list[list[int]]:
    """Sequences grouped by similar length, longest first; in a bucket they keep their order in the pack."""
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: (-lengths[i], i))
    groups: list[list[int]] = []
    for i in order:
        if groups and lengths[i] >= min(FILL * lengths[groups[-1][0]], lengths[groups[-1][0]] - SLACK):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


class _ToSlots(torch.autograd.Function):
    """tokens -> slots. A gather both ways: each token has one slot, so the gradient needs no sum."""

    @staticmethod
    def forward(ctx, x: Tensor, slots: Tensor, home: Tensor) -> Tensor:
        ctx.save_for_backward(home)
        return x.index_select(0, slots)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (home,) = ctx.saved_tensors
        return grad.index_select(0, home), None, None


def to_slots(x: Tensor, layout: PackLayout) -> Tensor:
    """[tokens, ...] -> [slots, ...]; what padding slots hold must not reach a token."""
    return x if layout.home is None else _ToSlots.apply(x, layout.slots, layout.home)


def from_slots(x: Tensor, layout: PackLayout) -> Tensor:
    """[slots, ...] -> [tokens, ...]; the inverse of `to_slots`."""
    return x if layout.home is None else x.index_select(0, layout.home)
