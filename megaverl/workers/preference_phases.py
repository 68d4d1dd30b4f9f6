"""Phases of a worker for preference training, beside those that it shares with other training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaverl.algorithms.preference import PreferenceCounts
    from megaverl.data.batch import SequenceBatch
    from megaverl.observe.timing import PhaseTimer
    from megaverl.workers.preference_role import PreferenceRole


class PreferencePhases:
    """Part of `Worker`, which sets the attributes."""

    actor: PreferenceRole
    batch: SequenceBatch
    _work: PhaseTimer

    def _from_first_rank(self, value: Any) -> Any:
        raise NotImplementedError

    def baseline_ratios(self) -> list[float] | None:
        """Of this rank's answers under another prompt (KTO)."""
        with self._work.phase("baseline"):
            return self._from_first_rank(self.actor.baseline_ratios(self.batch))

    def measure_preferences(self, counts: PreferenceCounts) -> dict[str, float] | None:
        """This rank's share of the metrics of the loaded pairs."""
        with self._work.phase("testing"):
            return self._from_first_rank(self.actor.measure(self.batch, counts))
