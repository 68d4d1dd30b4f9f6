"""Prompts to token ids: the very ids that are counted, kept and later sent to the rollout."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from megaverl.data.tokenizer import Tokenizer, load_tokenizer

Prompt = list[dict[str, Any]] | str
CHUNK = 1024  # prompts per call of the tokenizer


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[Prompt], workers: int = 1) -> list[list[int] | str]:
    """Ids of each prompt, or the reason why the chat template refused it (a string), in order.

    Chat messages go through the chat template with the generation prompt. A string goes to the model as it is:
    it may be a prompt for a base model or one that is rendered already.

    Args:
        workers: processes to use; each loads the tokenizer from its folder.
    """
    chunks = [prompts[i : i + CHUNK] for i in range(0, len(prompts), CHUNK)]
    if workers == 1 or len(chunks) <= 1:
        return [result for chunk in chunks for result in _encode_chunk(tokenizer, chunk)]
    with ProcessPoolExecutor(
        min(workers, len(chunks)), get_context("spawn"), initializer=_start, initargs=(tokenizer.path,)
    ) as pool:
        return [result for results in pool.map(_encode_in_worker, chunks) for result in results]


def _encode_chunk(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> list[list[int] | str]:
    from jinja2 import TemplateError

    results: list[list[int] | str] = [[] for _ in prompts]
    rendered: dict[int, str] = {}
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            results[i] = tokenizer.encode_plain(prompt)
            continue
        try:
            rendered[i] = tokenizer.render(prompt)
        except (TemplateError, TypeError) as error:  # a template raises TypeError on values it cannot join
            results[i] = str(error) or type(error).__name__
    for i, ids in zip(rendered, tokenizer.encode(list(rendered.values())), strict=True):
        results[i] = ids
    return results


_worker_tokenizer: Tokenizer | None = None


def _start(path: Path) -> None:
    global _worker_tokenizer
    _worker_tokenizer = load_tokenizer(path)


def _encode_in_worker(prompts: Sequence[Prompt]) -> list[list[int] | str]:
    return _encode_chunk(_worker_tokenizer, prompts)
