"""Keys of `cluster`: where the workers run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megaverl.config.schema.base import Positive, Section


class ClusterConfig(Section):
    address: str | None = Field(None, description="Ray cluster to attach to; RAY_ADDRESS or a local one when not set.")
    nodes: Positive = Field(1, description="Nodes to use.")
    workers_per_node: Positive = Field(1, description="Workers (GPUs, or CPU processes) per node.")
    device: Literal["auto", "cuda", "cpu"] = Field(
        "auto", description="Where the workers run; auto takes GPUs when Ray has enough of them."
    )
    threads_per_worker: Positive = Field(1, description="Torch threads of a CPU worker.")
    object_store_gb: float = Field(1.0, gt=0, description="Object store of a local Ray, in GiB.")
    start_timeout: float = Field(300.0, gt=0, description="Seconds until all workers must be up.")
    phase_timeout: float = Field(
        3600.0,
        gt=0,
        description="Seconds that one phase of a step may take; workers that have not finished are named then, and the run ends.",
    )
    heartbeat_timeout: float | None = Field(
        20.0,
        ge=5,
        description="Seconds without a sign of life after which a worker that is waited for counts as lost; never when not set.",
    )
