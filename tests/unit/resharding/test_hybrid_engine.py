import pytest
import torch

from megaverl.errors import RunError
from megaverl.models.family import weight_map
from megaverl.parallel.layout import Layout
from megaverl.resharding.hybrid_engine import HybridEngine
from megaverl.resharding.planner import make_plan
from megaverl.resharding.self_test import self_test
from megaverl.resharding.transfer import Moved
from tests.unit.resharding.test_plan import TINY

PLAN = make_plan(weight_map(TINY), Layout(), 1).ranks[0]
MOVING = make_plan(weight_map(TINY), Layout(dp=2), 2).ranks[0]


class RecordingTransfer:
    """Moves nothing and says that it moved what ``plan`` says; `broken` raises."""

    training_bytes = 99

    def __init__(self, plan, calls):
        self.plan, self.calls, self.broken = plan, calls, False

    def run(self):
        self.calls.append("move")
        if self.broken:
            raise RuntimeError("connection closed by peer")
        return Moved(self.plan.bytes_copied, self.plan.bytes_received, staging_peak=7)

    def check_manifest(self):
        self.calls.append("manifest")


class RecordingEngine:
    """Writes down the order of the calls; `broken` raises in that call."""

    name = "recording"
    bytes_released = 5

    def __init__(self):
        self.calls, self.version, self.broken = [], -1, None
        self.weights = {"own": torch.zeros(3), "shared": torch.zeros(2)}
        self.own_weights = {"own": self.weights["own"]}

    def _note(self, call):
        self.calls.append(call)
        if call == self.broken:
            raise OSError("no memory")

    def sleep(self):
        self._note("sleep")

    def wake_weights(self):
        self._note("wake weights")

    def wake(self):
        self._note("wake cache")

    def check_binding(self):
        self._note("check")

    def serve_version(self, version):
        self._note("serve")
        self.version = version


class CountingMemory:
    """Gives 10, 20, ... bytes, one phase after the other."""

    def __init__(self):
        self.ended = []

    def end(self, released):
        self.ended.append(released)
        return 10 * len(self.ended)


@pytest.fixture
def hybrid():
    return make(PLAN)


def make(plan):
    engine = RecordingEngine()
    transfer = RecordingTransfer(plan, engine.calls)
    note = engine.calls.append
    return (
        HybridEngine(
            engine,
            plan,
            transfer,
            wait_for_params=lambda: note("wait"),
            release_training=lambda: note("release training"),
            memory=CountingMemory(),
        ),
        engine,
    )


def test_case_15_memory_is_released_before_it_is_claimed_and_the_order_is_fixed(hybrid):
    made, engine = hybrid
    assert engine.calls == ["sleep"]
    for version in (0, 1):
        engine.calls.clear()
        made.to_rollout(version)
        assert engine.calls == ["wait", "release training", "wake weights", "move", "wake cache", "serve"]
        assert engine.version == version
        engine.calls.clear()
        made.to_train()  # training claims its memory by itself, later: the engine's is free by then
        assert engine.calls == ["sleep"]


def test_a_handoff_reports_what_it_costs(hybrid):
    made, _ = hybrid
    first = made.to_rollout(0)
    made.to_train()
    second = made.to_rollout(1)
    assert [m["handoff/bytes_moved"] for m in (first, second)] == [0, 0]
    assert first["handoff/bytes_aliased"] == PLAN.bytes_aliased
    assert [m["handoff/count"] for m in (first, second)] == [1, 2]
    assert all(0 <= m["handoff/seconds"] < 1 for m in (first, second))
    assert (second["memory/train_weights"], second["memory/rollout_weights"]) == (99, 0)
    assert (second["memory/rollout_peak"], second["memory/train_peak"]) == (20, 30)
    assert made.memory.ended == [5, 5, 5]


def test_the_self_test_hands_over_twice_and_compares_the_text(hybrid):
    made, engine = hybrid
    engine.calls.clear()
    made.transfer.run = lambda: (engine.own_weights["own"].zero_(), RecordingTransfer.run(made.transfer))[1]
    self_test(made, lambda: engine.calls.append("text") or [[1], [2]])
    there = ["wait", "release training", "wake weights", "move", "wake cache", "serve", "check", "text", "sleep"]
    assert engine.calls == ["manifest", "release training", "wake weights", *there, *there]
    assert (made.phase, made.handoffs) == ("train", 0)
    assert made.to_rollout(0)["handoff/count"] == 1


def test_the_self_test_names_weights_that_no_handoff_writes(hybrid):
    with pytest.raises(RunError, match=r"these rollout weights are NaN after a handoff: own$"):
        self_test(hybrid[0], lambda: [])


def test_the_self_test_refuses_text_that_a_sleep_changes(hybrid):
    made, engine = hybrid
    engine.own_weights = {}
    texts = iter([[[1], [2], [3]], [[1], [5], [3]]])
    with pytest.raises(RunError, match="1 of 3 greedy texts are others after the engine's sleep"):
        self_test(made, lambda: next(texts))


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


@pytest.mark.parametrize("step", ["wake weights", "wake cache", "serve"])
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
    assert found["memory/rollout_weights"] == MOVING.bytes_moved


def test_a_transfer_that_fails_or_moves_other_bytes_than_planned_commits_nothing():
    made, engine = make(MOVING)
    made.transfer.broken = True
    with pytest.raises(RuntimeError, match="closed by peer"):
        made.to_rollout(0)
    assert engine.version == -1
    assert "wake cache" not in engine.calls
    made, engine = make(MOVING)
    made.transfer.plan = PLAN
    with pytest.raises(RunError, match="rank 0: 0 bytes were copied and 0 received, the plan says"):
        made.to_rollout(0)
    assert engine.version == -1
