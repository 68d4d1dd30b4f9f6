"""Memory of processes, against the kernel's own account."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megaverl.observe.memory import peak_resident_bytes, resident_bytes, return_free_memory


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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to")
def test_freed_memory_between_live_blocks_goes_back_to_the_system():
    blocks = [bytes(1000) for _ in range(100_000)]
    kept = blocks[::50]
    before = resident_bytes()
    del blocks
    return_free_memory()
    assert before - resident_bytes() > 80 * 2**20
    assert len(kept) == 2000
