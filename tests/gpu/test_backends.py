"""The kernel backends against transformers in float64, and against eager in the same 16 bits."""

import pytest
import torch

from megaverl.config.schema import OptimizerConfig
from megaverl.models.family import weight_map
from tests.gloo.policy_support import hf_scores, weighted_loss
from tests.gpu.support import QWEN2, QWEN3, device_with, error, make_batch, make_policy, make_small

pytestmark = pytest.mark.usefixtures("world")

FROZEN = OptimizerConfig(lr=0.0, weight_decay=0.0, clip_grad=0.0)  # gradients stay in the buffer
TOKENS = 300.0
MODELS = [QWEN2, QWEN3]
NOISE = 1.5
"""A backend may be this much further from float64 than eager with the same number format: both round, elsewhere."""


@pytest.fixture(scope="module", params=MODELS, ids=str)
def model(request, tmp_path_factory):
    """Folder, scores and gradients of a model by transformers in float64."""
    folder = tmp_path_factory.mktemp("model")
    reference, batch = make_small(folder, request.param), make_batch()
    log_probs, entropy = hf_scores(reference, batch, 0.7)
    weighted_loss(0.3, TOKENS)(batch, log_probs, entropy)[0].backward()
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    return request.param, folder, batch, log_probs.detach(), entropy.detach(), gradients


def scores_of(folder, batch, kernels):
    policy = make_policy(folder, device_with(kernels))
    found = policy.log_probs(batch, temperature=0.7, max_tokens=700, with_entropy=True)
    return found["log_probs"], found["entropy"]


def gradients_of(folder, batch, kernels):
    policy = make_policy(folder, device_with(kernels), FROZEN)
    parts = [[0, 3, 5], [1, 2, 7], [4, 6]]
    result = policy.update(batch, parts, weighted_loss(0.3, TOKENS), temperature=0.7, entropy_grad=True)
    assert result.applied
    return {name: p.main_grad.float().cpu() for name, p in policy.parameters_by_name().items()}


@pytest.mark.parametrize("kernels", ["flash", "te"])
def test_scores_are_as_near_to_float64_as_eager(model, kernels):
    _, folder, batch, *reference, _ = model
    at = batch.response_mask & (batch.position_ids > 0)
    eager, found = scores_of(folder, batch, "eager"), scores_of(folder, batch, kernels)
    for name, want, plain, fast in zip(("log_probs", "entropy"), reference, eager, found):
        assert torch.all(fast[~at] == 0)
        ours, eagers = error(fast[at], want[at]), error(plain[at], want[at])
        print(f"\n{kernels} {model[0]} {name}: {ours:.1e}, eager {eagers:.1e}")
        assert eagers < 0.15
        assert ours < NOISE * eagers


@pytest.mark.parametrize("kernels", ["flash", "te"])
def test_gradients_are_as_near_to_float64_as_eager(model, kernels):
    small, folder, batch, _, _, reference = model
    eager, found = gradients_of(folder, batch, "eager"), gradients_of(folder, batch, kernels)
    rows = weight_map(make_policy(folder, device_with("eager")).shape).by_megatron_name()
    assert found.keys() == eager.keys()
    worst = {}
    for name, ours in found.items():
        want = torch.cat(
            [reference[part].flatten(1) if reference[part].dim() > 1 else reference[part] for part in rows[name].hf]
        )
        got, plain = ours[: len(want)], eager[name][: len(want)]
        assert torch.all(ours[len(want) :] == 0), f"{name}: padding has a gradient"
        worst[name] = (error(got.flatten(), want.flatten()), error(plain.flatten(), want.flatten()))
    name, (ours, eagers) = max(worst.items(), key=lambda item: item[1][0])
    print(f"\n{kernels} {small} worst gradient {name}: {ours:.1e}, eager {eagers:.1e}")
    for name, (ours, eagers) in worst.items():
        assert eagers < 0.1, name
        assert ours < NOISE * eagers + 2e-3, name


@pytest.mark.parametrize("kernels", ["eager", "flash", "te"])
def test_the_cut_into_micro_batches_does_not_change_the_gradient(model, kernels):
    _, folder, batch, *_ = model
    policy = make_policy(folder, device_with(kernels), FROZEN)
    norms = []
    for parts in ([[*range(8)]], [[0, 3, 5], [1, 2, 7], [4, 6]]):
        policy.update(batch, parts, weighted_loss(0.3, TOKENS), temperature=1.0)
        norms.append({name: p.main_grad.clone() for name, p in policy.parameters_by_name().items()})
    for name, whole in norms[0].items():
        assert error(norms[1][name].flatten(), whole.flatten()) < 2e-2, name


@pytest.mark.parametrize("kernels", ["flash", "te"])
def test_weights_written_in_place_are_used_at_once(model, kernels):
    """A rollout engine aliases the parameters, so nothing may keep copies of them; the storage is in vLLM's order."""
    _, folder, batch, *_ = model
    policies = {k: make_policy(folder, device_with(k)) for k in ("eager", kernels)}
    table = weight_map(policies["eager"].shape)
    for kind, policy in policies.items():
        named = policy.parameters_by_name()
        assert named.keys() == {row.megatron for row in table.expand()}, kind
        for row in table.expand():
            parameter = named[row.megatron]
            assert parameter.is_contiguous()
            assert parameter.shape == table.local_shape(row, 1)
            with torch.no_grad():  # not the same for every row, so that another order would show
                factor = torch.linspace(0.8, 1.2, len(parameter), device="cuda")
                parameter.mul_(factor.view(-1, *[1] * (parameter.dim() - 1)))
    at = batch.response_mask & (batch.position_ids > 0)
    before, _ = scores_of(folder, batch, kernels)
    after = [p.log_probs(batch, temperature=0.7, max_tokens=2000, with_entropy=False) for p in policies.values()]
    plain, fast = (scores["log_probs"][at] for scores in after)
    assert error(fast, plain) < 0.1
    assert error(before[at], plain) > 0.5


@pytest.mark.parametrize("kernels", ["flash", "te"])
def test_a_pass_never_makes_the_host_wait(model, kernels):
    _, folder, batch, *_ = model
    policy = make_policy(folder, device_with(kernels), FROZEN)
    loss = weighted_loss(0.3, TOKENS)
    policy.update(batch, [[*range(8)]], loss, temperature=1.0)
    pack = policy._pack(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        hidden = policy.model(pack.tokens, pack.layout)
        log_probs, entropy = policy._score(hidden, pack, 1.0, True, False)
        (-(pack.batch.columns["weight"] * log_probs).sum() + entropy.sum()).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
