"""The eager backend launches nothing that an old GPU or a CPU without a compiler could not run (case 42)."""

import json
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def trace():
    done = subprocess.run(
        [sys.executable, "-m", "tests.eager_trace"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_case_42_no_flash_attention_triton_or_compiled_code(trace):
    assert trace["device"] == ["cpu", "torch.float32", "eager"]
    names = [n.lower() for n in trace["operators"]]
    assert any("scaled_dot_product" in name for name in names)
    # torch calls its own loop for the CPU "flash attention for CPU": it needs no special hardware.
    names = [n for n in names if "for_cpu" not in n and "forcpu" not in n]
    assert not [n for n in names if any(word in n for word in ("triton", "flash", "inductor", "compile", "cudnn"))]
    # Not triton: megatron-core from 0.17 on imports it, whatever it then launches.
    loaded = [m for m in trace["modules"] if m.split(".")[0] in ("liger_kernel", "flash_attn", "apex")]
    assert not loaded
    assert not [m for m in trace["modules"] if m.startswith("torch._inductor.codegen")]


def test_case_42_no_16_bit_numbers_anywhere(trace):
    assert "torch.float32" in trace["formats"]
    assert not [f for f in trace["formats"] if "float16" in f or "float8" in f]


def test_case_44_rms_norm_trains_without_transformer_engine_and_apex(trace):
    """Megatron's own spec asserts without them; `persist_layer_norm`, on by default, asserts in torch's norm."""
    loaded = {m.split(".")[0] for m in trace["modules"]}
    assert not loaded & {"transformer_engine", "transformer_engine_torch", "apex", "amp_C"}
    assert "aten::rsqrt" in trace["operators"]  # the norm of the backend ran, written out
    assert "RsqrtBackward0" in trace["operators"]
