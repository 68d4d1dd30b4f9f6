"""Memory of the rollout weights that are not training weights: given up while training, taken back for a handoff."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


class OwnWeights:
    """Frees and restores the storage behind tensors; the tensors, and all views of them, stay what they are.

    For tensors that nothing refers to by address. Captured CUDA graphs do: there vLLM's own pool does the same, which
    unmaps the memory and keeps the address.

    Args:
        tensors: rollout parameters with storage of their own.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
        self._storages = [(storage, storage.nbytes()) for storage in storages.values()]

    @property
    def bytes(self) -> int:
        """Size when the memory is there."""
        return sum(size for _, size in self._storages)

    @property
    def bytes_held(self) -> int:
        """Size now."""
        return sum(storage.nbytes() for storage, _ in self._storages)

    def free(self) -> None:
        """Gives the memory back."""
        for storage, _ in self._storages:
            storage.resize_(0)

    def allocate(self) -> None:
        """Takes the memory again; what is in it is not defined."""
        for storage, size in self._storages:
            if storage.nbytes() != size:
                storage.resize_(size)


def own_weights(tensors: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the rollout's ``tensors`` that do not lie in the storage of a training parameter."""
    ours = {p.untyped_storage()._cdata for p in params.values()}
    return {name: t for name, t in tensors.items() if t.untyped_storage()._cdata not in ours}


def not_numbers(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that hold a NaN, sorted."""
    with torch.no_grad():
        return sorted(name for name, t in tensors.items() if bool(torch.isnan(t).any()))
