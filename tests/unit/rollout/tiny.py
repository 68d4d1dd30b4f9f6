"""A small random checkpoint, its shards as training parameters, and transformers as the reference."""

import zlib
from pathlib import Path

import torch
from safetensors.torch import load_file

from megaverl.models.family import load_shape, weight_map

VOCAB = 1030  # not a multiple of 64: the embedding is padded to 1088 rows


def save_checkpoint(folder: Path, *, family: str = "Qwen2", tied: bool = False, **changes) -> Path:
    """4 layers, 4 heads of 32, 2 key-value heads; norms and biases are not trivial."""
    import transformers

    config = {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "initializer_range": 0.06,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": 5,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**config | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * (0.1 if name.endswith("bias") else 0.05))
    model.save_pretrained(folder)
    return folder


def state_of(folder: Path, update: int = 0) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors after ``update`` random in-place updates (each a function of its number)."""
    state = load_file(folder / "model.safetensors")
    for step in range(1, update + 1):
        for name, tensor in state.items():
            g = torch.Generator().manual_seed(zlib.crc32(f"{step}/{name}".encode()))
            tensor.add_(torch.randn(tensor.shape, generator=g) * 0.02)
    return state


def write_shard(params: dict[str, torch.Tensor], folder: Path, tp: int, rank: int, update: int = 0) -> None:
    """Writes a state into the training parameters of one rank, in place."""
    table, state = weight_map(load_shape(folder)), state_of(folder, update)
    with torch.no_grad():
        for row in table.expand():
            for piece in table.pieces(row, tp, rank):
                params[row.megatron][piece.target] = state[piece.hf][piece.source]


def training_params(folder: Path, tp: int = 1, rank: int = 0) -> dict[str, torch.nn.Parameter]:
    """Megatron name -> parameter of one rank, views of one flat buffer as Megatron's DDP makes them."""
    table = weight_map(load_shape(folder))
    shapes = {row.megatron: table.local_shape(row, tp) for row in table.expand()}
    flat = torch.zeros(sum(torch.Size(s).numel() for s in shapes.values()))
    params, at = {}, 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        params[name] = torch.nn.Parameter(flat[at : at + size].view(shape))
        at += size
    write_shard(params, folder, tp, rank)
    return params


def reference(folder: Path, update: int = 0):
    """The transformers model with the weights after ``update`` updates."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(state_of(folder, update), strict=not model.config.tie_word_embeddings)
    return model.eval()


@torch.no_grad()
def reference_log_probs(model, prompt, response, temperature: float = 1.0):
    """Log-probs of the response tokens over the full softmax, and the most likely tokens there."""
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    log_probs = (logits / temperature).log_softmax(-1)
    return log_probs.gather(1, torch.tensor(response)[:, None])[:, 0].tolist(), logits.argmax(-1).tolist()


def some_prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Prompts of different lengths."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (count,), generator=g).tolist()
    return [torch.randint(6, VOCAB, (length,), generator=g).tolist() for length in lengths]
