"""What every generation engine shares: checking a request, seeds of its samples, state, refusals. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from megaverl.errors import Problems, RunError
from megaverl.rollout.engine import RolloutEngine, Sampling


def request_seed(base: int, key: int, sample: int) -> int:
    """Seed of one sample, in [0, 2**62): a hash of the base seed, the prompt's key and the sample's number alone."""
    digest = hashlib.blake2b(f"{base}/{key}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def hf_refusal(tp: int) -> str | None:
    """Why transformers cannot generate from the training parameters; None if it can."""
    if tp != 1:
        return f"the hf engine needs whole weights on one rank, and rollout.tp is {tp}"
    return None


def check_request(
    prompts: Sequence[Sequence[int]], keys: Sequence[int], sampling: Sampling, *, vocab: int, max_model_len: int
) -> None:
    """Checks prompts and sampling before anything is generated.

    Raises:
        UserError: every prompt that is empty, holds an id outside the vocabulary or leaves no room for
            ``sampling.max_tokens``, and every impossible sampling value.
    """
    problems = Problems()
    if len(keys) != len(prompts):
        problems.add(
            f"{len(prompts)} prompts came with {len(keys)} keys", where="generate", fix="give each prompt one key"
        )
    if sampling.n < 1 or sampling.max_tokens < 1:
        problems.add(
            f"n {sampling.n} and max_tokens {sampling.max_tokens} must be at least 1",
            where="sampling",
            fix="set rollout.n and data.max_response_length to 1 or more",
        )
    top_k_ok = sampling.top_k >= 1 or sampling.top_k == -1
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or not top_k_ok or not 0 <= sampling.min_p <= 1:
        problems.add(
            f"temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k}, "
            f"min_p {sampling.min_p}",
            where="sampling",
            fix="temperature >= 0, 0 < top_p <= 1, top_k >= 1 or -1, 0 <= min_p <= 1",
        )
    for i, prompt in enumerate(prompts):
        where = f"prompt {i}"
        if not prompt:
            problems.add("is empty", where=where, fix="give it at least one token")
        elif min(prompt) < 0 or max(prompt) >= vocab:
            problems.add(
                f"holds an id outside the vocabulary of {vocab}",
                where=where,
                fix="encode prompts with the tokenizer of this model (model.tokenizer_path)",
            )
        if len(prompt) + sampling.max_tokens > max_model_len:
            problems.add(
                f"{len(prompt)} tokens and {sampling.max_tokens} new ones are more than {max_model_len}",
                where=where,
                fix="raise data.max_prompt_length or data.max_response_length, or shorten the prompt",
            )
    problems.raise_if_any()


def probe_texts(engine: RolloutEngine, vocab: int, longest: int) -> list[list[int]]:
    """Greedy continuations of a few fixed prompts, as token ids; to compare with later ones of the same weights.

    Args:
        vocab: ids are below it.
        longest: tokens of prompt and continuation.
    """
    count = max(1, min(8, longest // 2))
    prompts = [[(7 * row + 13 * at + 1) % vocab for at in range(min(count, longest - 1))] for row in range(4)]
    sampling = Sampling(1, 0.0, 1.0, -1, min(count, longest - len(prompts[0])), seed=0, ignore_end=True)
    return [c.token_ids for c in engine.generate(prompts, range(len(prompts)), sampling)]


class EngineState:
    """Whether an engine is awake and which weights it serves."""

    def __init__(self) -> None:
        self.awake = True
        self.weights_there = True
        self.version = -1

    def check_ready(self) -> None:
        """Raises RunError unless the engine is awake and a version has been committed."""
        if not self.awake:
            raise RunError("the rollout engine is asleep: wake() it before generate()")
        if self.version < 0:
            raise RunError("no version of the weights has been committed: serve_version() comes before generate()")
