import dataclasses

import pytest
import torch

from megaverl.errors import UserError
from megaverl.models.gpt import build_gpt, transformer_config
from megaverl.models.shape import ModelShape
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


def test_unknown_rotary_scaling_is_refused_before_anything_is_built():
    shape = dataclasses.replace(SHAPE, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(UserError, match=r"rotary scaling 'yarn'.*not supported"):
        build_gpt(shape, Layout(), CPU, sequence_parallel=False, first=True, last=True)
