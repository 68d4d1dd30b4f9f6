"""Where the workers go: which nodes can hold them, and one Ray placement group with a bundle for each node."""

from __future__ import annotations

import socket
from typing import Any

from megaverl.config.schema import ClusterConfig
from megaverl.errors import Problem, UserError


def resource(device: str) -> str:
    """Ray's name for what a worker takes one of."""
    return "GPU" if device == "cuda" else "CPU"


def fitting_nodes(config: ClusterConfig, device: str) -> list[dict[str, Any]]:
    """Ray's entries of the living nodes that are large enough for their workers, were they empty."""
    import ray

    kind = resource(device)
    return [n for n in ray.nodes() if n["Alive"] and n["Resources"].get(kind, 0) >= config.workers_per_node]


def answers(node: dict[str, Any]) -> bool:
    """Whether the node's raylet can be reached; Ray itself takes half a minute to count out a node that is gone."""
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=2.0).close()
    except OSError:
        return False
    return True


def check_resources(config: ClusterConfig, device: str) -> None:
    """Refuses a pool that the cluster could not hold even if it were empty, saying wanted against available.

    Raises:
        UserError: too few nodes, or too few nodes with enough GPUs or CPUs.
    """
    import ray

    kind, fitting = resource(device), fitting_nodes(config, device)
    if len(fitting) >= config.nodes:
        return
    offers = [(n["NodeManagerAddress"], n["Resources"].get(kind, 0)) for n in ray.nodes() if n["Alive"]]
    table = ", ".join(f"{address}: {count:g}" for address, count in offers)
    raise UserError(
        Problem(
            f"wanted {config.nodes} node(s) with {config.workers_per_node} {kind}s each, "
            f"the cluster has {len(fitting)} such node(s) ({kind}s per node: {table or 'none'})",
            where="cluster.nodes, cluster.workers_per_node",
            fix="ask for fewer workers, add nodes with 'ray start --address=...', or set cluster.device=cpu",
        )
    )


def place(config: ClusterConfig, device: str):
    """Reserves one bundle per node with room for its workers; returns the placement group.

    So ranks are numbered node by node, and TP neighbours share a node.

    Raises:
        UserError: the bundles did not become free within ``cluster.start_timeout``.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    count = config.workers_per_node
    bundle = {"GPU": count, "CPU": count} if device == "cuda" else {"CPU": count}
    group = placement_group([bundle] * config.nodes, strategy="STRICT_SPREAD")
    if not group.wait(timeout_seconds=config.start_timeout):
        remove_placement_group(group)
        raise UserError(
            Problem(
                f"the cluster did not free {config.nodes} x {bundle} within {config.start_timeout:g} s",
                where="cluster",
                fix="another job may hold them ('ray status' shows it); wait, or raise cluster.start_timeout",
            )
        )
    return group
