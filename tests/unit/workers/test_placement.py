"""Wanted against available, on Ray's own description of nodes."""

from __future__ import annotations

import pytest

from megaverl.config.load import load_config
from megaverl.errors import UserError
from megaverl.workers.placement import check_resources, fitting_nodes


def node(address: str, alive: bool = True, **resources: float) -> dict:
    return {"NodeManagerAddress": address, "Alive": alive, "Resources": resources}


@pytest.fixture
def nodes(monkeypatch):
    found = [
        node("10.0.0.1", GPU=8, CPU=64), node("10.0.0.2", GPU=8, CPU=4), node("10.0.0.3", CPU=64),
        node("10.0.0.4", alive=False, GPU=8, CPU=64),
    ]  # fmt: skip
    monkeypatch.setattr("ray.nodes", lambda: found)


def cluster(nodes: int, workers: int):
    return load_config(None, [f"cluster.nodes={nodes}", f"cluster.workers_per_node={workers}"]).cluster


def test_a_node_needs_gpus_and_a_cpu_for_each_and_must_be_alive(nodes):
    assert [n["NodeManagerAddress"] for n in fitting_nodes(cluster(1, 8), "cuda")] == ["10.0.0.1"]
    assert [n["NodeManagerAddress"] for n in fitting_nodes(cluster(1, 4), "cuda")] == ["10.0.0.1", "10.0.0.2"]
    assert [n["NodeManagerAddress"] for n in fitting_nodes(cluster(1, 8), "cpu")] == ["10.0.0.1", "10.0.0.3"]
    check_resources(cluster(2, 8), "cpu")


def test_too_much_is_refused_with_what_was_wanted_and_what_there_is(nodes):
    with pytest.raises(UserError) as caught:
        check_resources(cluster(2, 8), "cuda")
    text = str(caught.value)
    assert "wanted 2 node(s) with 8 GPUs and 8 CPUs each, the cluster has 1 such node(s)" in text
    assert "10.0.0.2: 8 GPUs 4 CPUs, 10.0.0.3: 0 GPUs 64 CPUs" in text
    assert "10.0.0.4" not in text
