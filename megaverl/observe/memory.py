"""Memory of processes."""

from __future__ import annotations

import resource
import sys

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
