"""Import and export of critics; `megaverl.models.critic_map` says which checkpoints they start from and become."""

from __future__ import annotations

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
from megaverl.errors import Problems, UserError
from megaverl.models.critic_map import HEAD_BIAS, HEAD_WEIGHT, critic_map, critic_source, token_classification_config
from megaverl.models.shape import ModelShape


def check_critic_checkpoint(path: Path | str, problems: Problems) -> ModelShape | None:
    """Checks config.json and the tensors' headers of a checkpoint that a critic is to start from; reads no weights.

    Returns:
        The critic's shape; None when it cannot be known.
    """
    folder = Path(path)
    try:
        source = critic_source(folder)
    except UserError as error:
        problems.extend(error)
        return None
    before = len(problems.found)
    found = read_headers(folder, problems)
    if len(problems.found) == before:
        check_tensors(source.tensors, found, folder, problems)
    return source.shape


def load_critic(
    path: Path | str, params: Mapping[str, Tensor], *, tp: int, tp_rank: int, whole_model: bool = True
) -> None:
    """Fills a critic's ``params`` with this rank's share of the checkpoint in folder ``path``.

    What the files do not bring of the value head is set to zero; every other parameter is written completely.

    Args:
        params: the rank's parameters by Megatron name with global layer numbers.
        whole_model: ``params`` is the whole model; False for one pipeline stage of it.

    Raises:
        UserError: as `hf_import.load_hf`, or a classification with other than one label.
    """
    source, problems = critic_source(path), Problems()
    wanted = critic_map(source.shape)
    match_params(wanted, params, tp, problems, whole_model=whole_model)
    problems.raise_if_any()
    brought = source.tensors.by_megatron_name()
    held = {name: param for name, param in params.items() if name in brought}
    load_hf(path, source.tensors, held, tp=tp, tp_rank=tp_rank, whole_model=False)  # an output layer has no place here
    with torch.no_grad():
        for name in params.keys() - held.keys():
            params[name].zero_()


def export_critic(
    params: Mapping[str, Tensor],
    shape: ModelShape,
    out: Path | str,
    ranks: ModelRanks,
    *,
    source: Path | str,
    tokenizer: Path | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a critic as a Hugging Face token classification with one label; `hf_export.export_hf` says the rest.

    A value head that ``source`` did not have is written in float32.

    Args:
        source: folder of the checkpoint that the critic started from.
    """
    export_hf(
        params,
        critic_map(shape),
        out,
        ranks,
        source=source,
        tokenizer=tokenizer,
        max_shard_bytes=max_shard_bytes,
        **export_options(shape),
    )


def export_options(shape: ModelShape) -> dict[str, Any]:
    """How the export of a critic of this shape differs from that of a language model (`hf_writer.HfWriter`)."""
    return {
        "edit_config": partial(token_classification_config, shape=shape),
        "added": {HEAD_WEIGHT: "F32", HEAD_BIAS: "F32"},
    }
