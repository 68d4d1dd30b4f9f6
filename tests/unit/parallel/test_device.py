import pytest
import torch

from megaverl.errors import UserError
from megaverl.parallel.device import Hardware, choose_device

CPU = Hardware(None, False)
PASCAL = Hardware((6, 1), False)
HOPPER = Hardware((9, 0), True)
HOPPER_WITHOUT_TE = Hardware((9, 0), False)


@pytest.mark.parametrize(
    ("hardware", "kind", "dtype"),
    [(CPU, "cpu", torch.float32), (PASCAL, "cuda", torch.float32), (HOPPER, "cuda", torch.bfloat16)],
)
def test_auto_takes_what_the_hardware_has_and_says_why(hardware, kind, dtype):
    found = choose_device(hardware=hardware)
    assert (found.kind, found.dtype, found.backend) == (kind, dtype, "eager")
    assert found.reason


def test_wishes_are_met_where_they_can_be():
    found = choose_device("fp32", "eager", "cpu", hardware=HOPPER)
    assert (found.kind, found.dtype, found.backend) == ("cpu", torch.float32, "eager")
    assert found.collective_backend == "gloo"
    assert found.torch_device == torch.device("cpu")


@pytest.mark.parametrize(
    ("wish", "hardware", "reasons"),
    [
        ({"device": "cuda"}, CPU, ["no GPU is visible"]),
        ({"precision": "bf16"}, CPU, ["a CPU has no bf16"]),
        ({"precision": "bf16"}, PASCAL, ["compute capability 6.1 has no bf16"]),
        ({"kernels": "te"}, PASCAL, ["needs compute capability 8.0"]),
        ({"kernels": "te"}, HOPPER_WITHOUT_TE, ["Transformer Engine is not installed"]),
        ({"kernels": "flash"}, HOPPER, ["not implemented yet"]),
        ({"kernels": "flash", "precision": "bf16", "device": "cuda"}, CPU, ["no GPU", "needs compute", "no bf16"]),
    ],
)
def test_impossible_wishes_are_refused_together(wish, hardware, reasons):
    with pytest.raises(UserError) as caught:
        choose_device(**wish, hardware=hardware)
    text = str(caught.value)
    assert len(caught.value.problems) == len(reasons)
    assert all(reason in text for reason in reasons)
    assert all(p.where and p.fix for p in caught.value.problems)
