"""On a GPU that plays a Pascal card, the kernels that really run are ones that a Pascal card has (case 42)."""

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def trace():
    done = subprocess.run(
        [sys.executable, "-m", "tests.eager_trace"],
        env=os.environ | {"MEGAVERL_CAPABILITY": "6.1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


FORBIDDEN = ("triton", "flash", "bf16", "bfloat16", "half", "f16", "cudnn", "tf32", "s1688", "transformer_engine")


def test_case_42_only_plain_kernels_in_fp32(trace):
    assert trace["device"] == ["cuda", "torch.float32", "eager"]
    assert len(trace["kernels"]) > 20
    assert not [k for k in trace["kernels"] if any(word in k.lower() for word in FORBIDDEN)]
    assert not [o for o in trace["operators"] if any(word in o.lower() for word in ("triton", "flash", "cudnn"))]


def test_case_42_no_16_bit_numbers_and_no_fast_packages(trace):
    assert not [f for f in trace["formats"] if "float16" in f or "float8" in f]
    names = {m.split(".")[0] for m in trace["modules"]}
    assert not names & {"liger_kernel", "flash_attn", "transformer_engine_torch"}
    assert "transformer_engine.pytorch" not in trace["modules"]
