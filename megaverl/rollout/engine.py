"""The one interface of generation engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    Attributes:
        n: samples per prompt.
        temperature: 0 is greedy.
        top_p: nucleus mass.
        top_k: tokens to choose from; -1 is all.
        max_tokens: longest response.
        seed: base seed; a request's seed is derived from it, the prompt's key and the sample number alone, so
            the result does not depend on what else is in the batch.
        stop_ids: ids that end a response (the end token is part of the response).
        min_p: leaves out tokens below this share of the likeliest one's probability.
        stop: texts that end a response; engines, which have no tokenizer, do not see to it: `rollout.stops` does.
        ignore_end: go on to max_tokens whatever is generated (benchmarks).
    """

    n: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int
    stop_ids: tuple[int, ...] = ()
    ignore_end: bool = False
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    @property
    def cuts(self) -> bool:
        """Whether tokens are drawn from a part of the softmax only."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True)
class Completion:
    """One sampled response.

    Attributes:
        prompt: position of its prompt in the request.
        sample: number of the sample of that prompt, from 0.
        token_ids: the response, its end token included.
        log_probs: log-probability of each response token over the full softmax at the sampling temperature.
        finish: ``stop`` (end token) or ``length``.
    """

    prompt: int
    sample: int
    token_ids: list[int]
    log_probs: list[float]
    finish: str


class RolloutEngine(Protocol):
    """Generates with the weights of the training model in the same process. All TP ranks call every method alike."""

    name: str
    bytes_released: int
    """Device memory that a sleep has given up and torch still counts as allocated."""

    def generate(self, prompts: Sequence[Sequence[int]], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        """Samples ``sampling.n`` responses for each prompt, ordered by (prompt, sample).

        Log-probabilities are over the full softmax at the sampling temperature whatever cuts it, or NaN.
        ``keys`` [prompts] name each prompt for its seed (the row number in the run).
        """
        ...

    def sleep(self) -> None:
        """Gives up what generation alone needs: the KV cache, and weights that are not training weights."""
        ...

    def wake_weights(self) -> None:
        """Takes the memory of the weights that a handoff fills; what is in them is not defined before it has."""
        ...

    def wake(self) -> None:
        """Takes the memory of the KV cache and makes the engine ready to generate; comes after `wake_weights`."""
        ...

    def serve_version(self, version: int) -> None:
        """Commits: from now on responses come from weights of this version; cached prefixes are dropped."""
        ...

    def check_binding(self) -> Any:
        """Raises RunError naming each parameter that is not the tensor of `weights`."""
        ...

    def close(self) -> None:
        """Ends the engine; the training parameters and the torch.distributed world stay."""
        ...

    @property
    def version(self) -> int:
        """Version of the weights served; -1 before the first commit."""
        ...

    @property
    def own_weights(self) -> Mapping[str, Tensor]:
        """Those of `weights` that are not training parameters."""
        ...

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """vLLM's name -> the tensor behind this rank's parameter: a training parameter, or storage that each handoff
        fills."""
        ...
