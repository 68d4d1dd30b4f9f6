"""The hybrid engine: one set of weights, used in turn by training and by rollout.

    train --to_rollout(version)--> rollout --to_train()--> train --> ...

A handoff is a commit: the rollout side carries the version of its weights, and a handoff that fails half way leaves
it without one, so nothing is generated from weights that nobody vouches for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from megaverl.errors import RunError
from megaverl.resharding.plan import RankPlan
from megaverl.rollout.engine import RolloutEngine

if TYPE_CHECKING:
    from megaverl.resharding.transfer import Moved, Transfer

Phase = Literal["train", "rollout", "failed"]


class HybridEngine:
    """Switches one rank between training and rollout; all ranks call every method alike.

    The engine is put to sleep at once: a run starts in training's phase.

    Args:
        engine: the generation engine, bound to its parameters.
        plan: this rank's part of the reshard plan.
        transfer: fills the rollout parameters that are not aliases.
        wait_for_params: returns when the training parameters are final (the optimizer's parameter gather is over).
    """

    def __init__(
        self,
        engine: RolloutEngine,
        plan: RankPlan,
        transfer: Transfer,
        wait_for_params: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.plan = plan
        self.transfer = transfer
        self.phase: Phase = "train"
        self.handoffs = 0
        self._wait_for_params = wait_for_params
        engine.sleep()

    def to_rollout(self, version: int) -> dict[str, float]:
        """Hands the weights to rollout as ``version``.

        The order is fixed: weights final, what is not aliased copied and received, memory of the rollout claimed, then
        the commit (which drops cached prefixes). Returns ``handoff/seconds``, ``handoff/count`` and, of this rank,
        ``handoff/bytes_aliased``, ``bytes_copied``, ``bytes_received``, ``bytes_moved`` and ``staging_peak``.

        Raises:
            RunError: not in the train phase, ``version`` is older than the one served last, or other bytes were moved
                than planned.
        """
        self._expect("train", "to_rollout")
        if version < max(self.engine.version, 0):
            raise RunError(f"handoff of version {version} after version {self.engine.version}: weights cannot go back")
        found = self._switch(
            "rollout", self._wait_for_params, self._move, self.engine.wake, lambda: self._commit(version)
        )
        moved = self._moved
        found |= {
            "handoff/bytes_aliased": self.plan.bytes_aliased,
            "handoff/bytes_copied": moved.bytes_copied,
            "handoff/bytes_received": moved.bytes_received,
            "handoff/bytes_moved": moved.bytes_copied + moved.bytes_received,
            "handoff/staging_peak": moved.staging_peak,
        }
        return found

    def to_train(self) -> dict[str, float]:
        """Ends the rollout: the engine gives up its memory. Returns ``handoff/seconds`` and ``handoff/count``.

        Raises RunError when not in the rollout phase.
        """
        self._expect("rollout", "to_train")
        return self._switch("train", self.engine.sleep)

    def _move(self) -> None:
        self._moved: Moved = self.transfer.run()
        got, planned = (self._moved.bytes_copied, self._moved.bytes_received), self.plan
        if got != (planned.bytes_copied, planned.bytes_received):
            raise RunError(
                f"rank {planned.rank}: {got[0]} bytes were copied and {got[1]} received, "
                f"the plan says {planned.bytes_copied} and {planned.bytes_received}"
            )

    def _commit(self, version: int) -> None:
        self.engine.serve_version(version)
        self.handoffs += 1

    def _switch(self, phase: Phase, *steps: Callable[[], None]) -> dict[str, float]:
        start = time.perf_counter()
        self.phase = "failed"  # until every step has been done
        for step in steps:
            step()
        self.phase = phase
        return {"handoff/seconds": time.perf_counter() - start, "handoff/count": self.handoffs}

    def _expect(self, phase: Phase, call: str) -> None:
        if self.phase != phase:
            why = "an earlier handoff failed" if self.phase == "failed" else f"the engine is in the {self.phase} phase"
            raise RunError(f"{call}() needs the {phase} phase, but {why}")
