"""From a Hugging Face checkpoint straight into one rank's parameters.

`check_checkpoint` looks at headers only and runs before anything is started. `load_hf` copies the slices that
this rank holds, a band of rows at a time: the most it keeps beside the parameters is a few bands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megaverl.checkpoint.hf_files import FLOAT_TYPES, TensorInfo, TensorReader, read_headers
from megaverl.errors import Problems, UserError
from megaverl.models.family import load_shape, recomputed_tensors, weight_map
from megaverl.models.rope import inverse_frequencies
from megaverl.models.weight_map import Piece, Row, WeightMap

BAND_BYTES = 4 * 1024**2
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def check_checkpoint(path: Path | str, problems: Problems) -> dict[str, TensorInfo]:
    """Checks config.json and the names, shapes and types of all tensors in folder ``path``; reads no weights.

    Missing, unknown, mis-shaped and non-float tensors, unreadable and missing files go to ``problems``, each by
    name. A tied model may bring an ``lm_head.weight`` of the embedding's shape and type; `load_hf` then demands
    that it equals the embedding bit for bit, because training would otherwise start from another model.

    Returns:
        The tensors by HF name (what could be read of them).
    """
    folder = Path(path)
    try:
        shape = load_shape(folder)
    except UserError as error:
        problems.extend(error)
        return {}
    before = len(problems.found)
    found = read_headers(folder, problems)
    if len(problems.found) == before:
        check_tensors(weight_map(shape), found, folder, problems)
    return found


def check_tensors(rows: WeightMap, found: Mapping[str, TensorInfo], folder: Path, problems: Problems) -> None:
    """Compares the tensors of a checkpoint with the weight map; every difference goes to ``problems``."""
    wanted = {name: rows.hf_shape(name) for name in rows.hf_names()}
    if rows.shape.tied and HEAD in found:
        wanted[HEAD] = wanted[EMBEDDING]
    frequencies = (rows.shape.head_dim // 2,)
    wanted.update({name: frequencies for name in recomputed_tensors(rows.shape) if name in found})
    for name in wanted:
        if name not in found:
            untied = name == HEAD and not rows.shape.tied
            fix = "set tie_word_embeddings to true if the model has no head of its own" if untied else ""
            problems.add(f"tensor {name} is missing", where=str(folder), fix=fix or "take a complete checkpoint")
    for name in sorted(set(found) - set(wanted)):
        problems.add(
            f"tensor {name} belongs to no part of a {rows.shape.family} model of {rows.shape.layers} layers",
            where=str(found[name].file),
            fix="check that config.json belongs to these files",
        )
    for name in sorted(set(found) & set(wanted)):
        info, where = found[name], f"{found[name].file}, tensor {name}"
        if info.shape != wanted[name]:
            problems.add(
                f"has shape {list(info.shape)}, config.json makes it {list(wanted[name])}",
                where=where,
                fix="config.json and the weights are of different models: fetch both again",
            )
        if info.dtype not in FLOAT_TYPES:
            problems.add(
                f"has type {info.dtype}; only {', '.join(FLOAT_TYPES)} can be trained",
                where=where,
                fix="take the checkpoint before quantisation",
            )
    if rows.shape.tied and HEAD in found and EMBEDDING in found and found[HEAD].dtype != found[EMBEDDING].dtype:
        problems.add(
            f"{HEAD} has type {found[HEAD].dtype} and the embedding {found[EMBEDDING].dtype} in a tied model",
            where=str(folder),
            fix="save the model again with transformers, which leaves the head of a tied model out",
        )


def load_hf(
    path: Path | str,
    rows: WeightMap,
    params: Mapping[str, Tensor],
    *,
    tp: int,
    tp_rank: int,
    whole_model: bool = True,
) -> None:
    """Fills ``params`` with this rank's share of the checkpoint in folder ``path``.

    Every parameter given is written completely (vocabulary padding with zeros) and every HF tensor has exactly
    one place. Values are converted to the parameter's type; float32 to a shorter type rounds to nearest.

    Args:
        rows: the weight map of the model.
        params: the rank's parameters by Megatron name with global layer numbers, of `WeightMap.local_shape`.
        whole_model: ``params`` is the whole model; False for one pipeline stage of it.

    Raises:
        UserError: all that `check_checkpoint` finds; a parameter that no row names, a row without parameter, a
            shape that does not fit; NaN or infinite values; a tied model whose head differs from its embedding.
    """
    folder = Path(path)
    problems = Problems()
    found = read_headers(folder, problems)
    if not problems.found:
        check_tensors(rows, found, folder, problems)
    targets = match_params(rows, params, tp, problems, whole_model=whole_model)
    problems.raise_if_any()
    with torch.no_grad(), TensorReader(found) as reader:
        for row, param in targets:
            _fill(reader, rows, row, param.detach(), tp, tp_rank, problems)
        if rows.shape.tied and HEAD in found:
            _check_tied_head(reader, rows, tp, tp_rank, problems)
        _check_frequencies(reader, rows, problems)
    problems.raise_if_any()


def match_params(
    rows: WeightMap, params: Mapping[str, Tensor], tp: int, problems: Problems, *, whole_model: bool
) -> list[tuple[Row, Tensor]]:
    """Each row that ``params`` holds with its parameter, in storage order; what does not fit goes to ``problems``."""
    names = rows.by_megatron_name()
    for name in params:
        if name not in names:
            problems.add(
                "no row of the weight map names this parameter",
                where=f"parameter {name}",
                fix="report this with the model's config.json; the table of names in models/families does not fit",
            )
    matched = []
    for row in rows.expand():
        held = [name for name in (row.megatron, *row.alternatives) if name in params]
        if len(held) > 1:
            problems.add(
                f"{' and '.join(held)} are the same parameter",
                where=f"row {row.megatron}",
                fix="report this with the model's config.json; the table of names in models/families does not fit",
            )
        elif held:
            param, want = params[held[0]], rows.local_shape(row, tp)
            if tuple(param.shape) != want:
                problems.add(
                    f"has shape {list(param.shape)}; with tensor parallel size {tp} it must be {list(want)}",
                    where=f"parameter {held[0]}",
                    fix="report this with the model's config.json; the table of names in models/families does not fit",
                )
            matched.append((row, param))
        elif whole_model:
            problems.add(
                f"the model has no parameter for {', '.join(row.hf)}",
                where=f"parameter {row.megatron}",
                fix="report this with the model's config.json; the table of names in models/families does not fit",
            )
    return matched


def _bands(reader: TensorReader, piece: Piece) -> Iterator[tuple[Tensor, slice]]:
    """Yields (values ``[rows of the band, ...]``, slice of dimension 0 inside the parameter)."""
    first, rest = piece.source[0], piece.source[1:]
    width = 8
    for part in rest:
        width *= part.stop - part.start
    step = max(1, BAND_BYTES // width)
    for start in range(first.start, first.stop, step):
        stop = min(start + step, first.stop)
        at = piece.target[0].start + start - first.start
        yield reader.read(piece.hf, (slice(start, stop), *rest)), slice(at, at + stop - start)


def _fill(
    reader: TensorReader, rows: WeightMap, row: Row, param: Tensor, tp: int, tp_rank: int, problems: Problems
) -> None:
    for piece in rows.pieces(row, tp, tp_rank):
        where = f"{reader.found[piece.hf].file}, tensor {piece.hf}"
        for values, at in _bands(reader, piece):
            if not bool(torch.isfinite(values).all()):
                problems.add("holds NaN or infinite values", where=where, fix="take a checkpoint that is not damaged")
                break
            converted = values.to(param.dtype)
            if converted is not values and not bool(torch.isfinite(converted).all()):
                problems.add(
                    f"holds values that do not fit into {param.dtype}",
                    where=where,
                    fix="use actor.precision=fp32, or a checkpoint whose weights are finite",
                )
                break
            param[(at, *piece.target[1:])].copy_(converted)
    param[rows.padding(row, tp, tp_rank)] = 0


def _check_tied_head(reader: TensorReader, rows: WeightMap, tp: int, tp_rank: int, problems: Problems) -> None:
    """A head that comes with a tied model must be the embedding; each rank compares its own rows."""
    row = next(r for r in rows.expand() if r.hf == (EMBEDDING,))
    for piece in rows.pieces(row, tp, tp_rank):
        head = Piece(HEAD, piece.source, piece.target)
        for (a, _), (b, _) in zip(_bands(reader, piece), _bands(reader, head), strict=True):
            if not torch.equal(a, b):
                problems.add(
                    f"differs from {EMBEDDING}, although tie_word_embeddings is true",
                    where=f"{reader.found[HEAD].file}, tensor {HEAD}",
                    fix="set tie_word_embeddings to false in config.json if the model has a head of its own",
                )
                return


def _check_frequencies(reader: TensorReader, rows: WeightMap, problems: Problems) -> None:
    """Rotary frequencies that a checkpoint carries must be those of its config.json, as far as 16 bits can say."""
    expected, _ = inverse_frequencies(rows.shape)
    for name in recomputed_tensors(rows.shape):
        if name not in reader.found:
            continue
        stored = reader.read(name, (slice(0, len(expected)),))
        if not torch.allclose(stored.float(), expected, rtol=1e-2, atol=1e-7):
            problems.add(
                "is not what config.json (rope_theta, rope_scaling) makes it",
                where=f"{reader.found[name].file}, tensor {name}",
                fix="check that config.json belongs to these files",
            )
