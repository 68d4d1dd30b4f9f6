"""Conversion of whole checkpoints in one process, on the CPU, without Ray and without process groups.

`to_hf`: rank files (of a train state or of `to_megatron`) -> a Hugging Face folder. `to_megatron`: a Hugging Face
folder -> one safetensors file per rank, by Megatron's names, with everything that is needed to come back.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaverl.checkpoint.critic import export_options
from megaverl.checkpoint.hf_files import TensorInfo, header_dtype, torch_dtype
from megaverl.checkpoint.hf_import import check_checkpoint, load_hf, match_params
from megaverl.checkpoint.hf_writer import (
    MAX_SHARD_BYTES,
    HfWriter,
    check_export_dir,
    copy_companions,
    share_of,
    stage_owners,
)
from megaverl.checkpoint.rank_files import FORMAT, MEGATRON_MANIFEST, RankFiles, open_rank_files, rank_folder
from megaverl.checkpoint.sequence_classification import reward_export_options, reward_source
from megaverl.checkpoint.shard_writer import ShardedWriter, TensorSpec
from megaverl.errors import Problem, Problems, UserError
from megaverl.files import write_error, write_json
from megaverl.models.critic_map import critic_map, critic_source
from megaverl.models.family import load_shape, weight_map
from megaverl.models.weight_map import Row, WeightMap
from megaverl.parallel.layout import Layout, stage_layers

EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Converted:
    """What a conversion made.

    Attributes:
        out: the folder.
        layout: how the model is (or was) divided.
        tensors: HF tensors written or read.
        bytes: size of all weights written.
        source: folder that configuration and tokenizer came from.
    """

    out: Path
    layout: Layout
    tensors: int
    bytes: int
    source: Path


@dataclass(frozen=True)
class _Target:
    """The table of a role's names, and how its export differs from an actor's."""

    rows: WeightMap
    options: dict[str, Any] = field(default_factory=dict)


def to_hf(
    checkpoint: Path | str,
    out: Path | str,
    *,
    role: str = "actor",
    model: Path | str | None = None,
    tokenizer: Path | str | None = None,
    max_shard_bytes: int | None = None,
) -> Converted:
    """Makes a Hugging Face checkpoint from a checkpoint of a run, or from a folder of `to_megatron`.

    Args:
        role: ``actor`` (a trained reward model becomes a sequence classification), or ``critic`` (it becomes a token
            classification).
        model: the Hugging Face folder that the run started from, for configuration, tokenizer and the tensors' types;
            None takes it from the run's config.yaml. Not used with a folder of `to_megatron`, which has them.
        tokenizer: folder of the tokenizer files; None is the run's, or ``model``.
        max_shard_bytes: a second file is begun when the first would grow beyond it; None is the run's
            ``trainer.export_shard_gb`` where config.yaml is needed anyway, else 5 GB.

    Raises:
        UserError: a folder is missing, damaged, taken or of another model; all problems found.
        RunError: a tensor is not finite, a file could not be written.
    """
    files = open_rank_files(checkpoint, role)
    if files.keys:
        source, tokenizer, usual = _sources(Path(checkpoint), role, model, tokenizer)
        last = files.parameters(files.layout.pp - 1, 0)
        target = _target(source, role, tokenizer or source, scores="value_head.weight" in last)
    else:
        source, usual = Path(checkpoint), MAX_SHARD_BYTES
        target = _Target(weight_map(load_shape(source)), {"types": files.manifest["hf_types"]})
    names, owners = _match(files, target.rows)
    limit = max_shard_bytes or usual
    folder = HfWriter(target.rows, out, source, tokenizer=tokenizer, max_shard_bytes=limit, **target.options)
    with _removed_on_failure(folder.remove):
        folder.begin()
        for row in target.rows.expand():
            stage = owners[row.megatron]
            for name in row.hf:
                folder.write(row, name, _shares(files, target.rows, row, name, stage, names))
        folder.finish()
    total = sum(path.stat().st_size for path in Path(out).glob("*.safetensors"))
    return Converted(Path(out), files.layout, len(target.rows.hf_names()), total, source)


def _shares(
    files: RankFiles, rows: WeightMap, row: Row, name: str, stage: int, names: Mapping[tuple[int, str], str]
) -> list[Tensor]:
    """The part of every TP rank in HF tensor ``name``; of a replicated parameter the first rank's."""
    tp = files.layout.tp
    ranks = range(1 if row.split == "replicated" else tp)
    held = names[stage, row.megatron]
    return [share_of(rows, row, name, files.read(stage, rank, held), tp, rank) for rank in ranks]


def _match(files: RankFiles, rows: WeightMap) -> tuple[dict[tuple[int, str], str], dict[str, int]]:
    """(stage, row) -> the parameter's name in the files, and the stage of each row. Each parameter has one place."""
    problems, layout = Problems(), files.layout
    names: dict[tuple[int, str], str] = {}
    held: list[list[str]] = []
    for stage in range(layout.pp):
        for rank in range(layout.tp):
            params = files.parameters(stage, rank)
            before = len(problems.found)
            matched = match_params(rows, params, layout.tp, problems, whole_model=False)
            if len(problems.found) > before:
                problems.add(
                    "holds the parameters named above",
                    where=str(files.files[stage, rank]),
                    fix="resume from another checkpoint of the run, or save it again",
                )
            if rank and {row.megatron for row, _ in matched} != set(held[stage]):
                problems.add(
                    "holds other parameters than the first rank's",
                    where=str(files.files[stage, rank]),
                    fix="resume from another checkpoint of the run, or save it again",
                )
            if not rank:
                held.append([row.megatron for row, _ in matched])
                for row, _ in matched:
                    names[stage, row.megatron] = next(n for n in (row.megatron, *row.alternatives) if n in params)
    owners = stage_owners(rows, held, problems)
    problems.raise_if_any()
    return names, owners


def _target(source: Path, role: str, tokenizer: Path | str, *, scores: bool) -> _Target:
    if role == "actor" and scores:
        shape = reward_source(source, trained=False).shape
        return _Target(critic_map(shape, bias=False), reward_export_options(shape, tokenizer))
    if role == "actor":
        return _Target(weight_map(load_shape(source)))
    shape = critic_source(source).shape
    return _Target(critic_map(shape), export_options(shape))


def _sources(
    checkpoint: Path, role: str, model: Path | str | None, tokenizer: Path | str | None
) -> tuple[Path, Path | None, int]:
    """Folders of the model and the tokenizer that a run used, unless they are given, and its size of weights files."""
    given = Path(tokenizer) if tokenizer is not None else None
    if model is not None:
        return Path(model), given, MAX_SHARD_BYTES
    from megaverl.config.derived import export_shard_bytes
    from megaverl.config.load import load_config

    file = checkpoint.resolve().parent.parent / "config.yaml"
    if not file.is_file():
        raise UserError(
            Problem(
                "does not lie in its run's folder any more, so that config.yaml cannot say which model it is of",
                where=str(checkpoint),
                fix="name the Hugging Face folder that the run started from with --model",
            )
        )
    config = load_config(file)
    path = (config.critic.path if role == "critic" else None) or config.model.path
    if given is None and config.model.tokenizer_path:
        given = Path(config.model.tokenizer_path)
    if not Path(path).is_dir():
        raise UserError(
            Problem(
                f"the model that the run started from is no longer at {path}",
                where=f"{file}, key model.path",
                fix="name the folder where it is now with --model",
            )
        )
    return Path(path), given, export_shard_bytes(config)


def to_megatron(source: Path | str, out: Path | str, *, tp: int = 1, pp: int = 1) -> Converted:
    """Divides a Hugging Face checkpoint into one safetensors file per rank of a layout, by Megatron's names.

    ``OUT/tp_TT_pp_PPP/model.safetensors`` holds the parameters of a rank (global layer numbers; QKV as all q, all k,
    all v of the rank; vocabulary padded with zeros; the last stage of a tied model has a copy of the embedding);
    ``OUT/megatron.json`` says how it was divided; configuration and tokenizer lie beside it. `to_hf` reverses it, bit
    for bit. The most that is held in memory is one rank's file.

    Raises:
        UserError: ``source`` is wrong, ``out`` is taken, or the model cannot be divided so; all problems found.
        RunError: a file could not be written.
    """
    source, out, problems = Path(source), Path(out), Problems()
    found = check_checkpoint(source, problems)
    check_export_dir(out, problems)
    problems.raise_if_any()
    shape = load_shape(source)
    rows = weight_map(shape)
    rows.check_tp(tp, problems)
    if pp > shape.layers:
        problems.add(
            f"{shape.layers} layers cannot fill {pp} pipeline stages",
            where=f"--pp {pp}",
            fix=f"use --pp {shape.layers} or less",
        )
    problems.raise_if_any()
    stages = [chunks[0] for chunks in stage_layers(shape.layers, pp)]
    temporary = out.parent / f".{out.name}.{os.getpid()}.tmp"
    total = 0
    with _removed_on_failure(lambda: shutil.rmtree(temporary, ignore_errors=True)):
        temporary.mkdir(parents=True)
        for stage, layers in enumerate(stages):
            for rank in range(tp):
                total += _write_rank(temporary, source, rows, _held(rows, layers, stage, pp), found, tp, rank, stage)
        _write_manifest(temporary / MEGATRON_MANIFEST, rows, found, tp, stages)
        shutil.copyfile(source / "config.json", temporary / "config.json")
        copy_companions(source, source, temporary)
        temporary.rename(out)
    return Converted(out, Layout(tp=tp, pp=pp), len(rows.hf_names()), total, source)


def _held(rows: WeightMap, layers: list[int], stage: int, pp: int) -> list[Row]:
    """The rows of one pipeline stage."""
    first, last, chosen = stage == 0, stage == pp - 1, {f"decoder.layers.{i}" for i in layers}
    held = []
    for row in rows.expand():
        copied = rows.shape.tied and last and row.megatron == EMBEDDING
        layer = ".".join(row.megatron.split(".")[:3]) in chosen
        if {"first": first or copied, "last": last, "layer": layer}[row.where]:
            held.append(row)
    return held


def _write_rank(
    out: Path,
    source: Path,
    rows: WeightMap,
    held: list[Row],
    found: Mapping[str, TensorInfo],
    tp: int,
    tp_rank: int,
    stage: int,
) -> int:
    """Writes the file of one rank; returns its size in bytes."""
    params = {row.megatron: torch.empty(rows.local_shape(row, tp), dtype=_type(row, found)) for row in held}
    load_hf(source, rows, params, tp=tp, tp_rank=tp_rank, whole_model=False)
    folder = out / rank_folder(stage, tp_rank)
    folder.mkdir()
    specs = [TensorSpec(name, header_dtype(param.dtype), tuple(param.shape)) for name, param in params.items()]
    size = sum(spec.bytes for spec in specs)
    writer = ShardedWriter(folder, specs, max_bytes=size)
    for spec in specs:
        writer.write(spec.name, [params.pop(spec.name)])
    writer.finish()
    return size


def _type(row: Row, found: Mapping[str, TensorInfo]) -> torch.dtype:
    """The type of a parameter: that of its HF tensors, or one that holds the values of all of them."""
    return reduce(torch.promote_types, (torch_dtype(found[name].dtype) for name in row.hf))


def _write_manifest(
    file: Path, rows: WeightMap, found: Mapping[str, TensorInfo], tp: int, stages: list[list[int]]
) -> None:
    manifest = {
        "format": FORMAT,
        "family": rows.shape.family,
        "tp": tp,
        "pp": len(stages),
        "layers_by_stage": stages,
        "tied": rows.shape.tied,
        "vocab": rows.shape.vocab,
        "padded_vocab": rows.shape.padded_vocab(tp),
        "qkv_order": "all q, all k, all v of the rank",
        "hf_types": {name: found[name].dtype for name in rows.hf_names()},
    }
    write_json(file, manifest)


@contextmanager
def _removed_on_failure(remove: Callable[[], None]) -> Iterator[None]:
    """Calls ``remove`` when the block fails; a failure of the disk becomes a RunError."""
    try:
        yield
    except BaseException as error:
        remove()
        if isinstance(error, OSError):
            raise write_error(error.filename or "the conversion", error) from error
        raise
