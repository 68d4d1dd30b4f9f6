"""Updates with every backend: the loss falls alike, with the optimizer that belongs to the backend."""

import copy

import pytest
import torch

from megaverl.config.schema import OptimizerConfig
from tests.gpu.support import QWEN2, device_with, make_batch, make_policy, make_small

pytestmark = pytest.mark.usefixtures("world")

ADAM = OptimizerConfig(lr=2e-4, weight_decay=0.0, clip_grad=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_small(path, QWEN2)
    return path


def negative_log_likelihood(batch, log_probs, entropy):
    value = -log_probs.sum() / 800.0
    return value, {"loss": value}


def losses(folder, kernels, updates=6):
    policy, batch = make_policy(folder, device_with(kernels), ADAM), make_batch()
    found = []
    for _ in range(updates):
        result = policy.update(batch, [[0, 1, 2, 3], [4, 5, 6, 7]], negative_log_likelihood, temperature=1.0)
        assert result.applied
        found.append(float(result.sums["loss"]))
    return policy, found


@pytest.mark.parametrize("kernels", ["flash", "te"])
def test_the_loss_falls_as_with_eager(folder, kernels):
    _, plain = losses(folder, "eager")
    policy, found = losses(folder, kernels)
    assert found[-1] < found[0] - 1.0
    assert found == pytest.approx(plain, rel=0.03)
    (inner,) = policy.optimizer._inner()
    if kernels == "te":
        assert type(inner).__name__ == "FusedAdam"
    else:
        assert isinstance(inner, torch.optim.AdamW)
        assert all(group["fused"] for group in inner.param_groups)


@pytest.mark.parametrize("kernels", ["eager", "flash", "te"])
def test_a_resumed_optimizer_goes_on_as_if_never_stopped(folder, kernels):
    policy, _ = losses(folder, kernels, updates=2)
    weights = {name: p.detach().clone() for name, p in policy.parameters_by_name().items()}
    state = copy.deepcopy(policy.state_dict())
    batch = make_batch()
    went_on = policy.update(batch, [[*range(8)]], negative_log_likelihood, temperature=1.0)
    after = {name: p.detach().clone() for name, p in policy.parameters_by_name().items()}

    other = make_policy(folder, device_with(kernels), ADAM)
    with torch.no_grad():
        for name, p in other.parameters_by_name().items():
            p.copy_(weights[name])
    other.weights_written()
    other.load_state_dict(state)
    resumed = other.update(batch, [[*range(8)]], negative_log_likelihood, temperature=1.0)
    assert resumed.grad_norm == pytest.approx(went_on.grad_norm, rel=1e-3)
    for name, p in other.parameters_by_name().items():
        assert (p - after[name]).abs().max() <= 2e-2 * after[name].abs().max(), name
