"""The frozen reference leaves the GPU between its uses and comes back the same."""

import pytest
import torch

from tests.gpu.support import QWEN2, device_with, make_batch, make_policy, make_small

pytestmark = pytest.mark.usefixtures("world")


@pytest.mark.parametrize("kernels", ["eager", "flash", "te"])
def test_the_reference_rests_in_host_memory(tmp_path, kernels):
    make_small(tmp_path, QWEN2)
    policy, batch = make_policy(tmp_path, device_with(kernels)), make_batch()
    scores = lambda: policy.log_probs(batch, temperature=1.0, max_tokens=4096, with_entropy=False)["log_probs"]  # noqa: E731
    size = sum(p.numel() * p.element_size() for p in policy.parameters_by_name().values())
    before = scores()
    for _ in range(3):
        resting = policy.release_for_rollout(optimizer=False, gradients=False, parameters=True)
        assert resting >= size
        assert all(p.untyped_storage().nbytes() == 0 for p in policy.model.parameters())
        assert torch.equal(scores(), before)
    with torch.no_grad():  # new weights count, whatever the host remembers
        next(iter(policy.parameters_by_name().values())).mul_(2)
    policy.weights_written()
    changed = scores()
    assert not torch.equal(changed, before)
    policy.release_for_rollout(optimizer=False, gradients=False, parameters=True)
    assert torch.equal(scores(), changed)
