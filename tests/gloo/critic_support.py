"""What the tests of the critic share: tiny Hugging Face classifications and the critic with the same weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification, Qwen2ForTokenClassification

from megaverl.checkpoint.critic import load_critic
from megaverl.config.schema import OptimizerConfig
from megaverl.data.batch import SequenceBatch
from megaverl.models.critic import CriticModel
from megaverl.models.critic_map import critic_source
from megaverl.parallel.device import choose_device
from megaverl.parallel.layout import Layout
from tests.gloo.policy_support import RAGGED, VOCAB, make_batch


def make_critic_hf(folder: Path, *, tied: bool, layers: int = 2, kind=Qwen2ForTokenClassification, labels: int = 1):
    """A random classification with a head away from zero, and biases and norms away from their trivial values."""
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.08,
        num_labels=labels,
        classifier_dropout=0.0,
    )
    model = kind(config).float()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                param.normal_(0, 0.1)
            elif "norm" in name:
                param.normal_(1, 0.1)
    model.save_pretrained(folder)
    return model


def make_reward_hf(folder: Path, **options) -> Qwen2ForSequenceClassification:
    """The same as a sequence classification: a reward model."""
    return make_critic_hf(folder, kind=Qwen2ForSequenceClassification, **options)


def make_critic(
    folder: str, layout: Layout, *, optimizer: OptimizerConfig | None = None, sequence_parallel: bool = False
) -> CriticModel:
    """The critic that starts from the checkpoint in ``folder``; ready for training when an optimizer is given."""
    critic = CriticModel(
        critic_source(folder).shape,
        layout,
        choose_device(device="cpu"),
        trainable=optimizer is not None,
        sequence_parallel=sequence_parallel,
    )
    read_critic(critic, folder)
    if optimizer:
        critic.prepare_training(optimizer, 10)
    return critic


def read_critic(critic: CriticModel, folder: str, into: dict[str, torch.Tensor] | None = None) -> None:
    """This rank's share of a checkpoint into the critic's parameters, or into other tensors of their shapes."""
    params = into if into is not None else critic.parameters_by_name()
    load_critic(
        folder,
        params,
        tp=critic.layout.tp,
        tp_rank=critic.grid.at.tp,
        whole_model=critic.layout.pp == 1,
    )


def hf_values(model: Qwen2ForTokenClassification, batch: SequenceBatch) -> torch.Tensor:
    """[tokens], the value before each response token by transformers, sequence by sequence; 0 elsewhere."""
    found = []
    for i in range(len(batch)):
        one = batch.select([i])
        logits = model(input_ids=one.tokens.unsqueeze(0)).logits[0, :, 0]
        found.append(torch.cat([torch.zeros(1), logits[:-1]]) * one.response_mask)
    return torch.cat(found)


def value_batch(seed: int = 1) -> SequenceBatch:
    """`make_batch` with random old values and returns."""
    batch = make_batch(RAGGED, seed)
    g = torch.Generator().manual_seed(seed + 100)
    for name in ("values", "returns"):
        batch.columns[name] = torch.randn(batch.tokens.numel(), generator=g) * batch.response_mask
    return batch
