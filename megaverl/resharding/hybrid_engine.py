"""The hybrid engine: one set of weights, used in turn by training and by rollout.

    train --to_rollout(version)--> rollout --to_train()--> train --> ...

A handoff is a commit: the rollout side carries the version of its weights, and a handoff that fails half way leaves
it without one, so nothing is generated from weights that nobody vouches for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from megaverl.errors import RunError
from megaverl.resharding.plan import RankPlan
from megaverl.rollout.engine import RolloutEngine

Phase = Literal["train", "rollout", "failed"]


class HybridEngine:
    """Switches one rank between training and rollout; all ranks call every method alike.

    The engine is put to sleep at once: a run starts in training's phase.

    Args:
        engine: the generation engine, bound to the training parameters.
        plan: this rank's part of the reshard plan (aliases only: nothing else can be carried out yet).
        wait_for_params: returns when the training parameters are final (the optimizer's parameter gather is over).

    Raises:
        RunError: the plan holds entries that move bytes.
    """

    def __init__(self, engine: RolloutEngine, plan: RankPlan, wait_for_params: Callable[[], None] = lambda: None):
        if plan.bytes_moved:
            raise RunError(f"rank {plan.rank}: the plan moves {plan.bytes_moved} bytes, only aliases can be handed off")
        self.engine = engine
        self.plan = plan
        self.phase: Phase = "train"
        self.handoffs = 0
        self._wait_for_params = wait_for_params
        engine.sleep()

    def to_rollout(self, version: int) -> dict[str, float]:
        """Hands the weights to rollout as ``version``.

        The order is fixed: weights final, memory of the rollout claimed, then the commit (which drops cached prefixes).
        Returns ``handoff/bytes_moved`` (this rank's bytes), ``handoff/seconds`` and ``handoff/count``.

        Raises:
            RunError: not in the train phase, or ``version`` is older than the one served last.
        """
        self._expect("train", "to_rollout")
        if version < max(self.engine.version, 0):
            raise RunError(f"handoff of version {version} after version {self.engine.version}: weights cannot go back")
        return self._switch("rollout", self._wait_for_params, self.engine.wake, lambda: self._commit(version))

    def to_train(self) -> dict[str, float]:
        """Ends the rollout: the engine gives up its memory. Returns ``handoff/bytes_moved`` (0) and seconds.

        Raises RunError when not in the rollout phase.
        """
        self._expect("rollout", "to_train")
        return self._switch("train", self.engine.sleep)

    def _commit(self, version: int) -> None:
        self.engine.serve_version(version)
        self.handoffs += 1

    def _switch(self, phase: Phase, *steps: Callable[[], None]) -> dict[str, float]:
        start = time.perf_counter()
        self.phase = "failed"  # until every step has been done
        for step in steps:
            step()
        self.phase = phase
        seconds = time.perf_counter() - start
        moved = self.plan.bytes_moved if phase == "rollout" else 0
        return {"handoff/bytes_moved": moved, "handoff/seconds": seconds, "handoff/count": self.handoffs}

    def _expect(self, phase: Phase, call: str) -> None:
        if self.phase != phase:
            why = "an earlier handoff failed" if self.phase == "failed" else f"the engine is in the {self.phase} phase"
            raise RunError(f"{call}() needs the {phase} phase, but {why}")
