"""What the GPU tests share: small models with the head sizes of real ones, their float64 reference, and policies."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megaverl.checkpoint.hf_import import load_hf
from megaverl.config.schema import OptimizerConfig
from megaverl.data.batch import SequenceBatch
from megaverl.errors import UserError
from megaverl.models.family import load_shape, weight_map
from megaverl.models.policy import PolicyModel
from megaverl.parallel.device import SHORT, Device, choose_device
from megaverl.parallel.layout import Layout

VOCAB = 1003  # padded to 1024, so that padding rows exist
LENGTHS = [(3, 9), (12, 1), (1, 30), (40, 200), (5, 517), (64, 100), (130, 3), (1, 1)]


@dataclass(frozen=True)
class Small:
    """A small model with the (attention, KV) head counts and the head size of a real one."""

    model_type: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    tied: bool

    def __str__(self) -> str:
        return f"{self.model_type}-{self.heads}x{self.head_dim}"


QWEN2 = Small("qwen2", 14, 2, 64, 896, tied=True)
QWEN3 = Small("qwen3", 16, 8, 128, 512, tied=False)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_small(folder: Path, small: Small) -> PreTrainedModel:
    """A random float64 model whose weights 16 bits hold exactly; saved in ``folder`` in these 16 bits."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        small.model_type,
        vocab_size=VOCAB,
        hidden_size=small.hidden,
        head_dim=small.head_dim,
        intermediate_size=1200,
        num_hidden_layers=3,
        num_attention_heads=small.heads,
        num_key_value_heads=small.kv_heads,
        max_position_embeddings=1024,
        tie_word_embeddings=small.tied,
        initializer_range=0.04,
        attn_implementation="eager",
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                param.normal_(0, 0.1)
            elif "norm" in name:
                param.normal_(1, 0.1)
    model.to(SHORT).save_pretrained(folder)
    # Read again: the conversion above took digits from the rotary frequencies too.
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").double()


def make_batch(lengths: list[tuple[int, int]] = LENGTHS, vocab: int = VOCAB, seed: int = 1) -> SequenceBatch:
    """Random sequences of the given (prompt, response) lengths with a random per-token weight as column."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(0, vocab, (n,), generator=g).tolist()  # noqa: E731
    return SequenceBatch.from_lists(
        [draw(p) for p, _ in lengths],
        [draw(r) for _, r in lengths],
        response_columns={"weight": [torch.randn(r, generator=g).tolist() for _, r in lengths]},
    )


def device_with(kernels: str) -> Device:
    """The device with this backend; skips the test with the reason where it cannot run."""
    try:
        return choose_device(kernels=kernels)
    except UserError as error:
        pytest.skip(str(error))


def make_policy(folder: Path | str, device: Device, optimizer: OptimizerConfig | None = None, **more) -> PolicyModel:
    """The policy with the weights of the checkpoint in ``folder``; ready for training when an optimizer is given."""
    shape = load_shape(folder)
    policy = PolicyModel(shape, Layout(), device, trainable=optimizer is not None, **more)
    load_hf(folder, weight_map(shape), policy.parameters_by_name(), tp=1, tp_rank=0)
    if optimizer:
        policy.prepare_training(optimizer, total_updates=10)
    return policy


def error(found: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of the reference's deviation from its mean."""
    found, reference = found.detach().double().cpu(), reference.detach().double().cpu()
    spread = reference - reference.mean() if reference.dim() == 1 and reference.numel() > 1 else reference
    return float((found - reference).norm() / spread.norm())
