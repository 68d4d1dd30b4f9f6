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
