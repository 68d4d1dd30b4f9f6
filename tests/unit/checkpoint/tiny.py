"""Tiny Qwen2 checkpoints, written by transformers itself, for the tests of this folder and of tests/gloo."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megaverl.models.family import load_shape, weight_map

LAYERS, VOCAB = 2, 100


def make_checkpoint(
    folder: Path,
    *,
    tied: bool = True,
    seed: int = 0,
    shard: str = "5GB",
    dtype=torch.float32,
    layers: int = LAYERS,
) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        use_sliding_window=False,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():  # norms and biases too: equal values would hide a mix-up
            p.normal_()
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text('{"not": "read here"}')
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def rows_of(folder: Path):
    return weight_map(load_shape(folder))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def rewrite(folder: Path, change) -> None:
    """Replaces the tensors of a single-file checkpoint by what ``change`` makes of them, in place."""
    tensors = tensors_of(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **values) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def empty_params(rows, tp: int, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """A rank's parameters, filled with a value that no checkpoint holds."""
    return {row.megatron: torch.full(rows.local_shape(row, tp), 777.0, dtype=dtype) for row in rows.expand()}


def expected_params(t: dict[str, torch.Tensor], tp: int, rank: int, *, tied: bool) -> dict[str, torch.Tensor]:
    """What a rank must hold, written down independently of the weight map. Vocabulary 100 pads to 128."""

    def share(name, dim=0):
        return t[name].chunk(tp, dim)[rank]

    def vocab(name):
        return torch.cat([t[name], torch.zeros(28, t[name].shape[1])]).chunk(tp)[rank]

    want = {
        "embedding.word_embeddings.weight": vocab("model.embed_tokens.weight"),
        "decoder.final_layernorm.weight": t["model.norm.weight"],
    }
    if not tied:
        want["output_layer.weight"] = vocab("lm_head.weight")
    for i in range(LAYERS):
        hf, mg = f"model.layers.{i}.", f"decoder.layers.{i}."
        for kind in ("weight", "bias"):
            want[f"{mg}self_attention.linear_qkv.{kind}"] = torch.cat(
                [share(f"{hf}self_attn.{p}_proj.{kind}") for p in "qkv"]
            )
        want[mg + "self_attention.linear_proj.weight"] = share(hf + "self_attn.o_proj.weight", 1)
        want[mg + "mlp.linear_fc1.weight"] = torch.cat(
            [share(hf + "mlp.gate_proj.weight"), share(hf + "mlp.up_proj.weight")]
        )
        want[mg + "mlp.linear_fc2.weight"] = share(hf + "mlp.down_proj.weight", 1)
        want[mg + "input_layernorm.weight"] = t[hf + "input_layernorm.weight"]
        want[mg + "pre_mlp_layernorm.weight"] = t[hf + "post_attention_layernorm.weight"]
    return want
