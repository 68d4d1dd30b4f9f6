"""Memory of processes, against the kernel's own account."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megaverl.observe.memory import peak_resident_bytes, resident_bytes


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_resident_bytes_are_those_of_the_kernel():
    def kernel(pid):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    assert resident_bytes() == pytest.approx(kernel(os.getpid()), rel=0.02)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert resident_bytes(child.pid) == pytest.approx(kernel(child.pid), rel=0.5)
        assert resident_bytes(child.pid) < resident_bytes()
    finally:
        child.communicate(b"\n")
    with pytest.raises(psutil.NoSuchProcess):
        resident_bytes(child.pid)


def test_the_peak_counts_bytes_and_stays():
    size = 64 * 2**20
    before = resident_bytes()
    block = bytearray(os.urandom(1) * size)
    grown = resident_bytes() - before
    assert grown > 0.9 * size
    del block
    assert peak_resident_bytes() >= before + grown - 2**22
