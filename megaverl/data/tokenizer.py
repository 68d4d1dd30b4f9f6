"""The tokenizer of a checkpoint folder, read from its data files alone (never code from the folder)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaverl.errors import Problem, Problems, UserError

FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")


@dataclass(frozen=True)
class Tokenizer:
    """A loaded tokenizer and the ids a run needs.

    Attributes:
        path: folder it was read from.
        hf: the transformers tokenizer.
        end_id: the id that ends a response in supervised training (the tokenizer's end-of-sequence token).
        pad_id: padding id; the end id where the tokenizer has none. Nothing in training pads.
        stop_ids: all ids that end a generated response, sorted: the end id and those of generation_config.json.
    """

    path: Path
    hf: Any
    end_id: int
    pad_id: int
    stop_ids: tuple[int, ...]

    @property
    def size(self) -> int:
        """Highest id + 1: rows that an embedding must have."""
        return max(self.hf.get_vocab().values()) + 1

    @property
    def has_chat_template(self) -> bool:
        return bool(self.hf.chat_template)

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The text of chat messages: the chat template with the generation prompt.

        Raises:
            jinja2.TemplateError: the template refuses the messages.
            ValueError: there is no chat template.
        """
        return self.hf.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of rendered texts, special tokens recognised, none added."""
        return self.hf(list(texts), add_special_tokens=False)["input_ids"] if texts else []

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a string prompt; a beginning-of-sequence token comes first where the tokenizer wants one."""
        has_start = bool(self.hf.bos_token) and text.startswith(self.hf.bos_token)
        return self.hf(text, add_special_tokens=not has_start)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a response, without special tokens."""
        return self.hf.decode(list(ids), skip_special_tokens=True)


def load_tokenizer(path: str | Path, model_path: str | Path | None = None) -> Tokenizer:
    """Loads the tokenizer of a folder.

    Args:
        path: folder with tokenizer.json (or the older files) and tokenizer_config.json.
        model_path: folder of the model, whose generation_config.json names further stop ids; ``path`` when None.

    Raises:
        UserError: folder or files missing, unreadable, in need of code from the folder, or without an end token.
    """
    folder = Path(path).expanduser()
    _check_folder(folder)
    from transformers import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        fix = "The folder must hold a tokenizer that transformers reads without code of its own."
        raise UserError(Problem(f"cannot load the tokenizer: {error}", str(folder), fix)) from error
    problems = Problems()
    stops = _generation_stop_ids(Path(model_path).expanduser() if model_path else folder, problems)
    if hf.eos_token_id is None:
        fix = "Set eos_token in tokenizer_config.json; without it no response ever ends."
        problems.add("the tokenizer has no end token", where=str(folder / "tokenizer_config.json"), fix=fix)
    problems.raise_if_any()
    pad = hf.pad_token_id if hf.pad_token_id is not None else hf.eos_token_id
    return Tokenizer(folder, hf, hf.eos_token_id, pad, tuple(sorted({hf.eos_token_id, *stops})))


def _check_folder(folder: Path) -> None:
    where = f"{folder}, key model.tokenizer_path"
    if not folder.is_dir():
        raise UserError(Problem("no such folder", where, "Give the folder of a Hugging Face checkpoint or tokenizer."))
    if not any((folder / name).is_file() for name in FILES):
        fix = "Set model.tokenizer_path to the folder of a tokenizer, or copy its files there."
        raise UserError(Problem(f"no tokenizer in the folder ({', '.join(FILES)} are all missing)", where, fix))


def _generation_stop_ids(folder: Path, problems: Problems) -> list[int]:
    """End ids of generation_config.json; none where there is no such file."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return []
    try:
        value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        problems.add(f"cannot read the file: {error}", where=str(file), fix="Write or download it again.")
        return []
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        problems.add(
            f"must be an id or a list of ids, this is {value!r}",
            where=f"{file}, key eos_token_id",
            fix="write the id of the end token, e.g. 151645",
        )
        return []
    return ids
