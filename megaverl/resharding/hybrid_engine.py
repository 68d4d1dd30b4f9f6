"""The hybrid engine: one set of weights, used in turn by training and by rollout.

    train --to_rollout(version)--> rollout --to_train()--> train --> ...

To rollout: wait for the parameters, release what training alone needs, take the memory of the rollout's own weights,
fill them, take the KV cache, commit. To train: give up KV cache and own weights; training takes its memory back when it
first needs it (gradients and optimizer state at the update, not for the passes before it). So memory is always released
before other memory is claimed.

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
    from megaverl.observe.phase_memory import PhaseMemory
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
        release_training: frees the memory that training alone needs, as the configuration says.
        memory: measures the memory of each phase, for the reports.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        plan: RankPlan,
        transfer: Transfer,
        wait_for_params: Callable[[], None] = lambda: None,
        release_training: Callable[[], None] = lambda: None,
        memory: PhaseMemory | None = None,
    ) -> None:
        self.engine = engine
        self.plan = plan
        self.transfer = transfer
        self.release_training = release_training
        self.memory = memory
        self.phase: Phase = "train"
        self.handoffs = 0
        self._wait_for_params = wait_for_params
        self._peaks = {"train": 0, "rollout": 0}
        self._back_seconds = 0.0
        engine.sleep()

    def to_rollout(self, version: int) -> dict[str, float]:
        """Hands the weights to rollout as ``version``; the order is that of the module's text.

        Returns ``handoff/seconds`` (the way back before it included), ``handoff/count`` and, of this rank and in bytes,
        ``handoff/bytes_aliased``, ``bytes_copied``, ``bytes_received``, ``bytes_moved`` and ``staging_peak``; and
        ``memory/train_weights``, ``memory/rollout_weights`` (what the rollout's weights take besides) and, with
        ``memory``, ``memory/train_peak`` and ``memory/rollout_peak`` of the phases since the last report.

        Raises:
            RunError: not in the train phase, ``version`` is older than the one served last, or other bytes were moved
                than planned.
        """
        self._expect("train", "to_rollout")
        if version < max(self.engine.version, 0):
            raise RunError(f"handoff of version {version} after version {self.engine.version}: weights cannot go back")
        self._measure("train")
        seconds = self._switch(
            "rollout",
            self._wait_for_params,
            self.release_training,
            self.engine.wake_weights,
            self._move,
            self.engine.wake,
            lambda: self._commit(version),
        )
        return self._report(seconds + self._back_seconds)

    def to_train(self) -> None:
        """Ends the rollout: the engine gives up its memory. Raises RunError when not in the rollout phase."""
        self._expect("rollout", "to_train")
        self._measure("rollout")
        self._back_seconds = self._switch("train", self.engine.sleep)

    def _measure(self, phase: Literal["train", "rollout"]) -> None:
        if self.memory is not None:
            self._peaks[phase] = self.memory.end(self.engine.bytes_released)

    def _report(self, seconds: float) -> dict[str, float]:
        moved, sizes = self._moved, self.plan
        found: dict[str, float] = {
            "handoff/seconds": seconds,
            "handoff/count": self.handoffs,
            "handoff/bytes_aliased": sizes.bytes_aliased,
            "handoff/bytes_copied": moved.bytes_copied,
            "handoff/bytes_received": moved.bytes_received,
            "handoff/bytes_moved": moved.bytes_copied + moved.bytes_received,
            "handoff/staging_peak": moved.staging_peak,
            "memory/train_weights": self.transfer.training_bytes,
            "memory/rollout_weights": sizes.peak_extra_bytes,
        }
        if self.memory is not None:
            found |= {f"memory/{phase}_peak": size for phase, size in self._peaks.items()}
        return found

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

    def _switch(self, phase: Phase, *steps: Callable[[], None]) -> float:
        start = time.perf_counter()
        self.phase = "failed"  # until every step has been done
        for step in steps:
            step()
        self.phase = phase
        return time.perf_counter() - start

    def _expect(self, phase: Phase, call: str) -> None:
        if self.phase != phase:
            why = "an earlier handoff failed" if self.phase == "failed" else f"the engine is in the {self.phase} phase"
            raise RunError(f"{call}() needs the {phase} phase, but {why}")
