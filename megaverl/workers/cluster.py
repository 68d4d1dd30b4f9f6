"""Ray: attach to a cluster or start a local one, check what it offers, and place the workers."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path
from typing import Any

from megaverl.config.schema import ClusterConfig
from megaverl.errors import Problem, RunError, UserError

# Read by libraries when they are first imported, so they are set before the worker process starts.
WORKER_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron orders its communication by it on Ampere and Hopper
    "HF_HUB_OFFLINE": "1",  # everything is read from the folders that the configuration names
}


# Ray's services would keep what they have freed, and their resident memory would creep up for minutes. They run on the
# jemalloc that Ray brings along: it gives freed pages back at once. Only for a Ray that this process starts.
SERVICES_MALLOC = {
    "RAY_JEMALLOC_PROFILE": "raylet,gcs_server",
    "RAY_JEMALLOC_CONF": "dirty_decay_ms:0,muzzy_decay_ms:0,narenas:1,tcache:false",
}


def attach(config: ClusterConfig) -> None:
    """Connects to the cluster of ``cluster.address`` or ``RAY_ADDRESS``, else starts Ray on this machine.

    Does nothing when this process is connected already.
    """
    import ray

    if ray.is_initialized():
        return
    address = config.address or os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        _join(address, quiet)
        return
    try:
        _start(config, quiet)
    except Exception as error:  # Ray raises plain exceptions, such as for a start that takes too long
        raise RunError(
            f"Ray could not be started on this machine: {error}\n"
            "    -> try again when the machine is less busy, or 'ray start --head' and set RAY_ADDRESS=auto"
        ) from error


def _start(config: ClusterConfig, options: dict[str, Any]) -> None:
    import ray

    for name, value in SERVICES_MALLOC.items():
        os.environ.setdefault(name, value)
    if not _home_takes_token():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    ray.init(
        address="local",  # never a cluster that somebody left running on this machine
        # A laptop may have fewer cores than workers; they then share cores, which only costs time.
        num_cpus=max(config.workers_per_node, os.cpu_count() or 1),
        object_store_memory=int(config.object_store_gb * 2**30),
        include_dashboard=False,
        **options,
    )


def _home_takes_token() -> bool:
    """Ray has a place for the token with which its processes know each other: what its variables say, or the home."""
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return True
    try:
        folder = Path.home()
    except RuntimeError:  # a bare user id of a container
        return False
    inner = folder / ".ray"
    return (inner / "auth_token").is_file() or os.access(inner if inner.exists() else folder, os.W_OK)


def _join(address: str, options: dict[str, Any]) -> None:
    import ray

    try:
        ray.init(address=address, **options)
    except ConnectionError as error:
        raise UserError(
            Problem(
                f"no Ray cluster answers at {address}: {error}",
                where="cluster.address" if os.environ.get("RAY_ADDRESS") != address else "RAY_ADDRESS",
                fix="start one with 'ray start --head', or leave the address out for a local one",
            )
        ) from error


def choose_device(config: ClusterConfig) -> str:
    """``cuda`` or ``cpu`` for the workers, from ``cluster.device``; ``auto`` takes GPUs if Ray has any.

    With some GPUs but too few, `check_resources` refuses: a run meant for GPUs never ends up on CPUs unasked.
    """
    if config.device != "auto":
        return config.device
    import ray

    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"


def check_resources(config: ClusterConfig, device: str) -> None:
    """Refuses a pool that the cluster could not hold even if it were empty, saying wanted against available.

    Raises:
        UserError: too few nodes, or too few nodes with enough GPUs or CPUs.
    """
    import ray

    kind = "GPU" if device == "cuda" else "CPU"
    nodes = [n for n in ray.nodes() if n["Alive"]]
    offers = {n["NodeManagerAddress"]: n["Resources"].get(kind, 0) for n in nodes}
    fitting = [address for address, count in offers.items() if count >= config.workers_per_node]
    if len(fitting) >= config.nodes:
        return
    table = ", ".join(f"{address}: {count:g}" for address, count in offers.items())
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
