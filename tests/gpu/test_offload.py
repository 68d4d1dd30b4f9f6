"""Training memory leaves the GPU between phases and comes back; recomputed activations never stay there."""

import pytest
import torch

from megaverl.config.schema import OptimizerConfig
from tests.gpu.support import QWEN2, device_with, make_batch, make_policy, make_small

pytestmark = pytest.mark.usefixtures("world")

ADAM = OptimizerConfig(lr=2e-4, clip_grad=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_small(path, QWEN2)
    return path


def loss(batch, log_probs, entropy):
    value = -log_probs.sum() / 800.0
    return value, {"loss": value}


def update(policy, seed=1):
    return policy.update(make_batch(seed=seed), [[0, 1, 2, 3], [4, 5, 6, 7]], loss, temperature=1.0)


def allocated() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("kernels", ["eager", "flash", "te"])
def test_optimizer_and_gradients_leave_and_come_back_as_they_were(folder, kernels):
    policy = make_policy(folder, device_with(kernels), ADAM)
    update(policy)
    addresses = {name: p.data_ptr() for name, p in policy.parameters_by_name().items()}
    count = sum(p.numel() for p in policy.parameters_by_name().values())
    copies = 4 if policy.model.config.bf16 else 0  # float32 weights beside the 16-bit ones

    def state():
        return [t.detach().cpu().clone() for t in policy.optimizer._own_tensors()]

    before, full = state(), allocated()
    freed = policy.release_for_rollout(optimizer=True, gradients=True)
    assert freed >= (4 + 4 + copies + 4) * count  # moments, copies, gradients
    assert full - allocated() >= 0.99 * freed
    assert policy.release_for_rollout(optimizer=True, gradients=True) == 0
    policy.log_probs(make_batch(), temperature=1.0, max_tokens=999, with_entropy=False)  # needs nothing of it
    assert full - allocated() >= 0.95 * freed
    policy.claim_for_training()
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    assert addresses == {name: p.data_ptr() for name, p in policy.parameters_by_name().items()}
    policy.release_for_rollout(optimizer=True, gradients=True)
    assert update(policy, 2).applied  # brings everything back itself
    assert allocated() <= full * 1.05


def test_weights_that_no_engine_serves_from_leave_too(folder):
    policy = make_policy(folder, device_with("eager"), ADAM)
    update(policy)
    before = policy.log_probs(make_batch(), temperature=1.0, max_tokens=999, with_entropy=False)["log_probs"]
    empty = allocated() - policy.release_for_rollout(optimizer=True, gradients=True, parameters=True)
    assert allocated() <= empty * 1.01 + 2**20
    after = policy.log_probs(make_batch(), temperature=1.0, max_tokens=999, with_entropy=False)["log_probs"]
    assert torch.equal(before, after)
    assert update(policy, 2).applied


@pytest.mark.parametrize("kernels", ["eager", "flash", "te"])
def test_recomputed_activations_lower_the_peak(folder, kernels):
    peaks, norms = {}, {}
    for recompute in ("none", "selective", "full"):
        policy = make_policy(folder, device_with(kernels), ADAM, recompute=recompute, logprob_chunk=64)
        batch = make_batch([(500, 500)] * 16)
        policy.update(batch, [[*range(16)]], loss, temperature=1.0, with_entropy=False)
        start = allocated()
        torch.cuda.reset_peak_memory_stats()
        norms[recompute] = policy.update(batch, [[*range(16)]], loss, temperature=1.0, with_entropy=False).grad_norm
        peaks[recompute] = torch.cuda.max_memory_allocated() - start
    print(kernels, {name: f"{peak / 2**20:.0f} MiB" for name, peak in peaks.items()})
    assert peaks["selective"] < peaks["none"]
    assert peaks["full"] < 0.7 * peaks["selective"]
    assert norms["selective"] == pytest.approx(norms["none"], rel=2e-2)
    assert norms["full"] == pytest.approx(norms["none"], rel=2e-2)
