"""Memory of processes."""

from __future__ import annotations

import ctypes
import functools
import resource
import sys
from collections.abc import Callable

import psutil


def resident_bytes(pid: int | None = None) -> int:
    """Resident bytes of a process now; this one when ``pid`` is None.

    Raises:
        psutil.NoSuchProcess: there is no such process.
    """
    return psutil.Process(pid).memory_info().rss


def peak_resident_bytes() -> int:
    """The most bytes that this process was resident with so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB


def return_free_memory() -> None:
    """Gives freed heap memory back to the system where the C library can (glibc).

    Tensors of ever changing sizes leave holes in the heap, which glibc keeps: a CPU worker grows by a fifth within some
    hundred steps. Costs about 20 ms for each 100 MiB that are then taken again.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
