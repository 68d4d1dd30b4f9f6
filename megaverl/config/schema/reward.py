"""Keys of `reward`: how responses are scored."""

from __future__ import annotations

from pydantic import Field

from megaverl.config.schema.base import Positive, Section


class RewardFunctionConfig(Section):
    path: str | None = Field(
        None, description="Python file with a custom scorer; the registry by data_source when not set."
    )
    name: str = Field("compute_score", description="Name of the scorer in that file.")


class RewardConfig(Section):
    function: RewardFunctionConfig = Field(default_factory=RewardFunctionConfig, description="Custom scorer.")
    workers: Positive = Field(
        2, description="Processes of each worker that run a custom scorer; the built-in ones need none."
    )
    timeout: float = Field(
        30.0,
        gt=0,
        description="Seconds that a custom scorer has for one response; then it scores 0 and counts in reward/timeouts.",
    )
