"""What all families of dense decoder-only transformers share: how a config.json is read and which rows they have.

A family is a `Family` value: the names it goes by and the few things in which it differs. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megaverl.errors import Problems
from megaverl.models.families.rope_config import read_rope
from megaverl.models.shape import ModelShape
from megaverl.models.weight_map import Row, Split


@dataclass(frozen=True)
class Family:
    """One model architecture.

    Attributes:
        name: the word used in megaverl.
        architectures: values of ``architectures`` in config.json that it takes.
        model_types: values of ``model_type`` that it takes when ``architectures`` is absent.
        qkv_bias: q, k and v have a bias.
        qk_norm: q and k are normalised per head.
        defaults: what absent keys of config.json mean (as transformers reads them); others must be there.
        must_be_off: keys whose feature is not built: absent, null, false or 0.
        recomputed: tensors that old checkpoints carry although config.json says what is in them (``{i}``: the layer);
            an import checks them and leaves them out. Only ``...inv_freq``, the rotary frequencies, is known.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    qkv_bias: bool
    qk_norm: bool
    defaults: Mapping[str, Any] = field(default_factory=dict)
    must_be_off: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()

    def shape_from_config(self, config: Mapping[str, Any], where: str, problems: Problems) -> ModelShape | None:
        """The shape that a parsed config.json describes; what is wrong with it goes to ``problems``, then None.

        Args:
            where: the file, for the messages.
        """
        before = len(problems.found)
        original, config = dict(config), {**DEFAULTS, **self.defaults, **config}
        size = {key: _whole(config, key, where, problems) for key in SIZES}
        if config.get("num_key_value_heads", 0) is None:
            size["num_key_value_heads"] = size["num_attention_heads"]
        else:
            size["num_key_value_heads"] = _whole(config, "num_key_value_heads", where, problems)
        eps = _number(config, "rms_norm_eps", where, problems)
        theta, scaling = read_rope(config, config["default_rope_theta"], where, problems)
        _refuse_unsupported(config, self.must_be_off, where, problems)
        tied = config["tie_word_embeddings"]
        if not isinstance(tied, bool):
            problems.add(
                f"must be true or false, got {tied!r}",
                where=f"{where}, key tie_word_embeddings",
                fix="write true or false, as the checkpoint's author did",
            )
        if len(problems.found) > before:
            return None
        head_dim = _head_dim(config, size, where, problems)
        if len(problems.found) > before:
            return None
        return ModelShape(
            family=self.name,
            layers=size["num_hidden_layers"],
            hidden=size["hidden_size"],
            heads=size["num_attention_heads"],
            kv_heads=size["num_key_value_heads"],
            head_dim=head_dim,
            intermediate=size["intermediate_size"],
            vocab=size["vocab_size"],
            max_positions=size["max_position_embeddings"],
            norm_eps=eps,
            rope_theta=theta,
            tied=tied,
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            rope_scaling=scaling,
            hf_config=original,
        )

    def rows(self, shape: ModelShape) -> tuple[Row, ...]:
        """The weight-map rows of a model of this family and shape."""
        return decoder_rows(shape)


SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
DEFAULTS = {"tie_word_embeddings": False, "default_rope_theta": 10000.0}
"""What absent keys mean in every family that does not say otherwise."""


def decoder_rows(shape: ModelShape) -> tuple[Row, ...]:
    """Rows of a dense decoder: embedding, per layer attention and gated MLP with two RMS norms, final norm, head."""
    at, hf = "decoder.layers.{i}.", "model.layers.{i}."  # vLLM names layers as Hugging Face does
    hidden, vocab, norm = shape.hidden, (shape.vocab, shape.hidden), (shape.hidden,)
    rows = [
        _same("embedding.word_embeddings.weight", "model.embed_tokens.weight", vocab, "vocab", where="first"),
        _same(
            at + "input_layernorm.weight",
            hf + "input_layernorm.weight",
            norm,
            alternatives=(at + "self_attention.linear_qkv.layer_norm_weight",),
        ),
        _qkv(shape, "weight", (hidden,)),
    ]
    if shape.qkv_bias:
        rows.append(_qkv(shape, "bias", ()))
    if shape.qk_norm:
        for mine, theirs in (("q_layernorm", "q_norm"), ("k_layernorm", "k_norm")):
            rows.append(_same(f"{at}self_attention.{mine}.weight", f"{hf}self_attn.{theirs}.weight", (shape.head_dim,)))
    rows += [
        _same(
            at + "self_attention.linear_proj.weight",
            hf + "self_attn.o_proj.weight",
            (hidden, shape.heads * shape.head_dim),
            "columns",
        ),
        _same(
            at + "pre_mlp_layernorm.weight",
            hf + "post_attention_layernorm.weight",
            norm,
            alternatives=(at + "mlp.linear_fc1.layer_norm_weight",),
        ),
        Row(
            at + "mlp.linear_fc1.weight",
            (hf + "mlp.gate_proj.weight", hf + "mlp.up_proj.weight"),
            hf + "mlp.gate_up_proj.weight",
            "rows",
            shapes=((shape.intermediate, hidden),) * 2,
        ),
        _same(at + "mlp.linear_fc2.weight", hf + "mlp.down_proj.weight", (hidden, shape.intermediate), "columns"),
        _same("decoder.final_layernorm.weight", "model.norm.weight", norm, where="last"),
    ]
    if not shape.tied:
        rows.append(_same("output_layer.weight", "lm_head.weight", vocab, "vocab", where="last"))
    return tuple(rows)


def _same(megatron: str, hf: str, shape: tuple[int, ...], split: Split = "replicated", **more: Any) -> Row:
    """A parameter that is one HF tensor and has HF's name in vLLM."""
    return Row(megatron, (hf,), hf, split, shapes=(shape,), **more)


def _qkv(shape: ModelShape, kind: str, width: tuple[int, ...]) -> Row:
    """q, k and v, stacked by rows and divided by whole heads. ``width``: the dimensions behind the rows."""
    layer, heads = "model.layers.{i}.self_attn.", (shape.heads, shape.kv_heads, shape.kv_heads)
    return Row(
        f"decoder.layers.{{i}}.self_attention.linear_qkv.{kind}",
        tuple(f"{layer}{part}.{kind}" for part in ("q_proj", "k_proj", "v_proj")),
        f"{layer}qkv_proj.{kind}",
        "rows",
        shapes=tuple((n * shape.head_dim, *width) for n in heads),
        units=heads,
    )


def _whole(config: Mapping[str, Any], key: str, where: str, problems: Problems) -> int:
    value = config.get(key)
    if type(value) is int and value >= 1:
        return value
    what = f"must be a whole number of at least 1, got {value!r}" if key in config else "missing"
    problems.add(
        what,
        where=f"{where}, key {key}",
        fix="compare the folder with the one it was downloaded or saved from, and fetch it again",
    )
    return 1


def _number(config: Mapping[str, Any], key: str, where: str, problems: Problems) -> float:
    value = config.get(key)
    if type(value) in (int, float) and value > 0:
        return float(value)
    what = f"must be a number above 0, got {value!r}" if key in config else "missing"
    problems.add(
        what,
        where=f"{where}, key {key}",
        fix="compare the folder with the one it was downloaded or saved from, and fetch it again",
    )
    return 1.0


def _head_dim(config: Mapping[str, Any], size: Mapping[str, int], where: str, problems: Problems) -> int:
    heads, kv_heads, hidden = size["num_attention_heads"], size["num_key_value_heads"], size["hidden_size"]
    if heads % kv_heads:
        problems.add(
            f"{heads} attention heads cannot be shared out over {kv_heads} key-value heads",
            where=f"{where}, key num_key_value_heads",
            fix="this shape is not supported; take a model whose config.json has another value",
        )
    if config.get("head_dim") is not None:
        head_dim = _whole(config, "head_dim", where, problems)
    else:
        head_dim = hidden // heads
        if hidden % heads:
            problems.add(
                f"hidden_size {hidden} is not a multiple of {heads} heads and there is no head_dim",
                where=f"{where}, key hidden_size",
                fix="this shape is not supported; take a model whose config.json has another value",
            )
    if head_dim % 2:
        problems.add(
            f"heads of {head_dim} dimensions cannot be rotated in pairs",
            where=f"{where}, key head_dim",
            fix="this shape is not supported; take a model whose config.json has another value",
        )
    return head_dim


def _refuse_unsupported(
    config: Mapping[str, Any], must_be_off: tuple[str, ...], where: str, problems: Problems
) -> None:
    """What would silently train another model than the one in the files."""
    for key in must_be_off:
        if config.get(key):
            problems.add(
                f"{key} {config[key]!r} is not supported",
                where=f"{where}, key {key}",
                fix="this shape is not supported; take a model whose config.json has another value",
            )
    for key in EXPERT_KEYS:
        if config.get(key):
            problems.add(
                f"mixture of experts ({key} is {config[key]}) is not supported",
                where=f"{where}, key {key}",
                fix="this shape is not supported; take a model whose config.json has another value",
            )
    if config.get("use_sliding_window"):
        problems.add(
            "sliding window attention is not supported",
            where=f"{where}, key use_sliding_window",
            fix="set it to false if your sequences stay below the window",
        )
    other = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if other:
        problems.add(
            f"layers of type {', '.join(other)} are not supported",
            where=f"{where}, key layer_types",
            fix="this shape is not supported; take a model whose config.json has another value",
        )
    if config.get("hidden_act", "silu") != "silu":
        problems.add(
            f"activation {config['hidden_act']!r} is not supported, only silu",
            where=f"{where}, key hidden_act",
            fix="this shape is not supported; take a model whose config.json has another value",
        )
    if config.get("attention_dropout"):
        problems.add(
            f"attention dropout {config['attention_dropout']} is not supported",
            where=f"{where}, key attention_dropout",
            fix="set it to 0.0",
        )
    if config.get("quantization_config") is not None:
        problems.add(
            "a quantised checkpoint cannot be trained",
            where=f"{where}, key quantization_config",
            fix="take the checkpoint in bf16, fp16 or fp32",
        )
