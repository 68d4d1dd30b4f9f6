import pytest

from megaverl.errors import RunError
from megaverl.models.family import weight_map
from megaverl.parallel.layout import Layout
from megaverl.resharding.hybrid_engine import HybridEngine
from megaverl.resharding.planner import make_plan
from megaverl.resharding.transfer import Moved
from tests.unit.resharding.test_plan import TINY

PLAN = make_plan(weight_map(TINY), Layout(), 1).ranks[0]
MOVING = make_plan(weight_map(TINY), Layout(dp=2), 2).ranks[0]


class RecordingTransfer:
    """Moves nothing and says that it moved what ``plan`` says; `broken` raises."""

    def __init__(self, plan, calls):
        self.plan, self.calls, self.broken = plan, calls, False

    def run(self):
        self.calls.append("move")
        if self.broken:
            raise RuntimeError("connection closed by peer")
        return Moved(self.plan.bytes_copied, self.plan.bytes_received, staging_peak=7)


class RecordingEngine:
    """Writes down the order of the calls; `broken` raises in that call."""

    name = "recording"

    def __init__(self):
        self.calls, self.version, self.broken = [], -1, None

    def _note(self, call):
        self.calls.append(call)
        if call == self.broken:
            raise OSError("no memory")

    def sleep(self):
        self._note("sleep")

    def wake(self):
        self._note("wake")

    def serve_version(self, version):
        self._note("serve")
        self.version = version


@pytest.fixture
def hybrid():
    return make(PLAN)


def make(plan):
    engine = RecordingEngine()
    transfer = RecordingTransfer(plan, engine.calls)
    return HybridEngine(engine, plan, transfer, wait_for_params=lambda: engine.calls.append("wait")), engine


def test_phases_run_in_a_fixed_order_and_report_what_they_cost(hybrid):
    made, engine = hybrid
    assert engine.calls == ["sleep"]
    first = made.to_rollout(0)
    assert engine.calls == ["sleep", "wait", "move", "wake", "serve"]
    assert engine.version == 0
    back = made.to_train()
    assert engine.calls[-1] == "sleep"
    second = made.to_rollout(1)
    assert [m["handoff/bytes_moved"] for m in (first, second)] == [0, 0]
    assert first["handoff/bytes_aliased"] == PLAN.bytes_aliased
    assert [m["handoff/count"] for m in (first, back, second)] == [1, 1, 2]
    assert all(0 <= m["handoff/seconds"] < 1 for m in (first, back, second))


def test_a_phase_cannot_be_entered_twice(hybrid):
    made, _ = hybrid
    with pytest.raises(RunError, match=r"to_train.*needs the rollout phase"):
        made.to_train()
    made.to_rollout(0)
    with pytest.raises(RunError, match=r"to_rollout.*needs the train phase"):
        made.to_rollout(1)


def test_versions_do_not_go_back(hybrid):
    made, _ = hybrid
    with pytest.raises(RunError, match="version -1"):
        made.to_rollout(-1)
    made.to_rollout(4)
    made.to_train()
    made.to_rollout(4)  # the same weights again: validation between two updates
    made.to_train()
    with pytest.raises(RunError, match="version 3 after version 4"):
        made.to_rollout(3)


@pytest.mark.parametrize("step", ["wake", "serve"])
def test_a_handoff_that_fails_half_way_commits_nothing_and_ends_the_phases(hybrid, step):
    made, engine = hybrid
    engine.broken = step
    with pytest.raises(OSError, match="no memory"):
        made.to_rollout(0)
    assert engine.version == -1
    for call in (made.to_train, lambda: made.to_rollout(0)):
        with pytest.raises(RunError, match="earlier handoff failed"):
            call()


def test_the_bytes_that_were_moved_are_reported():
    made, _ = make(MOVING)
    found = made.to_rollout(0)
    assert found["handoff/bytes_copied"] == MOVING.bytes_copied > 0
    assert found["handoff/bytes_aliased"] == MOVING.bytes_aliased > 0
    assert found["handoff/staging_peak"] == 7


def test_a_transfer_that_fails_or_moves_other_bytes_than_planned_commits_nothing():
    made, engine = make(MOVING)
    made.transfer.broken = True
    with pytest.raises(RuntimeError, match="closed by peer"):
        made.to_rollout(0)
    assert engine.version == -1
    assert "wake" not in engine.calls
    made, engine = make(MOVING)
    made.transfer.plan = PLAN
    with pytest.raises(RunError, match="rank 0: 0 bytes were copied and 0 received, the plan says"):
        made.to_rollout(0)
    assert engine.version == -1
