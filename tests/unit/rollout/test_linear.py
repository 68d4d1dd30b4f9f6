"""The rollout's matmul on a CPU, which adds filler rows, against torch's."""

from __future__ import annotations

import pytest
import torch

from megaverl.rollout.compat_vllm import linear_in_place


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 100, 128, 129, 700])
@pytest.mark.parametrize("bias", [True, False])
def test_any_number_of_rows_gives_torchs_product(rows, bias):
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 192, generator=generator), torch.randn(384, 192, generator=generator)
    add = torch.randn(384, generator=generator) if bias else None
    found = linear_in_place(x, weight, add)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if add is None else add.double())
    assert found.shape == (rows, 384)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)
