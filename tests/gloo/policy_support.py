"""What the tests of the policy share: tiny Hugging Face references and the policy with the same weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from megaverl.checkpoint.hf_import import load_hf
from megaverl.config.schema import OptimizerConfig
from megaverl.data.batch import SequenceBatch
from megaverl.models.family import load_shape, weight_map
from megaverl.models.policy import PolicyModel
from megaverl.parallel.device import Device, choose_device
from megaverl.parallel.layout import Layout
from megaverl.parallel.setup import init_distributed, init_model_parallel

VOCAB = 211  # padded to 256, so that padding rows exist


def make_hf(folder: Path, *, tied: bool, layers: int = 2, seed: int = 0) -> Qwen2ForCausalLM:
    """A random Qwen2 with 4 heads of 32 and 2 KV heads, its biases and norms not at their trivial values; saved."""
    torch.manual_seed(seed)
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
    )
    model = Qwen2ForCausalLM(config).float()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                param.normal_(0, 0.1)
            elif "norm" in name:
                param.normal_(1, 0.1)
    model.save_pretrained(folder)
    return model


def make_batch(lengths: list[tuple[int, int]], seed: int = 1) -> SequenceBatch:
    """Random sequences of the given (prompt, response) lengths with a random per-token weight as column."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(0, VOCAB, (n,), generator=g).tolist()  # noqa: E731
    return SequenceBatch.from_lists(
        [draw(p) for p, _ in lengths],
        [draw(r) for _, r in lengths],
        response_columns={"weight": [torch.randn(r, generator=g).tolist() for _, r in lengths]},
    )


RAGGED = [(3, 9), (12, 1), (1, 30), (7, 7), (2, 17), (5, 40), (9, 9), (4, 12)]


def join(rank: int, world: int, layout: Layout) -> None:
    """Sets up Megatron in a rank whose world the launcher made."""
    init_distributed(rank, world, "127.0.0.1", 1, choose_device(device="cpu"))
    init_model_parallel(layout, seed=0)


def make_policy(
    folder: str,
    layout: Layout,
    *,
    optimizer: OptimizerConfig | None = None,
    sequence_parallel: bool = False,
    recompute: str = "none",
    total_updates: int = 10,
    device: Device | None = None,
) -> PolicyModel:
    """The policy with the weights of the checkpoint in ``folder``; ready for training when an optimizer is given."""
    shape = load_shape(folder)
    policy = PolicyModel(
        shape,
        layout,
        device or choose_device(device="cpu"),
        trainable=optimizer is not None,
        sequence_parallel=sequence_parallel,
        logprob_chunk=16,
        recompute=recompute,
    )
    read_weights(policy, folder)
    if optimizer:
        policy.prepare_training(optimizer, total_updates)
    return policy


def read_weights(policy: PolicyModel, folder: str, into: dict[str, torch.Tensor] | None = None) -> None:
    """This rank's share of a checkpoint into the policy's parameters, or into other tensors of their shapes."""
    load_hf(
        folder,
        weight_map(policy.shape),
        into if into is not None else policy.parameters_by_name(),
        tp=policy.layout.tp,
        tp_rank=policy.grid.at.tp,
        whole_model=policy.layout.pp == 1,
    )


def share_of(batch: SequenceBatch, policy: PolicyModel) -> SequenceBatch:
    """Every dp-th sequence for each data parallel rank."""
    return batch.select(range(policy.grid.at.dp, len(batch), policy.layout.dp))


def hf_scores(model: Qwen2ForCausalLM, batch: SequenceBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies [tokens] by transformers, sequence by sequence; 0 outside the responses."""
    log_probs, entropies = [], []
    for i in range(len(batch)):
        one = batch.select([i])
        logits = model(input_ids=one.tokens.unsqueeze(0)).logits[0] / temperature
        log_p = logits.log_softmax(-1)
        scored = torch.cat([torch.zeros(1), log_p[:-1].gather(1, one.tokens[1:, None])[:, 0]])
        entropy = torch.cat([torch.zeros(1), -(log_p.exp() * log_p).sum(-1)[:-1]])
        log_probs.append(scored * one.response_mask)
        entropies.append(entropy * one.response_mask)
    return torch.cat(log_probs), torch.cat(entropies)


def weighted_loss(entropy_weight: float, total: float):
    """A loss function: a weighted sum of log-probabilities and entropies over a global denominator."""

    def loss(batch: SequenceBatch, log_probs: torch.Tensor, entropy: torch.Tensor | None):
        value = -(batch.columns["weight"] * log_probs).sum() / total
        if entropy is not None:
            value = value - entropy_weight * (batch.response_mask * entropy).sum() / total
        return value, {"tokens": batch.response_mask.sum(), "loss": value}

    return loss
