"""Memory of one process by phase (training, rollout)."""

from __future__ import annotations

from typing import Literal

from megaverl.observe.memory import resident_bytes


class PhaseMemory:
    """The most memory of each phase.

    On a GPU that is torch's peak since the phase before ended, less what a sleeping engine has given up and torch still
    counts. On a CPU it is the process's resident memory when the phase ends, before anything of it is released.

    Args:
        kind: where the model is.
    """

    def __init__(self, kind: Literal["cpu", "cuda"]) -> None:
        self.kind = kind
        self.most_allocated = 0

    def end(self, released: int = 0) -> int:
        """Bytes of the phase that ends now; the next one begins.

        Args:
            released: bytes that torch counts as allocated and that are not there.
        """
        if self.kind == "cpu":
            return resident_bytes()
        import torch

        peak = torch.cuda.max_memory_allocated()
        self.most_allocated = max(self.most_allocated, peak)
        torch.cuda.reset_peak_memory_stats()
        return peak - released
