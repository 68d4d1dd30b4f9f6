import dataclasses
import math

import pytest
import torch

from megaverl.models.gpt import transformer_config
from megaverl.models.shape import ModelShape, RopeScaling
from megaverl.parallel.device import choose_device
from megaverl.parallel.layout import Layout

SHAPE = ModelShape("qwen2", 2, 128, 4, 2, 32, 192, 211, 128, 1e-6, 1e6, True, True)
CPU = choose_device(device="cpu")


def test_the_configuration_leaves_gradients_undivided():
    config = transformer_config(SHAPE, Layout(tp=2), CPU, sequence_parallel=True)
    assert config.calculate_per_token_loss
    assert config.sequence_parallel
    assert config.params_dtype == torch.float32
    assert not config.bf16


def test_a_scaling_that_stretches_queries_and_keys_is_in_the_softmax_scale():
    stretched = dataclasses.replace(SHAPE, rope_scaling=RopeScaling("yarn", 4.0, original_max_positions=32))
    plain = transformer_config(SHAPE, Layout(), CPU).softmax_scale
    assert plain is None  # Megatron's own head_dim^-0.5
    found = transformer_config(stretched, Layout(), CPU).softmax_scale
    assert found == pytest.approx((0.1 * math.log(4) + 1) ** 2 / math.sqrt(32), rel=1e-12)
