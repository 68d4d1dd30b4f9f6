"""What training needs and rollout does not, out of the GPU's memory in between.

Tensors keep their identity: only the memory behind them goes away and comes back, so optimizers, views and modules that
hold them need not know. Parameters that a rollout engine serves from must stay where they are; nothing here touches
those unless asked to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Module


class HostCopies:
    """Moves the memory behind tensors on a GPU to pinned host memory and back.

    The pinned copies are allocated once and kept: pinning is slow. On a CPU both moves do nothing, since the memory is
    the host's already.

    Args:
        tensors: gives the tensors to move; asked anew before each move away, because optimizers make moments late.
        constant: what is in them stays as it is until `changed` is called (a frozen model), so only the first move away
            is a copy.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, constant: bool = False) -> None:
        self._tensors = tensors
        self._constant = constant
        self._known: set[int] = set()  # constant tensors whose host copy is good
        self._pinned: dict[int, Tensor] = {}
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []

    def to_host(self) -> int:
        """Copies to the host and frees the GPU's memory (to torch's allocator); returns the bytes freed now."""
        storages = {}
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            if tensor.is_cuda and storage.nbytes():
                storages[storage.data_ptr()] = storage
        moved = [(storage, self._pinned_for(storage)) for storage in storages.values()]
        for storage, host in moved:
            if storage._cdata not in self._known:
                host.copy_(_bytes(storage), non_blocking=True)
        if self._constant:
            self._known.update(storage._cdata for storage, _ in moved)
        if moved:
            torch.cuda.synchronize()
        for storage, _ in moved:
            storage.resize_(0)
        self._away += moved
        return sum(host.numel() for _, host in moved)

    def to_device(self) -> None:
        """Brings everything back, ready for kernels on the current stream; does nothing when nothing is away."""
        for storage, host in self._away:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)
        self._away = []

    def changed(self) -> None:
        """Says that constant tensors were written: the next move away copies them again."""
        self._known.clear()

    def _pinned_for(self, storage: torch.UntypedStorage) -> Tensor:
        # A storage object lives as long as its tensors; its address names it while the memory behind it changes.
        key, size = storage._cdata, storage.nbytes()
        if key not in self._pinned or self._pinned[key].numel() != size:
            self._pinned[key] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self._pinned[key]


class GradientBuffers:
    """The gradient buffers of model chunks wrapped for data parallelism; no gradient outlives an update.

    Freeing them is no copy, on a CPU and on a GPU alike.
    """

    def __init__(self, chunks: Iterable[Module]) -> None:
        self._buffers = [b.grad_data for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        self._sizes = [b.untyped_storage().nbytes() for b in self._buffers]

    def free(self) -> int:
        """Drops the gradients and their memory; returns the bytes freed now."""
        freed = sum(b.untyped_storage().nbytes() for b in self._buffers)
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(0)
        return freed

    def allocate(self) -> None:
        """Makes room for gradients again where there is none; what it holds is not defined."""
        for buffer, size in zip(self._buffers, self._sizes, strict=True):
            if buffer.untyped_storage().nbytes() != size:
                buffer.untyped_storage().resize_(size)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
