"""Training parameters and rollout parameters of any layout, cut from full random HF tensors."""

import zlib
from dataclasses import replace

import torch

from megaverl.models.family import weight_map
from megaverl.parallel.layout import stage_layers
from megaverl.resharding.placement import rollout_places
from tests.unit.resharding.test_plan import TINY

SMALL = replace(TINY, layers=5, hidden=16, heads=8, kv_heads=2, head_dim=4, intermediate=24, vocab=70)
"""Two key-value heads (held by several ranks at tp 4), 128 padded rows of vocabulary, 5 layers for uneven stages."""
TIED = replace(SMALL, tied=True, qkv_bias=False, qk_norm=True, family="qwen3")


def hf_tensor(table, name, update):
    """The full HF tensor after ``update`` random updates."""
    tensor = torch.zeros(table.hf_shape(name))
    for step in range(update + 1):
        g = torch.Generator().manual_seed(zlib.crc32(f"{step}/{name}".encode()))
        tensor += torch.rand(tensor.shape, generator=g)
    return tensor


def held_rows(shape, train, pp):
    """The rows that a pipeline rank holds, with its name in Megatron."""
    layers = {i for chunk in stage_layers(shape.layers, train.pp, train.vpp)[pp] for i in chunk}
    for row in weight_map(shape).rows:
        if row.where == "layer":
            yield from (row.at_layer(i) for i in sorted(layers))
        else:
            copied = row.where == "last" or shape.tied
            if (pp == 0 and row.where == "first") or (pp == train.pp - 1 and copied):
                yield row


def shard(shape, row, tp, rank, update):
    """One rank's parameter of ``row``, cut from the full tensors; padding is zero."""
    table = weight_map(shape)
    tensor = torch.zeros(table.local_shape(row, tp))
    for piece in table.pieces(row, tp, rank):
        tensor[piece.target] = hf_tensor(table, piece.hf, update)[piece.source]
    return tensor


def train_params(shape, train, rank, update=0):
    """Megatron name -> the rank's training parameter."""
    at = train.coordinates(rank)
    return {row.megatron: shard(shape, row, train.tp, at.tp, update) for row in held_rows(shape, train, at.pp)}


def rollout_params(shape, train, rollout_tp, rank, update=0):
    """vLLM's name -> what the rank's rollout parameter must be."""
    tp_rank = rollout_places(train, rollout_tp)[rank].tp_rank
    rows = weight_map(shape).expand()
    return {row.vllm: shard(shape, row, rollout_tp, tp_rank, update) for row in rows}
