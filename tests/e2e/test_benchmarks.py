"""The benchmarks run as their users run them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(script: str, *words: str) -> dict:
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}.py", *words, "--json"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stderr  # 1 is a limit that a busy machine may miss
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("recipe", "phases"),
    [("grpo_tiny", {"gen", "reward", "ref", "update_actor", "update_weights"}), ("sft_tiny", {"update_actor"})],
)
def test_throughput_accounts_for_the_whole_step_and_every_process(recipe, phases):
    found = run("throughput", f"configs/yaml/{recipe}.yaml", "data.train_batch_size=8", "--tiny", "--steps", "3")
    assert found["ok"]
    assert found["steps"] == 3
    assert phases <= found["phases"].keys()
    assert all(seconds >= 0 for seconds in found["phases"].values())
    assert sum(found["phases"].values()) == pytest.approx(found["seconds_per_step"], rel=0.2)  # medians do not add up
    expected = found["tokens_per_step"] / found["seconds_per_step"] / 2
    assert found["tokens_per_second_per_worker"] == pytest.approx(expected, rel=0.5)
    assert {"worker 0", "worker 1", "driver", "ray raylet"} <= {m["name"] for m in found["memory"]}
    assert found["machine"]["versions"]["ray"]


def test_overhead_is_what_is_missing_to_the_work_of_the_workers():
    words = ["--part", "step", "--tp", "2", "--batch", "4", "--steps", "3"]
    (found,) = run("overhead", *words)["step"]
    assert 0 < found["share"] <= found["strict_share"] < 1
    assert {"timing_s/gen", "timing_s/update_actor"} <= found["work"].keys()
    assert all(seconds > -0.001 for seconds in found["parts"].values())


def test_rollout_and_bare_vllm_answer_the_same_requests():
    (found,) = run("overhead", "--part", "rollout", "--tp", "1", "--models", "tiny", "--rounds", "1")["rollout"]
    assert found["threads"] == {"megaverl": 1, "bare": 1}
    assert found["ratio"] == pytest.approx(found["ratio_by_round"][0])
    assert 0.2 < found["ratio"] < 5


def test_the_soak_follows_driver_workers_and_ray():
    found = run("soak", "--steps", "12", "--override", "data.train_batch_size=4")
    names = {p["name"] for p in found["processes"]}
    assert {"driver", "worker 0", "worker 1", "ray raylet", "ray gcs_server"} <= names
    assert found["ok"] == all(p["flat"] for p in found["processes"])


def test_a_handoff_moves_what_the_plan_says_and_a_fresh_vllm_says_the_same():
    found = run("handoff", "--train", "pp=2", "--rollout", "tp=2", "--handoffs", "3", "--updates", "2", "--rows", "4")
    assert found["moved"] == found["planned"]
    assert found["moved"]["bytes_received"] == found["bytes_received_bound"] > 0
    assert found["parameter_bytes_added_by_vllm"] == 0
    assert found["greedy_equal"] == found["greedy_rows"] == 4
    assert found["texts_differ"]
    assert found["peak_extra"] <= found["planned_peak"]
