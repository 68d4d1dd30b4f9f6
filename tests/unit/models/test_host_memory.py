"""On a CPU the weights of a frozen model are in host memory already; tests/gpu moves them."""

import torch
from torch import nn

from megaverl.models.host_memory import HostWeights


def test_on_a_cpu_nothing_moves():
    model = nn.Linear(3, 2).requires_grad_(False)
    storage, value = model.weight.data_ptr(), model.weight.clone()
    weights = HostWeights(model.parameters())
    for move in (weights.to_device, weights.to_host, weights.to_device):
        move()
        assert model.weight.data_ptr() == storage
        assert torch.equal(model.weight, value)
    assert weights.bytes == 0
