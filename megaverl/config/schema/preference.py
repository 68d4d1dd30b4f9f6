"""Keys of `algorithm.preference`: training on answers that are preferred to others."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megaverl.config.schema.base import Section


class PreferenceConfig(Section):
    loss: Literal["sigmoid", "ipo", "robust"] = Field(
        "sigmoid",
        description="Loss of dpo: sigmoid (arXiv 2305.18290; conservative with label_smoothing above 0), ipo (arXiv 2310.12036) or robust (arXiv 2403.00409).",
    )
    beta: float = Field(
        0.1, gt=0, description="How strongly dpo and kto hold the policy to the reference model; for ipo its tau."
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="Share of pairs that are taken to be labelled the wrong way round (rm; dpo with sigmoid or robust).",
    )
    center_rewards: float = Field(
        0.0, ge=0, description="Weight of the squared sum of a pair's two rewards, which holds them near 0 (rm)."
    )
    desirable_weight: float = Field(1.0, ge=0, description="Weight of the wanted answers (kto).")
    undesirable_weight: float = Field(1.0, ge=0, description="Weight of the unwanted answers (kto).")
