"""Where the workers go: which nodes can hold them, and one Ray placement group with a bundle for each node."""

from __future__ import annotations

import socket
from typing import Any

from megaverl.config.schema import ClusterConfig
from megaverl.errors import Problem, UserError


def wanted(config: ClusterConfig, device: str) -> dict[str, int]:
    """What a pool takes of each of its nodes, under Ray's names."""
    count = config.workers_per_node
    return {"GPU": count, "CPU": count} if device == "cuda" else {"CPU": count}


def fitting_nodes(config: ClusterConfig, device: str) -> list[dict[str, Any]]:
    """Ray's entries of the living nodes that are large enough for their workers, were they empty."""
    import ray

    needs = wanted(config, device).items()
    return [n for n in ray.nodes() if n["Alive"] and all(n["Resources"].get(kind, 0) >= c for kind, c in needs)]


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

    fitting = fitting_nodes(config, device)
    if len(fitting) >= config.nodes:
        return
    needs = wanted(config, device)
    offers = {n["NodeManagerAddress"]: n["Resources"] for n in ray.nodes() if n["Alive"]}
    table = ", ".join(
        f"{address}: " + " ".join(f"{found.get(kind, 0):g} {kind}s" for kind in needs)
        for address, found in offers.items()
    )
    each = " and ".join(f"{count} {kind}s" for kind, count in needs.items())
    raise UserError(
        Problem(
            f"wanted {config.nodes} node(s) with {each} each, "
            f"the cluster has {len(fitting)} such node(s) ({table or 'no node'})",
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

    bundle = wanted(config, device)
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
