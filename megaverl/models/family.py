"""Which families are known, and the shape and weight map of a Hugging Face checkpoint. Pure.

A new family is a `Family` value in `megaverl.models.families` and one entry in `FAMILIES`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaverl.errors import Problem, Problems, UserError
from megaverl.models.families.decoder import EXPERT_KEYS, Family
from megaverl.models.families.llama import LLAMA
from megaverl.models.families.qwen2 import QWEN2
from megaverl.models.families.qwen3 import QWEN3
from megaverl.models.shape import ModelShape
from megaverl.models.weight_map import WeightMap

FAMILIES: tuple[Family, ...] = (QWEN2, QWEN3, LLAMA)


def known_architectures() -> tuple[str, ...]:
    """Every value of ``architectures`` that is taken."""
    return tuple(a for family in FAMILIES for a in family.architectures)


def load_shape(path: Path | str) -> ModelShape:
    """The shape of the checkpoint in folder ``path``, from its config.json.

    Raises:
        UserError: no readable config.json, an unknown architecture, or all keys that are wrong or unsupported.
    """
    file = Path(path) / "config.json"
    config = read_config(file)
    return shape_from_config(config, where=str(file))


def shape_from_config(config: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """The shape that a parsed config.json describes. Raises UserError as `load_shape` does."""
    problems = Problems()
    family = _find_family(config, where, problems)
    shape = family.shape_from_config(config, where, problems) if family else None
    problems.raise_if_any()
    if shape is None:
        raise RuntimeError("a family gave no shape and no reason")
    return shape


def weight_map(shape: ModelShape) -> WeightMap:
    """The table of names of a model of this shape. Raises KeyError for a family that is not registered."""
    return WeightMap(shape, _family_of(shape).rows(shape))


def recomputed_tensors(shape: ModelShape) -> tuple[str, ...]:
    """Names of the tensors that a checkpoint may carry although its config.json says what is in them."""
    patterns = _family_of(shape).recomputed
    return tuple(name.replace("{i}", str(i)) for name in patterns for i in range(shape.layers))


def _family_of(shape: ModelShape) -> Family:
    return {f.name: f for f in FAMILIES}[shape.family]


def read_config(file: Path) -> dict[str, Any]:
    """A parsed config.json. Raises UserError when there is none or it holds no JSON object."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            Problem(
                "there is no such file" if file.parent.is_dir() else "there is no such folder",
                where=str(file) if file.parent.is_dir() else str(file.parent),
                fix="model.path must be the folder of a Hugging Face checkpoint: config.json, safetensors, tokenizer",
            )
        ) from None
    except (OSError, ValueError) as error:  # ValueError: not JSON, or not UTF-8
        raise UserError(
            Problem(
                f"cannot be read: {error}",
                where=str(file),
                fix="compare the folder with the one it was downloaded or saved from, and fetch it again",
            )
        ) from error
    if not isinstance(config, dict):
        raise UserError(
            Problem(
                "must hold a JSON object",
                where=str(file),
                fix="compare the folder with the one it was downloaded or saved from, and fetch it again",
            )
        )
    return config


def _find_family(config: Mapping[str, Any], where: str, problems: Problems) -> Family | None:
    architectures = config.get("architectures")
    model_type = config.get("model_type")
    if architectures:
        named = [architectures] if isinstance(architectures, str) else list(architectures)
        key = "architectures"
        found = [f for f in FAMILIES if any(a in f.architectures for a in named)]
    else:
        named, key = [model_type], "model_type"
        found = [f for f in FAMILIES if model_type in f.model_types]
    if found and len(named) == 1:
        return found[0]
    text = ", ".join(map(str, named))
    known = ", ".join(known_architectures())
    if any("moe" in str(name).lower() for name in named) or any(config.get(key) for key in EXPERT_KEYS):
        what = f"mixture-of-experts architecture {text} is not supported"
    elif named == [None]:
        what = "neither architectures nor model_type says what the model is"
    else:
        what = f"architecture {text} is not known"
    problems.add(what, where=f"{where}, key {key}", fix=f"known architectures: {known}")
    return None
