"""The critic with every backend: values against float64, a 16-bit body under a float32 head, updates, resuming."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForTokenClassification

from megaverl.algorithms.losses import Denominators
from megaverl.algorithms.value_loss import critic_loss_fn
from megaverl.checkpoint.critic import load_critic
from megaverl.config.schema import CriticConfig, OptimizerConfig
from megaverl.models.critic import CriticModel
from megaverl.models.critic_map import critic_source
from megaverl.parallel.device import SHORT
from megaverl.parallel.layout import Layout
from tests.gpu.support import LENGTHS, QWEN2, device_with, error, make_batch, make_small

pytestmark = pytest.mark.usefixtures("world")

ADAM = OptimizerConfig(lr=1e-3, weight_decay=0.0, clip_grad=1.0)
KERNELS = ["eager", "flash", "te"]
LIMIT = 4096


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(folder, the float64 model) of a token classification whose body and head are away from zero."""
    start, path = tmp_path_factory.mktemp("language"), tmp_path_factory.mktemp("critic")
    language = make_small(start, QWEN2)
    config = AutoConfig.from_pretrained(start, num_labels=1, classifier_dropout=0.0, attn_implementation="eager")
    critic = AutoModelForTokenClassification.from_config(config, dtype=torch.float32)
    critic.model.load_state_dict(language.model.state_dict())
    torch.nn.init.normal_(critic.score.weight, std=0.05)
    critic.to(SHORT).save_pretrained(path)
    rounded = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return path, rounded.double()  # not `critic`, whose rotary frequencies have lost their digits too


def make_critic(folder, kernels, optimizer=None) -> CriticModel:
    shape = critic_source(folder).shape
    critic = CriticModel(shape, Layout(), device_with(kernels), trainable=optimizer is not None)
    load_critic(folder, critic.parameters_by_name(), tp=1, tp_rank=0)
    if optimizer:
        critic.prepare_training(optimizer, total_updates=10)
    return critic


@pytest.mark.parametrize("kernels", KERNELS)
def test_values_equal_transformers(model, kernels):
    folder, reference = model
    critic, batch = make_critic(folder, kernels), make_batch()
    assert critic.parameters_by_name()["value_head.weight"].dtype == torch.float32
    found, expected = critic.values(batch, max_tokens=LIMIT), []
    with torch.no_grad():
        for i in range(len(batch)):
            one = batch.select([i])
            logits = reference(input_ids=one.tokens[None]).logits[0, :, 0]
            expected.append(torch.cat([logits.new_zeros(1), logits[:-1]]) * one.response_mask)
    mask = batch.response_mask
    assert error(found[mask], torch.cat(expected)[mask]) < (1e-5 if critic.device.dtype == torch.float32 else 3e-2)


def update(critic, seed):
    batch = make_batch(seed=seed)
    batch.columns["values"] = torch.zeros(batch.tokens.numel())
    batch.columns["returns"] = (batch.tokens % 2).float() * batch.response_mask
    counts = Denominators.of([r for _, r in LENGTHS], 1024)
    return critic.update(
        batch, [[0, 1, 2, 3], [4, 5, 6, 7]], critic_loss_fn(CriticConfig(cliprange_value=None), counts)
    )


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_loss_falls_and_the_head_moves(model, kernels):
    critic = make_critic(model[0], kernels, ADAM)
    before = {n: p.detach().clone() for n, p in critic.parameters_by_name().items()}
    results = [update(critic, 1) for _ in range(6)]
    losses = [float(result.sums["critic/vf_loss"]) for result in results]
    assert all(result.applied for result in results)
    assert losses[-1] < 0.7 * losses[0]
    for name, parameter in critic.parameters_by_name().items():
        assert not torch.equal(parameter, before[name]), name


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_resumed_critic_goes_on_as_if_never_stopped(model, kernels):
    critic = make_critic(model[0], kernels, ADAM)
    update(critic, 1)
    weights = {name: p.detach().clone() for name, p in critic.parameters_by_name().items()}
    state = copy.deepcopy(critic.state_dict())
    went_on = update(critic, 2)
    other = make_critic(model[0], kernels, ADAM)
    with torch.no_grad():
        for name, parameter in other.parameters_by_name().items():
            parameter.copy_(weights[name])
    other.weights_written()
    other.load_state_dict(state)
    resumed = update(other, 2)
    assert resumed.grad_norm == pytest.approx(went_on.grad_norm, rel=1e-3)
    head = "value_head.weight"
    assert torch.allclose(other.parameters_by_name()[head], critic.parameters_by_name()[head], rtol=1e-3, atol=1e-6)
