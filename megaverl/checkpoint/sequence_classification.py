"""Import and export of reward models: Hugging Face sequence classifications with one label.

A reward model starts from such a checkpoint, or from a causal language model: its output layer is left where it is, and
the score head starts at zero.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaverl.checkpoint.hf_export import ModelRanks, export_hf
from megaverl.checkpoint.hf_files import read_headers
from megaverl.checkpoint.hf_import import check_tensors, load_hf, match_params
from megaverl.checkpoint.hf_writer import MAX_SHARD_BYTES
from megaverl.errors import Problem, Problems, UserError
from megaverl.models.critic_map import (
    HEAD_BIAS,
    HEAD_WEIGHT,
    CriticSource,
    critic_map,
    critic_source,
    sequence_classification_config,
)
from megaverl.models.shape import ModelShape


def reward_source(path: Path | str, *, trained: bool) -> CriticSource:
    """What the checkpoint in folder ``path`` must hold.

    Args:
        trained: a language model, which has no score head yet, is refused.

    Raises:
        UserError: as `critic_map.critic_source`; or a token classification; or a head is missing.
    """
    source = critic_source(path)
    if HEAD_BIAS in source.tensors.hf_names():
        what = "a token classification, and a reward model is a sequence classification"
    elif trained and not source.has_head:
        what = "a language model, which scores nothing"
    else:
        return source
    fix = "name a sequence classification with one label, such as algorithm.name=rm exports"
    raise UserError(Problem(what, where=f"{path}/config.json, key architectures", fix=fix))


def check_reward_checkpoint(path: Path | str, problems: Problems, *, trained: bool) -> ModelShape | None:
    """Checks config.json and the tensors' headers of a checkpoint for a reward model; reads no weights.

    Args:
        trained: see `reward_source`.

    Returns:
        The shape of its body; None when it cannot be known.
    """
    folder = Path(path)
    try:
        source = reward_source(folder, trained=trained)
    except UserError as error:
        problems.extend(error)
        return None
    before = len(problems.found)
    found = read_headers(folder, problems)
    if len(problems.found) == before:
        check_tensors(source.tensors, found, folder, problems)
    return source.shape


def load_reward_model(
    path: Path | str, params: Mapping[str, Tensor], *, tp: int, tp_rank: int, whole_model: bool = True
) -> None:
    """Fills a reward model's ``params`` with this rank's share of the checkpoint in folder ``path``.

    A head that a language model does not bring is set to zero; every other parameter is written completely.

    Args:
        params: the rank's parameters by Megatron name with global layer numbers.
        whole_model: ``params`` is the whole model; False for one pipeline stage of it.

    Raises:
        UserError: as `hf_import.load_hf` and `reward_source`.
    """
    source, problems = reward_source(path, trained=False), Problems()
    match_params(critic_map(source.shape, bias=False), params, tp, problems, whole_model=whole_model)
    problems.raise_if_any()
    brought = source.tensors.by_megatron_name()
    held = {name: param for name, param in params.items() if name in brought}
    load_hf(path, source.tensors, held, tp=tp, tp_rank=tp_rank, whole_model=False)  # an output layer has no place here
    with torch.no_grad():
        for name in params.keys() - held.keys():
            params[name].zero_()


def export_reward_model(
    params: Mapping[str, Tensor],
    shape: ModelShape,
    out: Path | str,
    ranks: ModelRanks,
    *,
    source: Path | str,
    tokenizer: Path | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a reward model as a sequence classification with one label; `hf_export.export_hf` says the rest.

    A head that ``source`` did not have is written in float32.

    Args:
        source: folder of the checkpoint that the reward model started from.
    """
    export_hf(
        params,
        critic_map(shape, bias=False),
        out,
        ranks,
        source=source,
        tokenizer=tokenizer,
        max_shard_bytes=max_shard_bytes,
        **reward_export_options(shape, tokenizer or source),
    )


def reward_export_options(shape: ModelShape, tokenizer: Path | str) -> dict[str, Any]:
    """How the export of a reward model differs from that of a language model (`hf_writer.HfWriter`)."""
    edit = partial(sequence_classification_config, shape=shape, pad_id=padding_id(tokenizer))
    return {"edit_config": edit, "added": {HEAD_WEIGHT: "F32"}}


def padding_id(tokenizer: Path | str) -> int | None:
    """The id that a folder's tokenizer pads with; None where it has none or pads with its end token."""
    folder = Path(tokenizer)
    file = folder / "tokenizer_config.json"
    if not file.is_file() or not (folder / "tokenizer.json").is_file():
        return None
    config = json.loads(file.read_text("utf-8"))
    names = {key: _text(config.get(key)) for key in ("pad_token", "eos_token")}
    if not names["pad_token"] or names["pad_token"] == names["eos_token"]:
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(names["pad_token"])


def _text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, Mapping) else token
