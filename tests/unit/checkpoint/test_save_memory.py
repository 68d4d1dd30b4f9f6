"""What writing a rank's state costs in memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MIB = 1 << 20
STATE = 192 * MIB
BUCKET = 32 * MIB
"""Torch writes record by record; a record is one tensor, and nothing of its size is allocated besides."""

SCRIPT = """
import json, sys, time
from pathlib import Path

import torch

from megaverl.checkpoint.train_state import begin_state, save_state

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

folder, size = sys.argv[1], int(sys.argv[2])
save_state(begin_state(folder, 1) or folder, 1, 0, 1, {"warm": torch.ones(1000)}, None)  # what a first save imports
state = {f"layer{i}": torch.ones(size // 4 // 12) for i in range(12)}
begin_state(folder, 2)
Path("/proc/self/clear_refs").write_text("5")
before, began = peak(), time.perf_counter()
(file,) = save_state(folder, 2, 0, 1, state, None)
print(json.dumps({"growth": peak() - before, "written": file.size, "seconds": time.perf_counter() - began}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_case_31_a_save_needs_one_bucket_of_memory_and_not_a_second_state(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(STATE)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(
        f"{found['seconds'] / (found['written'] / 1e9):.1f} s per GB, {found['growth'] / MIB:.1f} MiB more at the peak"
    )
    assert found["written"] >= STATE
    assert found["growth"] < BUCKET
