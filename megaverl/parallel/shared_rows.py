"""Rows of a divided parameter that several tensor parallel ranks hold alike: KV heads that are fewer than ranks.

Megatron knows parameters that are whole on every rank and parameters that are divided. A QKV weight whose query rows
are divided and whose KV rows are held by several ranks is neither. Each of these ranks sees the gradient of its own
query heads only, so the gradients of the shared rows are summed over the ranks that hold them, and the norm of the
whole gradient takes them from one of these ranks. Equal gradients, moments and weights then stay equal bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class SharedRows:
    """Which rows of a parameter are shared; the parameter carries it as attribute ``shared_rows``.

    Attributes:
        first: the first shared row; all behind it are shared too.
        unit: which unit (KV head) these rows are.
        units: number of units; each is held by the same number of neighbouring ranks.
        copy: number of this rank among the holders of the unit.
    """

    first: int
    unit: int
    units: int
    copy: int


def sum_shared_rows(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Adds up the ``main_grad`` of shared rows over the ranks that hold the same unit; collective over ``group``.

    Every unit has a place of its own in one all-reduce over the whole TP group, which gives all of its ranks the same
    bits and needs no further groups.
    """
    for parameter, rows in _shared(model.parameters()):
        grad = parameter.main_grad[rows.first :]
        places = grad.new_zeros(rows.units, *grad.shape)
        places[rows.unit] = grad
        dist.all_reduce(places, group=group)
        grad.copy_(places[rows.unit])


@contextlib.contextmanager
def counted_once(models: Iterable[nn.Module]) -> Iterator[None]:
    """Inside the block, the ``main_grad`` of shared rows is 0 on all of their ranks but the first."""
    hidden = []
    for model in models:
        for parameter, rows in _shared(model.parameters()):
            if rows.copy:
                grad = parameter.main_grad[rows.first :]
                hidden.append((grad, grad.clone()))
                grad.zero_()
    try:
        yield
    finally:
        for grad, value in hidden:
            grad.copy_(value)


def _shared(parameters: Iterable[nn.Parameter]) -> Iterator[tuple[torch.Tensor, SharedRows]]:
    for parameter in parameters:
        rows = getattr(parameter, "shared_rows", None)
        if rows is not None and parameter.requires_grad:
            yield parameter, rows
