"""A test of handoffs at the start of a run, with the real weights: cheap, and what fails here fails before training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megaverl.errors import RunError
from megaverl.resharding.hybrid_engine import HybridEngine
from megaverl.resharding.own_weights import not_numbers


def self_test(hybrid: HybridEngine, generate: Callable[[], Sequence[Any]]) -> None:
    """Hands over twice, with a sleep in between; collective over all ranks, before the first handoff of a run.

    The weights that a handoff writes are filled with NaN first: none may be left. Those that are training weights are
    checked by address, and by their text like all others: greedy text must be the same after the sleep. All ranks must
    have the same plan.

    Args:
        hybrid: in the train phase.
        generate: greedy text of a few prompts.

    Raises:
        RunError: what failed, naming the weights.
    """
    engine = hybrid.engine
    hybrid.transfer.check_manifest()
    hybrid.release_training()
    engine.wake_weights()
    for tensor in engine.own_weights.values():
        tensor.fill_(float("nan"))
    hybrid.to_rollout(0)
    left = not_numbers(engine.weights)
    if left:
        raise RunError(f"self-test: these rollout weights are NaN after a handoff: {', '.join(left)}")
    engine.check_binding()
    before = generate()
    hybrid.to_train()
    hybrid.to_rollout(0)
    engine.check_binding()
    after = generate()
    hybrid.to_train()
    if before != after:
        differ = sum(a != b for a, b in zip(before, after, strict=True))
        raise RunError(f"self-test: {differ} of {len(before)} greedy texts are others after the engine's sleep")
    hybrid.handoffs = 0
