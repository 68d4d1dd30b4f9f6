"""A tiny Qwen2-architecture checkpoint with its own tokenizer, made from nothing: for the demo and for tests.

The tokenizer is byte-level BPE with the pre-tokenization of Qwen's models (a split pattern that keeps each digit
alone, NFC) and their chat tokens, so that everything which handles a real Qwen2.5 checkpoint handles this one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaverl.data.corpus import sentences
from megaverl.data.write import replacing_folder
from megaverl.files import write_json

VOCAB = 1024
MAX_POSITIONS = 2048
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (
    PAD,
    START,
    END,
    *(f"<|{name}_{side}|>" for name in ("object_ref", "box", "quad", "vision") for side in ("start", "end")),
    *(f"<|{name}_pad|>" for name in ("vision", "image", "video")),
)
PLAIN = (
    "<tool_call>",
    "</tool_call>",
    *(f"<|fim_{name}|>" for name in ("prefix", "middle", "suffix", "pad")),
    "<|repo_name|>",
    "<|file_sep|>",
)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def build_tiny_checkpoint(
    out: str | Path,
    seed: int = 0,
    *,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 256,
    vocab: int = VOCAB,
    tied: bool = True,
    initializer_range: float = 0.06,
    overwrite: bool = False,
) -> Path:
    """Writes a randomly initialised Qwen2ForCausalLM in fp32 and its tokenizer into the folder ``out``.

    The tokenizer is the same for every seed. A head_dim below 32 is refused by vLLM's CPU attention; the standard
    deviation of the start weights is larger than usual because the model is narrow.

    Args:
        vocab: rows of the embedding; at least the tokenizer's 1,024 ids.

    Returns:
        the folder.

    Raises:
        ValueError: ``vocab`` is smaller than the tokenizer, or heads do not divide.
        UserError: the folder exists and is not empty (``overwrite`` allows it), or cannot be written.
    """
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    if vocab < VOCAB or heads % kv_heads:
        raise ValueError(f"vocab {vocab} must be at least {VOCAB}, kv_heads {kv_heads} must divide heads {heads}")
    with replacing_folder(out, overwrite=overwrite) as folder:
        ids = _write_tokenizer(folder)
        config = Qwen2Config(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=MAX_POSITIONS,
            rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
            tie_word_embeddings=tied,
            initializer_range=initializer_range,
            use_sliding_window=False,
            attention_dropout=0.0,
            bos_token_id=None,
            eos_token_id=ids[END],
            pad_token_id=ids[PAD],
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Qwen2ForCausalLM(config).to(torch.float32)
        model.generation_config = GenerationConfig(eos_token_id=ids[END], pad_token_id=ids[PAD])
        model.save_pretrained(folder)
    return Path(out)


def _write_tokenizer(folder: Path) -> dict[str, int]:
    """Trains the tokenizer, writes its two files and returns added token -> id."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), byte_level])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL) - len(PLAIN),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(sentences(4000, seed=0), trainer)
    bpe.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    bpe.add_tokens([AddedToken(text, normalized=False, special=False) for text in PLAIN])
    bpe.save(str(folder / "tokenizer.json"))

    ids = {text: bpe.token_to_id(text) for text in (*SPECIAL, *PLAIN)}
    write_json(folder / "tokenizer_config.json", _tokenizer_config(ids))
    return ids


def _tokenizer_config(ids: dict[str, int]) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": {str(i): {"content": t, **flags, "special": t in SPECIAL} for t, i in ids.items()},
        "additional_special_tokens": list(SPECIAL[1:]),
        "chat_template": CHAT_TEMPLATE,
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "errors": "replace",
        "model_max_length": MAX_POSITIONS,
    }
