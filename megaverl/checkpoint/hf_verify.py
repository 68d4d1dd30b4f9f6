"""Checks that a Hugging Face checkpoint survives the way to Megatron and back, and that both models say the same.

The model is built and loaded as a run would do it, on the CPU in float32, in the asked layout. Its scores on random
prompts are compared with those of transformers, then it is exported and every byte is compared with the original.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megaverl.checkpoint.hf_export import ModelRanks, export_hf
from megaverl.checkpoint.hf_files import TensorInfo, TensorReader, read_headers
from megaverl.checkpoint.hf_import import HEAD, check_checkpoint, load_hf
from megaverl.checkpoint.local_ranks import run_local
from megaverl.data.batch import SequenceBatch
from megaverl.errors import Problems
from megaverl.models.family import load_shape, recomputed_tensors, weight_map
from megaverl.models.shape import ModelShape
from megaverl.parallel.checks import check_layout
from megaverl.parallel.layout import Layout

TOLERANCE = 1e-4
"""Allowed difference of a score, per unit of the largest score. Rounding in float32 makes up to 5e-6 in a trained model
of 30 layers; a mistake in a conversion makes differences near 1."""
PROMPTS = 20
BAND_ROWS = 1024


@dataclass(frozen=True)
class Check:
    """One line of the table.

    Attributes:
        name: what was checked.
        ok: it holds.
        detail: numbers, or what is wrong.
    """

    name: str
    ok: bool
    detail: str


def verify(folder: Path | str, *, tp: int = 1, pp: int = 1, prompts: int = PROMPTS, seed: int = 0) -> list[Check]:
    """All checks of the checkpoint in ``folder``, in tp x pp processes of this machine.

    The round trip is written to the folder for temporary files (TMPDIR), which must have room for the weights.

    Raises:
        UserError: the checkpoint is not complete, is of an unknown model, or cannot be divided so; all problems found.
        RunError: a process died.
    """
    folder, layout, problems = Path(folder), Layout(tp=tp, pp=pp), Problems()
    found = check_checkpoint(folder, problems)
    problems.raise_if_any()
    shape = load_shape(folder)
    check_layout(shape, layout, None, problems)
    problems.raise_if_any()
    batch = random_prompts(shape, prompts, seed)
    expected = _transformers_scores(folder, batch)
    with tempfile.TemporaryDirectory(prefix="megaverl-verify-") as temporary:
        out = Path(temporary) / "out"
        scores = run_local(_load_score_export, layout.world, str(folder), layout, batch, str(out))[0]
        wanted = {
            n: i for n, i in found.items() if n not in recomputed_tensors(shape) and not (shape.tied and n == HEAD)
        }
        checks = [Check("import", True, f"{len(found)} tensors, each used once, none missing or unknown")]
        checks += [_compare(name, scores[name], expected[name], batch) for name in expected]
        checks += [_same_tensors(wanted, out), _same_config(folder, out)]
    return checks


def random_prompts(shape: ModelShape, count: int, seed: int) -> SequenceBatch:
    """``count`` prompts of 8 to 40 random ids; all tokens but the first of each are to be scored."""
    draw = random.Random(seed)
    longest = max(2, min(40, shape.max_positions))
    lengths = [draw.randint(min(8, longest), longest) for _ in range(count)]
    texts = [[draw.randrange(shape.vocab) for _ in range(n)] for n in lengths]
    return SequenceBatch.from_lists([text[:1] for text in texts], [text[1:] for text in texts])


def _transformers_scores(folder: Path, batch: SequenceBatch) -> dict[str, Tensor]:
    """Log-probability and entropy [tokens] by transformers, one prompt at a time; 0 at the first tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, local_files_only=True, trust_remote_code=False
    ).eval()
    log_probs, entropies = [], []
    with torch.no_grad():
        for number in range(len(batch)):
            tokens = batch.select([number]).tokens
            log_p = model(input_ids=tokens[None]).logits[0].float().log_softmax(-1)
            log_probs.append(torch.cat([torch.zeros(1), log_p[:-1].gather(1, tokens[1:, None])[:, 0]]))
            entropies.append(torch.cat([torch.zeros(1), -(log_p.exp() * log_p).sum(-1)[:-1]]))
    return {"log_probs": torch.cat(log_probs), "entropy": torch.cat(entropies)}


def _load_score_export(rank: int, folder: str, layout: Layout, batch: SequenceBatch, out: str) -> dict[str, Tensor]:
    """One rank of a run's way: model, import, scores, export."""
    from megaverl.models.policy import PolicyModel
    from megaverl.parallel.device import choose_device
    from megaverl.parallel.setup import init_model_parallel

    grid = init_model_parallel(layout, seed=0)
    shape = load_shape(folder)
    rows = weight_map(shape)
    policy = PolicyModel(shape, layout, choose_device("fp32", "eager", "cpu"), trainable=False)
    params = policy.parameters_by_name()
    load_hf(folder, rows, params, tp=layout.tp, tp_rank=grid.at.tp, whole_model=layout.pp == 1)
    scores = policy.log_probs(batch, temperature=1.0, max_tokens=256, with_entropy=True)
    ranks = ModelRanks(layout.tp, grid.at.tp, grid.tp, layout.pp, grid.at.pp, grid.pp)
    export_hf(params, rows, out, ranks, source=folder)
    return scores


def _compare(name: str, found: Tensor, expected: Tensor, batch: SequenceBatch) -> Check:
    difference = (found - expected).abs().max().item()
    largest = max(1.0, expected.abs().max().item())
    scored = int(batch.response_mask.sum())
    what = {"log_probs": "log-probabilities", "entropy": "entropies"}[name]
    detail = (
        f"{scored} tokens of {len(batch)} prompts: largest difference {difference:.1e}, largest value {largest:.1f}"
    )
    return Check(f"{what} equal transformers'", difference <= TOLERANCE * largest, detail)


def _same_tensors(wanted: Mapping[str, TensorInfo], out: Path) -> Check:
    """Names, shapes, types and bytes of the round trip."""
    name, problems = "round trip is bit-equal", Problems()
    found = read_headers(out, problems)
    wrong = [str(problem) for problem in problems.found]
    wrong += [f"{tensor} was lost" for tensor in wanted if tensor not in found]
    wrong += [f"{tensor} is new" for tensor in found if tensor not in wanted]
    with TensorReader(wanted) as before, TensorReader(found) as after:
        for tensor in (tensor for tensor in wanted if tensor in found):
            a, b = wanted[tensor], found[tensor]
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                wrong.append(f"{tensor} was {a.dtype} {list(a.shape)} and is {b.dtype} {list(b.shape)}")
            elif not _equal(before, after, tensor):
                wrong.append(f"{tensor} has other values")
    if wrong:
        return Check(name, False, f"{len(wrong)} of {len(wanted)} tensors: " + "; ".join(wrong[:5]))
    return Check(name, True, f"{len(wanted)} tensors: names, shapes, types and bytes")


def _equal(before: TensorReader, after: TensorReader, tensor: str) -> bool:
    shape = before.found[tensor].shape
    for start in range(0, shape[0], BAND_ROWS):
        at = (slice(start, min(start + BAND_ROWS, shape[0])), *(slice(0, size) for size in shape[1:]))
        # As bytes: -0.0 and 0.0 are equal numbers.
        a, b = (reader.read(tensor, at).contiguous().view(torch.uint8) for reader in (before, after))
        if not torch.equal(a, b):
            return False
    return True


def _same_config(folder: Path, out: Path) -> Check:
    a, b = (json.loads((path / "config.json").read_text(encoding="utf-8")) for path in (folder, out))
    return Check("config.json is unchanged", a == b, f"{len(a)} keys" if a == b else "it differs")
