"""Custom functions in processes of their own: whatever they do, scoring ends and says what happened."""

import os
import signal
import subprocess
import sys
import time

import pytest

from megaverl.errors import RunError
from megaverl.rewards.custom import CustomFunction
from megaverl.rewards.pool import ScorerPool
from megaverl.rewards.registry import Registry
from megaverl.rewards.scorer import Score, ScoreRequest

FUNCTION = """
import asyncio, os, subprocess, sys, time

def judge(data_source, solution_str, ground_truth, extra_info=None):
    print("a function may print")
    if solution_str == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(ground_truth, "w").write(f"{os.getpid()} {child.pid}")
        while True:
            time.sleep(1)
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "raise":
        raise KeyError("lost")
    if solution_str == "nan":
        return float("nan")
    return {"score": len(solution_str), "pid": os.getpid(), "kind": object}

async def patient(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return 0.5

waiting = 0

async def together(data_source, solution_str, ground_truth, extra_info=None):
    # comes back when as many are awaited as the ground truth says; "late" never does
    global waiting
    waiting += 1
    while waiting < int(ground_truth) or solution_str == "late":
        await asyncio.sleep(0.01)
    if solution_str == "raise":
        raise TimeoutError("its own")
    return {"score": waiting}

def batch(data_sources, solution_strs, ground_truths, extra_infos, scale=1.0):
    if "short" in solution_strs:
        return [0.0]
    return [{"score": len(text) * scale, "of": len(solution_strs)} for text in solution_strs]
"""


@pytest.fixture
def make(tmp_path):
    pools = []

    def build(name="judge", workers=2, timeout=120.0, source=FUNCTION, arguments=(), batch=False):
        file = tmp_path / "reward.py"
        file.write_text(source)
        function = CustomFunction(str(file), name, arguments, batch)
        pools.append(ScorerPool(function, workers, timeout))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


def _requests(*texts, truth=""):
    return [ScoreRequest("mine", text, truth, key=i) for i, text in enumerate(texts)]


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_until_gone(pids):
    deadline = time.monotonic() + 120
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(map(_alive, pids))


def test_scores_come_in_order_from_at_most_the_asked_for_processes_which_stay(make):
    pool = make()
    texts = ["x" * n for n in range(20)]
    scores = pool.score(_requests(*texts))
    assert [score.value for score in scores] == [float(n) for n in range(20)]
    pids = {score.extra["pid"] for score in scores}
    assert 1 <= len(pids) <= 2
    assert os.getpid() not in pids
    assert scores[0].extra["kind"] == "<class 'object'>"
    assert pool.score([]) == []
    again = {score.extra["pid"] for score in pool.score(_requests(*texts))}
    assert len(pids | again) <= 2


def test_an_asynchronous_function_is_awaited(make):
    assert make("patient").score(_requests("a", "b")) == [Score(0.5), Score(0.5)]


@pytest.mark.parametrize(
    ("text", "words"),
    [("raise", "KeyError: 'lost'"), ("exit", "exit code 3"), ("nan", "finite")],
)
def test_a_failure_scores_zero_names_its_row_and_spares_the_others(make, text, words):
    scores = make(workers=1).score(_requests("ab", text, "abc"))
    assert [score.value for score in scores] == [2.0, 0.0, 3.0]
    assert [score.failure for score in scores] == [None, "error", None]
    assert words in scores[1].reason
    assert "reward.py, row 1" in scores[1].reason


def test_case_36_a_score_that_never_comes_is_given_up_and_nothing_is_left_of_it(make, tmp_path):
    """Case 36: the step waited for ever for one result out of many."""
    pids = tmp_path / "pids"
    scores = make(workers=1, timeout=5.0).score(_requests("ab", "hang", "abc", truth=str(pids)))
    assert [score.value for score in scores] == [2.0, 0.0, 3.0]
    assert scores[1].failure == "timeout"
    assert "row 1: no score in 5 s (reward.timeout)" in scores[1].reason
    assert _wait_until_gone([int(pid) for pid in pids.read_text().split()])


def test_processes_end_with_the_pool(make):
    pool = make()
    pids = {score.extra["pid"] for score in pool.score(_requests("a", "b", "c"))}
    pool.close()
    assert _wait_until_gone(pids)


def test_processes_end_when_their_parent_is_killed_even_in_a_function_that_never_returns(make, tmp_path):
    pool, pids = make(), tmp_path / "pids"
    program = (
        "from megaverl.rewards.custom import CustomFunction; from megaverl.rewards.pool import ScorerPool; "
        "from megaverl.rewards.scorer import ScoreRequest; "
        f"ScorerPool(CustomFunction({pool.scorer.path!r}, 'judge'), 1, 600.0)"
        f".score([ScoreRequest('mine', 'hang', {str(pids)!r})])"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    try:
        deadline = time.monotonic() + 120
        while not (pids.exists() and len(pids.read_text().split()) == 2) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert _wait_until_gone([int(pid) for pid in pids.read_text().split()])


def test_a_function_that_cannot_be_loaded_ends_the_run_by_name(make):
    with pytest.raises(RunError, match="no function 'other'"):
        make("other").score(_requests("a"))
    with pytest.raises(RunError, match="exit code 7"):
        make(source="import os\nos._exit(7)\n").score(_requests("a"))


def test_responses_of_an_asynchronous_function_are_awaited_together(make):
    scores = make("together", workers=1).score(_requests("a", "b", "c", truth="3"))
    assert [score.value for score in scores] == [3.0, 3.0, 3.0]


def test_one_of_many_awaited_that_is_late_or_raises_spares_the_others(make):
    scores = make("together", workers=1, timeout=2.0).score(_requests("a", "late", "raise", truth="3"))
    assert [score.failure for score in scores] == [None, "timeout", "error"]
    assert "row 1: no score in 2 s" in scores[1].reason
    assert "TimeoutError: its own" in scores[2].reason


def test_a_batch_function_gets_the_share_of_a_process_and_its_further_arguments(make):
    pool = make("batch", batch=True, arguments=("scale=2.0",))
    scores = pool.score(_requests("a", "bb", "ccc"))
    assert [score.value for score in scores] == [2.0, 4.0, 6.0]
    assert sorted(score.extra["of"] for score in scores) == [1, 2, 2]


def test_a_batch_function_must_give_a_score_for_each(make):
    scores = make("batch", workers=1, batch=True).score(_requests("short", "bb"))
    assert [score.failure for score in scores] == ["error", "error"]
    assert "1 scores came back for 2 responses" in scores[1].reason


def test_formulas_are_compared_in_a_process(make):
    pool = ScorerPool(Registry(), 1, 120.0)
    try:
        requests = [ScoreRequest("lighteval/MATH", r"\boxed{0.5}", "1/2", key=0), ScoreRequest("none", "2", "2", key=1)]
        scores = pool.score(requests)
    finally:
        pool.close()
    assert [score.value for score in scores] == [1.0, 0.0]
    assert scores[1].failure == "error"
    assert "scorer of none, row 1" in scores[1].reason
