"""The one table of names: HF checkpoint, Megatron parameter and vLLM parameter, and how each is split over TP.

HF import, HF export, the reshard plan and checkpoints all read these rows. The training model stores every
tensor in vLLM's order (QKV as all q, all k, all v of the rank; MLP as all gate, all up of the rank), so
a row has one meaning on both sides. Pure: no torch.distributed, Megatron or vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megaverl.models.shape import ModelShape

Split = Literal["replicated", "rows", "columns", "vocab"]
"""How a tensor is divided over TP.

replicated: every rank holds all of it. rows: dimension 0 of *each* HF part is divided, then the parts are
concatenated (q, k, v or gate, up). columns: dimension 1 is divided. vocab: dimension 0, padded first.
"""


@dataclass(frozen=True)
class Row:
    """One parameter of the model.

    Attributes:
        megatron: its name in the Megatron model; ``{i}`` stands for the global layer number.
        hf: names of the HF tensors that make it up, in storage order, with the same ``{i}``.
        vllm: its name in vLLM's model.
        split: how it is divided over TP.
        where: ``layer`` (once per layer), ``first`` (first pipeline stage), ``last`` (last stage).
        alternatives: other Megatron names of the same parameter (Transformer Engine fuses norms).
    """

    megatron: str
    hf: tuple[str, ...]
    vllm: str
    split: Split
    where: Literal["layer", "first", "last"] = "layer"
    alternatives: tuple[str, ...] = ()

    def at_layer(self, i: int) -> Row:
        """The row with ``{i}`` replaced by layer ``i``."""
        put = lambda name: name.replace("{i}", str(i))  # noqa: E731
        return Row(
            put(self.megatron),
            tuple(map(put, self.hf)),
            put(self.vllm),
            self.split,
            self.where,
            tuple(map(put, self.alternatives)),
        )


@dataclass(frozen=True)
class WeightMap:
    """All rows of one family for one model shape."""

    shape: ModelShape
    rows: tuple[Row, ...]

    def expand(self) -> Iterator[Row]:
        """Every parameter of the whole model: first-stage rows, each layer's rows, last-stage rows."""
        yield from (r for r in self.rows if r.where == "first")
        for i in range(self.shape.layers):
            yield from (r.at_layer(i) for r in self.rows if r.where == "layer")
        yield from (r for r in self.rows if r.where == "last")

    def part_rows(self, row: Row) -> tuple[int, ...]:
        """Length of dimension 0 of each HF part of ``row`` (unsplit)."""
        return tuple(self.hf_shape(name)[0] for name in row.hf)

    def hf_shape(self, name: str) -> tuple[int, ...]:
        """The shape that HF tensor ``name`` must have for this model shape. Raises KeyError if unknown."""
        s = self.shape
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        leaf = name.removesuffix(".weight").removesuffix(".bias").rsplit(".", 1)[-1]
        matrices = {
            "embed_tokens": (s.vocab, s.hidden),
            "lm_head": (s.vocab, s.hidden),
            "q_proj": (q, s.hidden),
            "k_proj": (kv, s.hidden),
            "v_proj": (kv, s.hidden),
            "o_proj": (s.hidden, q),
            "gate_proj": (s.intermediate, s.hidden),
            "up_proj": (s.intermediate, s.hidden),
            "down_proj": (s.hidden, s.intermediate),
            "q_norm": (s.head_dim,),
            "k_norm": (s.head_dim,),
            "input_layernorm": (s.hidden,),
            "post_attention_layernorm": (s.hidden,),
            "norm": (s.hidden,),
        }
        full = matrices[leaf]
        return full[:1] if name.endswith(".bias") else full
