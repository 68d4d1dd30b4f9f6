"""What all families of dense decoder-only transformers share: how a config.json is read and which rows they have.

A family is a `Family` value: the names it goes by and the few things in which it differs. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megaverl.errors import Problems
from megaverl.models.shape import ModelShape
from megaverl.models.weight_map import Row


@dataclass(frozen=True)
class Family:
    """One model architecture.

    Attributes:
        name: the word used in megaverl.
        architectures: values of ``architectures`` in config.json that it takes.
        model_types: values of ``model_type`` that it takes when ``architectures`` is absent.
        qkv_bias: q, k and v have a bias.
        qk_norm: q and k are normalised per head.
        tied_default: what an absent ``tie_word_embeddings`` means.
        rope_theta_default: what an absent rotary base means.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    qkv_bias: bool
    qk_norm: bool
    tied_default: bool = False
    rope_theta_default: float = 10000.0

    def shape_from_config(self, config: Mapping[str, Any], where: str, problems: Problems) -> ModelShape | None:
        """The shape that a parsed config.json describes; what is wrong with it goes to ``problems``, then None.

        Args:
            where: the file, for the messages.
        """
        before = len(problems.found)
        size = {key: _whole(config, key, where, problems) for key in SIZES}
        if config.get("num_key_value_heads", 0) is None:
            size["num_key_value_heads"] = size["num_attention_heads"]
        else:
            size["num_key_value_heads"] = _whole(config, "num_key_value_heads", where, problems)
        eps = _number(config, "rms_norm_eps", where, problems)
        theta = _rope_theta(config, self.rope_theta_default, where, problems)
        _refuse_unsupported(config, where, problems)
        tied = config.get("tie_word_embeddings", self.tied_default)
        if not isinstance(tied, bool):
            problems.add(f"must be true or false, got {tied!r}", where=f"{where}, key tie_word_embeddings")
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
            hf_config=dict(config),
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


def decoder_rows(shape: ModelShape) -> tuple[Row, ...]:
    """Rows of a dense decoder: embedding, per layer attention and gated MLP with two RMS norms, final norm, head."""
    at, hf = "decoder.layers.{i}.", "model.layers.{i}."  # vLLM names layers as Hugging Face does
    embedding = "model.embed_tokens.weight"
    rows = [
        Row("embedding.word_embeddings.weight", (embedding,), embedding, "vocab", "first"),
        Row(
            at + "input_layernorm.weight",
            (hf + "input_layernorm.weight",),
            hf + "input_layernorm.weight",
            "replicated",
            alternatives=(at + "self_attention.linear_qkv.layer_norm_weight",),
        ),
        _qkv_row("weight"),
    ]
    if shape.qkv_bias:
        rows.append(_qkv_row("bias"))
    if shape.qk_norm:
        for mine, theirs in (("q_layernorm", "q_norm"), ("k_layernorm", "k_norm")):
            name = f"self_attn.{theirs}.weight"
            rows.append(Row(f"{at}self_attention.{mine}.weight", (hf + name,), hf + name, "replicated"))
    rows += [
        Row(
            at + "self_attention.linear_proj.weight",
            (hf + "self_attn.o_proj.weight",),
            hf + "self_attn.o_proj.weight",
            "columns",
        ),
        Row(
            at + "pre_mlp_layernorm.weight",
            (hf + "post_attention_layernorm.weight",),
            hf + "post_attention_layernorm.weight",
            "replicated",
            alternatives=(at + "mlp.linear_fc1.layer_norm_weight",),
        ),
        Row(
            at + "mlp.linear_fc1.weight",
            (hf + "mlp.gate_proj.weight", hf + "mlp.up_proj.weight"),
            hf + "mlp.gate_up_proj.weight",
            "rows",
        ),
        Row(at + "mlp.linear_fc2.weight", (hf + "mlp.down_proj.weight",), hf + "mlp.down_proj.weight", "columns"),
        Row("decoder.final_layernorm.weight", ("model.norm.weight",), "model.norm.weight", "replicated", "last"),
    ]
    if not shape.tied:
        rows.append(Row("output_layer.weight", ("lm_head.weight",), "lm_head.weight", "vocab", "last"))
    return tuple(rows)


def _qkv_row(kind: str) -> Row:
    layer = "model.layers.{i}.self_attn."
    return Row(
        f"decoder.layers.{{i}}.self_attention.linear_qkv.{kind}",
        tuple(f"{layer}{part}.{kind}" for part in ("q_proj", "k_proj", "v_proj")),
        f"{layer}qkv_proj.{kind}",
        "rows",
    )


def _whole(config: Mapping[str, Any], key: str, where: str, problems: Problems) -> int:
    value = config.get(key)
    if type(value) is int and value >= 1:
        return value
    what = f"must be a whole number of at least 1, got {value!r}" if key in config else "missing"
    problems.add(what, where=f"{where}, key {key}")
    return 1


def _number(config: Mapping[str, Any], key: str, where: str, problems: Problems) -> float:
    value = config.get(key)
    if type(value) in (int, float) and value > 0:
        return float(value)
    what = f"must be a number above 0, got {value!r}" if key in config else "missing"
    problems.add(what, where=f"{where}, key {key}")
    return 1.0


def _head_dim(config: Mapping[str, Any], size: Mapping[str, int], where: str, problems: Problems) -> int:
    heads, kv_heads, hidden = size["num_attention_heads"], size["num_key_value_heads"], size["hidden_size"]
    if heads % kv_heads:
        problems.add(
            f"{heads} attention heads cannot be shared out over {kv_heads} key-value heads",
            where=f"{where}, key num_key_value_heads",
        )
    if config.get("head_dim") is not None:
        return _whole(config, "head_dim", where, problems)
    if hidden % heads:
        problems.add(
            f"hidden_size {hidden} is not a multiple of {heads} heads and there is no head_dim",
            where=f"{where}, key hidden_size",
        )
    return hidden // heads


def _rope_theta(config: Mapping[str, Any], default: float, where: str, problems: Problems) -> float:
    """The rotary base: ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    theta = None if config.get("rope_theta") is None else _number(config, "rope_theta", where, problems)
    for key in ("rope_parameters", "rope_scaling"):
        entry = config.get(key)
        if entry is None:
            continue
        at = f"{where}, key {key}"
        if not isinstance(entry, Mapping):
            problems.add(f"must be a mapping or null, got {entry!r}", where=at)
            continue
        kind = entry.get("rope_type", entry.get("type", "default"))
        unknown = sorted(set(entry) - {"rope_type", "type", "rope_theta"})
        if kind != "default" or unknown:
            extra = f" with {', '.join(unknown)}" if unknown else ""
            problems.add(
                f"rope scaling {kind!r}{extra} is not supported",
                where=at,
                fix="take a checkpoint without rope scaling, or remove the entry if the longer context is not needed",
            )
        if entry.get("rope_theta") is not None:
            inner = _number(entry, "rope_theta", at, problems)
            if theta is not None and theta != inner:
                problems.add(f"rope_theta is {inner} here and {theta} in another place of the file", where=at)
            theta = inner
    return default if theta is None else theta


def _refuse_unsupported(config: Mapping[str, Any], where: str, problems: Problems) -> None:
    """What would silently train another model than the one in the files."""
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(key):
            problems.add(f"mixture of experts ({key} is {config[key]}) is not supported", where=f"{where}, key {key}")
    if config.get("use_sliding_window"):
        problems.add(
            "sliding window attention is not supported",
            where=f"{where}, key use_sliding_window",
            fix="set it to false if your sequences stay below the window",
        )
    other = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if other:
        problems.add(f"layers of type {', '.join(other)} are not supported", where=f"{where}, key layer_types")
    if config.get("hidden_act", "silu") != "silu":
        problems.add(
            f"activation {config['hidden_act']!r} is not supported, only silu", where=f"{where}, key hidden_act"
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
