"""The arithmetic of the benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.common import MIB, ProcessMemory, median_of, process_memory, slowest
from benchmarks.handoff import SECONDS, rows_of
from benchmarks.overhead import take_apart
from benchmarks.soak import BASE_STEP, drifts, rises, summary
from benchmarks.throughput import markdown, summarise


def test_medians_and_the_slowest_count_what_is_missing_as_zero():
    assert median_of([{"a": 1.0}, {"a": 3.0, "b": 4.0}, {"a": 2.0}]) == {"a": 2.0, "b": 0.0}
    assert slowest([{"a": 1.0, "b": 5.0}, {"a": 2.0}]) == {"a": 2.0, "b": 5.0}


def _step(seconds: float, work: list[dict[str, float]], **phases: float) -> dict[str, object]:
    timing = {f"timing_s/{name}": value for name, value in phases.items()}
    return {"seconds": seconds, "probe": work, "perf/total_num_tokens": 100, **timing}


def test_a_step_taken_apart_is_work_and_overhead():
    work = [{"timing_s/gen": 6.0, "timing_s/ref": 2.0}, {"timing_s/gen": 5.0, "timing_s/ref": 3.0}]
    found = take_apart([_step(12.0, work, step=11.0, gen=7.0, ref=3.5)])
    assert found["work"] == {"timing_s/gen": 6.0, "timing_s/ref": 3.0}
    assert found["overhead"] == pytest.approx(3.0)
    assert found["share"] == pytest.approx(3 / 12)
    assert found["strict_share"] == pytest.approx((12 - 5 - 2) / 12)
    assert found["parts"] == pytest.approx(
        {"timing_s/gen": 1.0, "timing_s/ref": 0.5, "between phases": 0.5, "logging": 1.0}
    )
    assert sum(found["parts"].values()) == pytest.approx(found["overhead"])


def test_throughput_is_per_worker_and_its_phases_make_the_step():
    found = summarise([_step(2.0, [], step=1.75, gen=1.0, update_actor=0.5)], world=4)
    assert found["tokens_per_second_per_worker"] == 100 / 2 / 4
    assert found["phases"] == {"gen": 1.0, "update_actor": 0.5, "other": 0.5}
    assert found["shares"] == {"gen": 0.5, "update_actor": 0.25, "other": 0.25}


@pytest.mark.parametrize(("device", "peak"), [("cpu", "2.00 GiB"), ("cuda", "2.00 GiB, GPU 3.00 GiB")])
def test_the_row_to_paste_fits_its_head(device, peak):
    gpu = 3 * 2**30 if device == "cuda" else None
    numbers = {
        "config": "configs/yaml/grpo_tiny.yaml",
        "overrides": ["rollout.n=4"],
        "layout": "tp2-pp1-dp1",
        "device": device,
        "model": "qwen2",
        "batch": "16 prompts",
        **summarise([_step(2.0, [], step=2.0, ref=0.005, gen=1.0)], world=2),
        "memory": [
            {"name": "driver", "peak": 9 * 2**30, "gpu_peak": None},
            {"name": "worker 0", "peak": 2 * 2**30, "gpu_peak": gpu},
        ],
    }
    head, rule, row = markdown(numbers)
    assert head.count("|") == rule.count("|") == row.count("|")
    assert row.startswith("| `grpo_tiny.yaml` `rollout.n=4` (qwen2; 16 prompts) | tp2-pp1-dp1 |")
    assert row.endswith(f"| gen 50%, other 50% | {peak} |")


def _samples(**mib: list[float]) -> list[list[ProcessMemory]]:
    """By process name: MiB at step 10, half way, at the most, at the end."""
    steps = []
    for step in range(1, BASE_STEP + 31):
        at = 0 if step <= BASE_STEP else 3 if step == BASE_STEP + 30 else 2 if step == BASE_STEP + 20 else 1
        sizes = {name: int(values[at] * MIB) for name, values in mib.items()}
        steps.append([ProcessMemory(pid, name, size, size) for pid, (name, size) in enumerate(sizes.items())])
    return steps


def test_a_process_is_flat_when_its_most_is_within_two_percent():
    found = drifts(_samples(driver=[500, 505, 509, 506], worker=[1000, 1010, 1030, 1000]))
    driver, worker = found
    assert driver["flat"]
    assert driver["drift"] == pytest.approx(0.012)
    assert driver["growth"] == pytest.approx(0.018)
    assert driver["second_half"] == pytest.approx(506 / 505 - 1, rel=1e-3)
    assert not worker["flat"]  # it came back, and had grown
    assert summary(found) == "within 2%: all but worker (+3.0%)"


def test_processes_that_come_or_go_are_not_compared():
    samples = _samples(driver=[500, 500, 500, 500])
    samples[0].append(ProcessMemory(7, "gone", MIB, MIB))
    samples[-1].append(ProcessMemory(8, "new", MIB, MIB))
    assert [f["name"] for f in drifts(samples)] == ["driver"]


def test_memory_of_this_process_and_of_those_below_it():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        found = {p.pid: p for p in process_memory([child.pid])}
        assert found[os.getpid()].name == "driver"
        assert found[child.pid].name == "worker 0"
        assert all(0 < p.resident <= p.peak for p in found.values())
    finally:
        child.communicate(b"\n")


def _handoff(**more):
    """The numbers of a handoff between equal layouts on a GPU, all within their limits."""
    seconds = dict.fromkeys(SECONDS, 0.001)
    found = {
        "device": "cuda",
        "moved": {"bytes_aliased": 1000 * MIB, "bytes_copied": 0, "bytes_received": 0},
        "planned": {"bytes_aliased": 1000 * MIB, "bytes_copied": 0, "bytes_received": 0},
        "bytes_received_bound": 0,
        "handoffs": 2,
        "seconds": seconds,
        "seconds_all": {name: [value, value] for name, value in seconds.items()},
        "peak_extra": 0,
        "planned_peak": 0,
        "parameter_bytes_added_by_vllm": 0,
        "bandwidth_share": None,
        "rollout_bytes": 1000 * MIB,
        "device_added": 310 * MIB,
        "device_added_plain": 1300 * MIB,
        "busy": {"seconds": 0.0022, "launches": 315},
        "busy_plain": {"seconds": 0.0022, "launches": 315},
        "busy_ratio": 1.0,
        "greedy_equal": 4,
        "greedy_rows": 4,
        "texts_differ": True,
        "growth_per_10": 0,
    }
    return found | more


def test_a_handoff_within_all_limits_misses_none():
    assert [row.what for row in rows_of(_handoff()) if not row.met] == []
    assert len([row for row in rows_of(_handoff()) if row.within]) == 12


@pytest.mark.parametrize(
    ("what", "changed"),
    [
        ("bytes copied", {"moved": {"bytes_aliased": 1000 * MIB, "bytes_copied": 8, "bytes_received": 0}}),
        ("handover, median of 2", {"seconds": dict.fromkeys(SECONDS, 0.0051)}),
        ("parameter storage of vLLM's own", {"parameter_bytes_added_by_vllm": 4}),
        ("second copy of the weights", {"device_added": 1300 * MIB}),
        ("GPU busy, ratio to plain vLLM", {"busy_ratio": 1.03}),
        ("resident growth per 10 handoffs, most", {"growth_per_10": 3 * MIB}),
        ("greedy rows equal to a fresh vLLM's", {"greedy_equal": 3}),
        ("text changes with every update", {"texts_differ": False}),
        ("extra memory, peak", {"peak_extra": 900 * MIB}),
    ],
)
def test_a_handoff_beyond_a_limit_names_it(what, changed):
    assert [row.what for row in rows_of(_handoff(**changed)) if not row.met] == [what]


def test_counts_that_rise_are_told_from_those_that_settle():
    settles = [{"handles": 10 + min(step, 8), "bytes": 0} for step in range(50)]
    leaks = [{"handles": 10 + step, "bytes": step << 18} for step in range(50)]
    assert all(found["flat"] for found in rises(settles))
    assert not any(found["flat"] for found in rises(leaks))
