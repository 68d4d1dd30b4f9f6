"""Keys of `reward`: how responses are scored."""

from __future__ import annotations

from pydantic import Field

from megaverl.config.schema.base import Section


class RewardFunctionConfig(Section):
    path: str | None = Field(
        None, description="Python file with a custom scorer; the registry by data_source when not set."
    )
    name: str = Field("compute_score", description="Name of the scorer in that file.")


class RewardConfig(Section):
    function: RewardFunctionConfig = Field(default_factory=RewardFunctionConfig, description="Custom scorer.")
