"""What an algorithm sets in other sections unless the configuration says otherwise: the paper's own choices."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "dr_grpo": {"actor.loss_aggregation": "seq-mean-token-sum-norm"},
    "gspo": {
        "actor.policy_loss": "gspo",
        "actor.clip_ratio_low": 3e-4,
        "actor.clip_ratio_high": 4e-4,
        "actor.loss_aggregation": "seq-mean-token-mean",
    },
    "dapo": {"actor.clip_ratio_high": 0.28, "algorithm.dynamic_sampling": True},
    "cispo": {"actor.policy_loss": "cispo", "actor.clip_ratio_low": 1.0},
}


def with_presets(values: dict[str, Any]) -> dict[str, Any]:
    """Nested values of a configuration with those of its algorithm added where there are none."""
    algorithm = values.get("algorithm")
    name = algorithm.get("name") if isinstance(algorithm, dict) else getattr(algorithm, "name", None)
    filled = dict(values)
    for key, value in PRESETS.get(name, {}).items() if isinstance(name, str) else ():
        section, field = key.split(".")
        own = filled.setdefault(section, {})
        if isinstance(own, dict):
            filled[section] = {field: value, **own}
    return filled
