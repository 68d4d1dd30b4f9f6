"""vLLM's sampler: log-probs at the sampling temperature, and its Python costs on a CPU left out."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megaverl.rollout.compat_vllm import engine_sampler

SEEDS_AT_ONCE = 64
"""Draws taken from a request's generator at a time; drawing one by one costs more than the sampling itself."""


def logprobs_mode(device: str) -> str:
    """The mode in which `scale_logprobs` can give the log-probs that `Completion` promises."""
    return "raw_logprobs" if device == "cpu" else "processed_logprobs"


def scale_logprobs(llm: Any, device: str, temperature: float, filtered: bool) -> bool:
    """Makes vLLM report log-probs over the full softmax at ``temperature`` (1 for greedy) in the next requests.

    ``filtered``: top_p, top_k or min_p cut the distribution. Returns False where that cannot be had: on a GPU the
    processed mode is exact without a cut, and reports the cut distribution with one.
    """
    if device == "cpu":
        sampler = engine_sampler(llm)
        plain = type(sampler).compute_logprobs
        scale = temperature or 1.0
        sampler.compute_logprobs = plain if scale == 1.0 else lambda logits: plain(logits / scale)
        return True
    return not filtered


def tune_sampler(llm: Any, device: str) -> None:
    """On a CPU, replaces what costs vLLM's sampler much and gives us nothing; the tokens are the same.

    The rank of the sampled token beside its log-prob: we do not read it, and the function that counts it is compiled
    by torch at the first request (15 s, and a C++ compiler must be there). The seeds of a step: drawn from each
    request's generator in a block instead of one by one.
    """
    if device != "cpu":
        return
    module = importlib.import_module("vllm.v1.sample.sampler")
    module.batched_count_greater_than = lambda x, values: x.new_zeros(x.shape[0], dtype=torch.int64)
    engine_sampler(llm).topk_topp_sampler.forward = _SeededSampler()


class _SeededSampler:
    """Samples one token per row by vLLM's Gumbel kernel, each row from its request's own generator."""

    def __init__(self) -> None:
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        self._filter = apply_top_k_top_p
        self._streams: weakref.WeakKeyDictionary[torch.Generator, Iterator[int]] = weakref.WeakKeyDictionary()

    def __call__(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, None]:
        """Token ids [rows] from logits [rows, vocabulary] cut to top ``k`` and nucleus ``p``."""
        logits = self._filter(logits, k, p).float()
        seeds = torch.tensor([self._seed(generators[row]) for row in range(logits.shape[0])])
        return torch.ops._C.fused_gumbel_argmax(logits, seeds), None

    def _seed(self, generator: torch.Generator) -> int:
        stream = self._streams.get(generator)
        if stream is None:
            stream = self._streams[generator] = _draws(generator.initial_seed())
        return next(stream)


def _draws(seed: int) -> Iterator[int]:
    """The numbers that vLLM would draw from a generator of this seed, one per token."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randint(0, 2**31, (SEEDS_AT_ONCE,), generator=generator).tolist()
