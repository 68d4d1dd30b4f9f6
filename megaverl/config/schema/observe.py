"""Keys of `observe`: how a run is watched."""

from __future__ import annotations

from pydantic import Field

from megaverl.config.schema.base import Section


class ObserveConfig(Section):
    health_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of the driver's HTTP endpoint with /healthz (JSON) and /metrics (Prometheus); 0 takes a free one and says which, none is opened when not set.",
    )
    health_host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address that the endpoint listens on; it has no password, so others than 127.0.0.1 are for closed networks.",
    )
    progress: bool = Field(
        True, description="Show a progress bar below the lines on a terminal; in a pipe there are lines alone."
    )
