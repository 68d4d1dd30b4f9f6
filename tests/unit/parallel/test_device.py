import pytest
import torch

from megaverl.errors import UserError
from megaverl.parallel import kernels
from megaverl.parallel.device import Hardware, choose_device

CPU = Hardware(None, gpu=False)
PASCAL, VOLTA, TURING = Hardware((6, 1)), Hardware((7, 0)), Hardware((7, 5))
AMPERE, HOPPER = Hardware((8, 0)), Hardware((9, 0))
NO_TE = {"te": "Transformer Engine is not installed"}
HOPPER_WITHOUT_TE = Hardware((9, 0), missing=NO_TE)
BARE_HOPPER = Hardware((9, 0), missing=NO_TE | {"flash": "Liger is not installed"})
WRONG_WHEEL = Hardware((6, 1), wheel="this torch has no code for compute capability 6.1 (it has sm_75)")


@pytest.mark.parametrize(
    ("hardware", "kind", "dtype", "backend"),
    [
        (CPU, "cpu", torch.float32, "eager"),
        (PASCAL, "cuda", torch.float32, "eager"),
        (VOLTA, "cuda", torch.float32, "eager"),
        (TURING, "cuda", torch.float32, "eager"),
        (AMPERE, "cuda", torch.bfloat16, "te"),
        (HOPPER, "cuda", torch.bfloat16, "te"),
        (HOPPER_WITHOUT_TE, "cuda", torch.bfloat16, "flash"),
        (BARE_HOPPER, "cuda", torch.bfloat16, "eager"),
    ],
)
def test_auto_takes_what_the_hardware_has_and_says_why(hardware, kind, dtype, backend):
    found = choose_device(hardware=hardware)
    assert (found.kind, found.dtype, found.backend) == (kind, dtype, backend)
    assert found.reason
    assert bool(found.faster) == (backend != "te")


def test_what_a_faster_backend_needs_is_named():
    assert "8.0 or newer" in choose_device(hardware=PASCAL).faster
    assert "megaverl[te]" in choose_device(hardware=HOPPER_WITHOUT_TE).faster
    assert "Liger is not installed" in choose_device(hardware=BARE_HOPPER).faster
    assert choose_device("fp32", hardware=HOPPER).faster == "actor.precision=bf16"
    assert choose_device(kernels="eager", hardware=HOPPER_WITHOUT_TE).faster == "actor.kernels=flash or auto"
    assert choose_device(kernels="flash", hardware=HOPPER).faster == "actor.kernels=te or auto"


def test_wishes_are_met_where_they_can_be():
    found = choose_device("fp32", "eager", "cpu", hardware=HOPPER)
    assert (found.kind, found.dtype, found.backend) == ("cpu", torch.float32, "eager")
    assert found.collective_backend == "gloo"
    assert found.torch_device == torch.device("cpu")
    assert choose_device(kernels="flash", hardware=HOPPER).backend == "flash"
    assert choose_device("bf16", "eager", hardware=AMPERE).dtype == torch.bfloat16


def test_fp32_on_a_fast_gpu_is_eager_because_the_fast_attention_has_no_fp32():
    found = choose_device("fp32", hardware=HOPPER)
    assert (found.backend, found.dtype) == ("eager", torch.float32)
    assert "bf16, not fp32" in found.reason


@pytest.mark.parametrize(
    ("wish", "hardware", "reasons"),
    [
        ({"device": "cuda"}, CPU, ["no GPU is visible"]),
        ({"precision": "bf16"}, CPU, ["a CPU has no bf16"]),
        ({"precision": "bf16"}, PASCAL, ["compute capability 6.1 has no bf16"]),
        ({"kernels": "te"}, PASCAL, ["needs compute capability 8.0"]),
        ({"kernels": "te"}, HOPPER_WITHOUT_TE, ["Transformer Engine is not installed"]),
        ({"kernels": "flash"}, BARE_HOPPER, ["Liger is not installed"]),
        ({"kernels": "flash", "precision": "fp32"}, HOPPER, ["bf16, not fp32"]),
        ({"kernels": "flash", "precision": "bf16", "device": "cuda"}, CPU, ["no GPU", "needs compute", "no bf16"]),
        ({}, WRONG_WHEEL, ["no code for compute capability 6.1"]),
    ],
)
def test_impossible_wishes_are_refused_together(wish, hardware, reasons):
    with pytest.raises(UserError) as caught:
        choose_device(**wish, hardware=hardware)
    text = str(caught.value)
    assert len(caught.value.problems) == len(reasons)
    assert all(reason in text for reason in reasons)
    assert all(p.where and p.fix for p in caught.value.problems)


@pytest.mark.parametrize("capability", ["6.1", "7.0"])
def test_case_42_a_gpu_without_fast_kernels_gets_fp32_eager_and_a_switch_that_explains(capability):
    """Neither flash attention nor 16 bits are reached by default on such a card; asking for them says what it lacks."""
    old = Hardware(tuple(map(int, capability.split("."))))
    found = choose_device(hardware=old)
    assert (found.backend, found.dtype) == ("eager", torch.float32)
    for wish in ({"kernels": "flash"}, {"kernels": "te"}, {"precision": "bf16"}):
        with pytest.raises(UserError, match=capability):
            choose_device(**wish, hardware=old)


def test_a_wrong_wheel_does_not_matter_on_the_cpu():
    assert choose_device(device="cpu", hardware=WRONG_WHEEL).kind == "cpu"


def test_the_variable_makes_this_machine_an_older_one(monkeypatch):
    monkeypatch.setenv(kernels.PRETEND, "6.1")
    found = Hardware.here()
    assert found.capability == (6, 1)
    assert not found.fast
    assert choose_device().backend == "eager"
    assert found.gpu == torch.cuda.is_available()


def test_the_variable_makes_no_gpu_where_there_is_none(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setenv(kernels.PRETEND, "9.0")
    assert choose_device().kind == "cpu"
    with pytest.raises(UserError, match="no GPU is visible"):
        choose_device(device="cuda")


@pytest.mark.parametrize("value", ["pascal", "6", "6.1.0", "-1.0"])
def test_a_wrong_value_of_the_variable_is_refused(monkeypatch, value):
    monkeypatch.setenv(kernels.PRETEND, value)
    with pytest.raises(UserError, match=kernels.PRETEND):
        Hardware.here()
