"""A frozen model leaves the GPU and comes back the same."""

import pytest
import torch
from torch import nn

from megaverl.models.host_memory import HostWeights


def test_weights_leave_the_gpu_and_come_back():
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).cuda().requires_grad_(False)
    x = torch.randn(4, 512, device="cuda")
    before, full = model(x), torch.cuda.memory_allocated()
    weights = HostWeights(model.parameters())
    for _ in range(3):
        assert all(p.device.type == "cpu" for p in model.parameters())
        assert full - torch.cuda.memory_allocated() >= weights.bytes == 2 * 4 * (512 * 512 + 512)
        weights.to_device()
        assert torch.equal(model(x), before)
        weights.to_host()


def test_a_trained_model_is_refused():
    with pytest.raises(ValueError, match="only a frozen model"):
        HostWeights(nn.Linear(2, 2).cuda().parameters())
