"""Builds Megatron's GPTModel for a model shape; `models/layer_specs.py` says what its layers are made of."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megaverl.models.attention import PackedSequences
from megaverl.models.layer_specs import DecoderConfig, kernel_flags, layer_spec, norm_class
from megaverl.models.packed import PackLayout
from megaverl.models.rope import inverse_frequencies
from megaverl.models.shape import ModelShape
from megaverl.parallel.compat_megatron import (
    GPTModel,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
    without_noise,
)
from megaverl.parallel.device import Device
from megaverl.parallel.layout import Coordinates, Layout, stage_layers
from megaverl.parallel.shared_rows import SharedRows

Recompute = Literal["none", "selective", "full"]
"""Activations that the backward pass computes again: none, those inside attention, or all but each layer's input."""
RECOMPUTE = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def transformer_config(
    shape: ModelShape,
    layout: Layout,
    device: Device,
    *,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
) -> DecoderConfig:
    """Megatron's configuration for ``shape`` divided as ``layout``.

    With more TP ranks than KV heads it describes a model with a KV head per rank; `share_kv_heads` ties the equal ones.
    """
    low_precision = device.dtype != torch.float32
    with without_noise():
        return DecoderConfig(
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            num_attention_heads=shape.heads,
            num_query_groups=max(shape.kv_heads, layout.tp),
            kv_channels=shape.head_dim,
            softmax_scale=_softmax_scale(shape),
            ffn_hidden_size=shape.intermediate,
            normalization="RMSNorm",
            layernorm_epsilon=shape.norm_eps,
            qk_layernorm=shape.qk_norm,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            add_qkv_bias=shape.qkv_bias,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            pipeline_model_parallel_layout=_pipeline_stages(shape, layout),
            # With two ranks the neighbours on both sides are one rank: only Megatron's overlapped exchange tells
            # what goes forward from what goes backward then.
            overlap_p2p_comm=layout.vpp > 1,
            batch_p2p_comm=layout.vpp == 1,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            sequence_parallel=sequence_parallel,
            # Micro-batches are cut by token count, so every one has another length.
            variable_seq_lengths=True,
            moe_token_dispatcher_type="alltoall",  # the default is refused with variable lengths, experts or not
            params_dtype=device.dtype,
            pipeline_dtype=device.dtype,
            bf16=low_precision,
            # Losses come with global denominators and are summed: nothing may divide by micro-batches or DP ranks.
            calculate_per_token_loss=True,
            **kernel_flags(device.backend),
            **RECOMPUTE[recompute],
        )


def _pipeline_stages(shape: ModelShape, layout: Layout) -> list[list[str]] | None:
    """What each pipeline stage holds, in the words of Megatron; None for a model that is not divided."""
    if layout.pp == 1:
        return None
    held = stage_layers(shape.layers, layout.pp, layout.vpp)
    stages = [["decoder"] * len(held[r][c]) for c in range(layout.vpp) for r in range(layout.pp)]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def _softmax_scale(shape: ModelShape) -> float | None:
    """Scale of the attention scores; None is Megatron's own ``head_dim^-0.5``.

    A rotary scaling that stretches queries and keys by a factor (yarn) stretches the scores by its square.
    """
    _, factor = inverse_frequencies(shape)
    return None if factor == 1.0 else factor**2 * shape.head_dim**-0.5


def _block_spec(shape: ModelShape, config: DecoderConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    layers = [layer_spec(shape, config.kernels)] * get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm_class(config.kernels))


class PackedGPTModel(GPTModel):
    """A decoder that maps packed tokens to hidden states and leaves the output layer to the caller.

    Log-probabilities are computed from hidden states in chunks (`models/log_probs.py`), so the logits
    ``[tokens, vocabulary]`` never exist.
    """

    def __init__(
        self,
        shape: ModelShape,
        config: DecoderConfig,
        *,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=_block_spec(shape, config, vp_stage),
            vocab_size=shape.padded_vocab(config.tensor_model_parallel_size),
            max_sequence_length=shape.max_positions,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="none",  # the rotary table is made in `forward`, for packed positions
        )
        frequencies, _ = inverse_frequencies(shape)  # their factor of cosines and sines is in the softmax scale
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def forward(self, tokens: Tensor, layout: PackLayout) -> Tensor:
        """[1, tokens] -> [tokens, 1, hidden] (this rank's part of the tokens with sequence parallelism).

        On the last pipeline stage these are the final, normalised hidden states. Other stages than the first take
        their input from Megatron's schedule (`set_input_tensor`).
        """
        hidden = self.embedding(input_ids=tokens, position_ids=None) if self.pre_process else None
        rotary, packed = self._packed(layout)
        return self.decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=packed)

    def _packed(self, layout: PackLayout) -> tuple[Tensor | None, PackedSequences]:
        """The rotary table for Megatron and the description of the pack, as the kernels want them.

        Eager: angles of every token. Otherwise no table: Megatron would compute cosines and sines anew in every layer,
        so `RotatingSelfAttention` takes them from the pack.
        """
        if self.config.kernels == "eager":
            return self.rotary_angles(layout.positions), PackedSequences(layout=layout)
        half = torch.outer(layout.positions.float(), self.inverse_frequencies)
        pack = PackedSequences(layout=layout, rotation=(half.cos(), half.sin()))
        if self.config.kernels == "te":
            pack.qkv_format = "thd"
            pack.cu_seqlens_q = pack.cu_seqlens_kv = layout.cu_seqlens
            pack.max_seqlen_q = pack.max_seqlen_kv = layout.longest
        return None, pack

    def rotary_angles(self, positions: Tensor) -> Tensor:
        """int64 [tokens] -> float32 [tokens, 1, 1, head_dim], angles of both halves (arXiv 2104.09864)."""
        angles = torch.outer(positions.float(), self.inverse_frequencies)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]

    @property
    def output_weight(self) -> Tensor:
        """[padded_vocab / tp, hidden], the output layer's weight; exists on the last pipeline stage."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def build_gpt(
    shape: ModelShape,
    layout: Layout,
    device: Device,
    *,
    sequence_parallel: bool,
    at: Coordinates,
    recompute: Recompute = "none",
    model_class: type[PackedGPTModel] = PackedGPTModel,
) -> list[PackedGPTModel]:
    """The model chunks of one rank (one, without a virtual pipeline), randomly initialised, on ``device``.

    Args:
        at: the rank's place in the layout.
        recompute: activations that the backward pass computes again.
        model_class: what to build.
    """
    config = transformer_config(shape, layout, device, sequence_parallel=sequence_parallel, recompute=recompute)
    chunks = []
    for chunk in range(layout.vpp):
        model = model_class(
            shape,
            config,
            pre_process=at.pp == 0 and chunk == 0,
            post_process=at.pp == layout.pp - 1 and chunk == layout.vpp - 1,
            vp_stage=chunk if layout.vpp > 1 else None,
        )
        share_kv_heads(model, shape, layout.tp, at.tp)
        chunks.append(model.to(device.torch_device))
    return chunks


def share_kv_heads(model: PackedGPTModel, shape: ModelShape, tp: int, tp_rank: int) -> None:
    """Marks the QKV rows that other TP ranks hold too: rank r holds KV head ``r * kv_heads // tp``."""
    if tp <= shape.kv_heads:
        return
    unit, copy = divmod(tp_rank, tp // shape.kv_heads)
    rows = SharedRows(shape.heads // tp * shape.head_dim, unit, shape.kv_heads, copy)
    for layer in model.decoder.layers:
        qkv = layer.self_attention.linear_qkv
        for parameter in (qkv.weight, qkv.bias) if shape.qkv_bias else (qkv.weight,):
            parameter.shared_rows = rows
