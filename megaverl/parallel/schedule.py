"""Runs micro-batches through Megatron's schedules: one stage, 1F1B over pipeline stages, or interleaved 1F1B over the
chunks of a virtual pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megaverl.parallel.compat_megatron import get_forward_backward_func

Item = TypeVar("Item")
Finish = Callable[[Tensor], Any]
Forward = Callable[[nn.Module, Item], tuple[Tensor, Finish]]


def train_micro_batches(
    chunks: Sequence[nn.Module], items: Sequence[Item], forward: Forward
) -> list[dict[str, Tensor]]:
    """Forward and backward of every item; gradients add up in the model's buffer and are reduced over DP at the end.

    Losses are summed as they are: nothing is divided by the number of items, so the gradient does not depend on how
    a batch was cut, and DP ranks may have different numbers of items (pipeline stages of one replica may not).

    Args:
        chunks: the rank's model chunks; one, without a virtual pipeline.
        items: their number is a multiple of pp with several chunks (`micro_batches.fill_pipeline`).
        forward: (chunk, item) -> (the stage's output, finish); finish(output) -> (loss scalar, dict of sums), called
            on the last stage only.

    Returns:
        The dicts of the items, in order, on the last stage; empty on other stages.

    Raises:
        ValueError: there is no item; every DP rank must take part in the reduction with at least one.
    """
    if not items:
        raise ValueError("this rank has no micro-batch; every data parallel rank needs at least one sequence")

    def step(iterator: Any, chunk: nn.Module) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict]]]:
        output, finish = forward(chunk, next(iterator))

        def loss(output: Tensor) -> tuple[Tensor, Tensor, dict]:
            value, sums = finish(output)
            # Three values select Megatron's per-token path, which divides nothing; the count is not used.
            return value, torch.zeros([], dtype=torch.int), sums

        return output, loss

    return _run(chunks, items, step, forward_only=False)


@torch.no_grad()
def evaluate_micro_batches(chunks: Sequence[nn.Module], items: Sequence[Item], forward: Forward) -> list[Any]:
    """Forward passes only; what ``finish`` returns for each item, on the last stage (empty on others)."""
    if not items:
        return []

    def step(iterator: Any, chunk: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        output, finish = forward(chunk, next(iterator))
        return output, lambda output, non_loss_data: finish(output)

    return _run(chunks, items, step, forward_only=True)


def _run(
    chunks: Sequence[nn.Module], items: Sequence[Item], step: Callable[..., Any], *, forward_only: bool
) -> list[Any]:
    interleaved = len(chunks) > 1
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(items) for _ in chunks] if interleaved else iter(items),
        model=list(chunks),
        num_microbatches=len(items),
        seq_length=1,  # both are ignored: the configuration says that lengths vary
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
