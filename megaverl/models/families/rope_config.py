"""How config.json writes the rotary embedding: ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``. Pure.

transformers 5 writes the first form. Both become a base and a `RopeScaling`, so that nothing else has to know them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaverl.errors import Problems
from megaverl.models.shape import RopeScaling

TYPE_KEYS = {"rope_type", "type", "rope_theta"}
YARN_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
KEYS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor", "original_max_position_embeddings", "truncate", *YARN_OPTIONS},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
}
"""Keys that each supported type may have besides `TYPE_KEYS`."""
FIX = "take a checkpoint without rope scaling, or remove the entry if the longer context is not needed"


def read_rope(
    config: Mapping[str, Any], default_theta: float, where: str, problems: Problems
) -> tuple[float, RopeScaling | None]:
    """The rotary base and its scaling (None: plain). What is wrong or unsupported goes to ``problems``.

    Args:
        default_theta: what an absent base means.
        where: the file, for the messages.
    """
    theta = _positive(config, "rope_theta", f"{where}, key rope_theta", problems)
    scalings: list[RopeScaling | None] = []
    for key in ("rope_parameters", "rope_scaling"):
        entry = config.get(key)
        if entry is None:
            continue
        at = f"{where}, key {key}"
        if not isinstance(entry, Mapping):
            problems.add(
                f"must be a mapping or null, got {entry!r}",
                where=at,
                fix="write the value that the model was trained with (its author's config.json has it)",
            )
            continue
        scalings.append(_scaling(entry, config, at, problems))
        inner = _positive(entry, "rope_theta", at, problems)
        if inner is not None and theta is not None and theta != inner:
            problems.add(
                f"rope_theta is {inner} here and {theta} in another place of the file",
                where=at,
                fix="leave one of the two values, the one that the model was trained with",
            )
        theta = inner or theta
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        problems.add("rope_parameters and rope_scaling do not say the same", where=where, fix="remove one of them")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        problems.add(
            "rotating a part of each head is not supported",
            where=f"{where}, key partial_rotary_factor",
            fix="this shape is not supported; take a model whose config.json has another value",
        )
    return theta or default_theta, scalings[0] if scalings else None


def _scaling(entry: Mapping[str, Any], config: Mapping[str, Any], where: str, problems: Problems) -> RopeScaling | None:
    kind = entry.get("rope_type", entry.get("type", "default"))
    if not isinstance(kind, str) or kind not in KEYS:
        problems.add(f"rope scaling {kind!r} is not supported; {', '.join(KEYS)} are", where=where, fix=FIX)
        return None
    present = {key for key, value in entry.items() if value is not None}
    unknown = sorted(present - TYPE_KEYS - KEYS[kind])
    if unknown:
        problems.add(f"rope scaling {kind!r} with {', '.join(unknown)} is not supported", where=where, fix=FIX)
    if kind == "default":
        return None
    before = len(problems.found)
    needed = {"linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",)}.get(
        kind, ("factor", "low_freq_factor", "high_freq_factor")
    )
    numbers = {key: _positive(entry, key, where, problems) for key in (*needed, *YARN_OPTIONS) if key in KEYS[kind]}
    for key in needed:
        if key not in present:
            problems.add(
                f"rope scaling {kind!r} without {key}",
                where=where,
                fix="write the value that the model was trained with (its author's config.json has it)",
            )
    if "factor" in present and numbers["factor"] is not None and numbers["factor"] < 1:
        problems.add(
            f"factor must be at least 1, got {numbers['factor']}",
            where=where,
            fix="write the value that the model was trained with (its author's config.json has it)",
        )
    truncate = entry.get("truncate", True)
    if not isinstance(truncate, bool):
        problems.add(
            f"truncate must be true or false, got {truncate!r}",
            where=where,
            fix="write the value that the model was trained with (its author's config.json has it)",
        )
    original = None
    if "original_max_position_embeddings" in KEYS[kind]:
        # Absent, it is the configured context: that of a checkpoint whose context was not raised.
        original = entry.get("original_max_position_embeddings") or config.get("max_position_embeddings")
        if type(original) is not int or original < 1:
            problems.add(
                f"original_max_position_embeddings must be a whole number of at least 1, got {original!r}",
                where=where,
                fix="write the value that the model was trained with (its author's config.json has it)",
            )
    low, high = numbers.get("low_freq_factor"), numbers.get("high_freq_factor")
    if low is not None and high is not None and high <= low:
        problems.add(
            f"high_freq_factor {high} must be above low_freq_factor {low}",
            where=where,
            fix="write the value that the model was trained with (its author's config.json has it)",
        )
    if len(problems.found) > before:
        return None
    given = {key: value for key, value in numbers.items() if value is not None}
    return RopeScaling(type=kind, original_max_positions=original, truncate=truncate, **given)


def _positive(entry: Mapping[str, Any], key: str, where: str, problems: Problems) -> float | None:
    value = entry.get(key)
    if value is None:
        return None
    if type(value) not in (int, float) or not value > 0:
        problems.add(
            f"{key} must be a number above 0, got {value!r}",
            where=where,
            fix="write the value that the model was trained with (its author's config.json has it)",
        )
        return None
    return float(value)
