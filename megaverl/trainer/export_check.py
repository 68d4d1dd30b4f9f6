"""An export that is proven: plain vLLM, in fresh processes, loads the folder, and says what the running policy says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megaverl.errors import RunError
from megaverl.rollout.fresh_vllm import FreshAnswers, FreshJob
from megaverl.trainer.rl import hand_over
from megaverl.trainer.run import Run

TOLERANCE = 1e-3
"""Allowed difference of a log-probability where policy and export are float32: rounding makes 1e-5 of it."""
TOLERANCE_16_BIT = 0.25
"""Where one of them has 16 bits: bfloat16 keeps 8 bits of logits that reach 30, and the export may be rounded."""
START_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class VllmExport:
    """An exported checkpoint, and what a fresh vLLM made of it.

    Attributes:
        folder: the checkpoint.
        prompts, tokens: prompts answered, and tokens of all answers.
        texts: the greedy answers.
        largest_difference: of any answer token's log-probability, fresh vLLM's to the running policy's.
        tolerance: the most that is allowed.
    """

    folder: Path
    prompts: int
    tokens: int
    texts: list[str]
    largest_difference: float
    tolerance: float

    def __str__(self) -> str:
        return (
            f"{self.folder}: a fresh vLLM loaded it and answered {self.prompts} prompts greedily; log-probabilities of "
            f"{self.tokens} tokens equal the policy's to {self.largest_difference:.1e} (allowed: {self.tolerance:g})"
        )


def check_in_vllm(run: Run, folder: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> VllmExport:
    """Has a fresh vLLM answer ``prompts`` from ``folder``, and the running policy score the answers.

    The weights of the run stay as they are; its rollout engine gives up its cache meanwhile.

    Raises:
        RunError: vLLM cannot load the folder, an answer is empty, a log-probability is not finite or is another than
            the policy's.
    """
    spec, workers = run.workers.spec, run.workers
    tp = 1 if run.prepared.supervised else spec.rollout_tp
    address, port = workers.call("rendezvous")[0]
    dtype = run.worker_info[0]["dtype"]
    limit = min(START_TIMEOUT_S, run.config.cluster.phase_timeout)
    asked = [list(p) for p in prompts]
    job = FreshJob(str(folder), asked, max_tokens, spec.device, dtype, tp, address, port, limit)
    if not run.prepared.supervised:
        workers.post("to_train")
    found: list[FreshAnswers | None] = workers.call("answer_from_export", job)
    failures = [answers.failure for answers in found if answers is not None and answers.failure]
    scored = None
    if not failures and found[0] is not None:
        parts = workers.call("score_answers", asked, found[0].tokens)
        scored = next(part for part in parts if part is not None)
    if not run.prepared.supervised:
        hand_over(run)  # as it was before, so that training and validation can go on
    if scored is None or found[0] is None:
        log = Path(spec.log_dir) / "rank_0.log"
        raise RunError(f"{folder} was exported, but {failures[0]}\n    -> {log} has vLLM's messages")
    exact = dtype == "float32" and _all_float32(folder)
    return judge(folder, found[0], scored, TOLERANCE if exact else TOLERANCE_16_BIT)


def judge(folder: Path, answers: FreshAnswers, policy: Sequence[Sequence[float]], tolerance: float) -> VllmExport:
    """Compares vLLM's answers with the policy's log-probabilities of the same tokens.

    Raises:
        RunError: an answer is empty, a log-probability is not finite or further off than ``tolerance``.
    """
    texts, theirs = answers.texts or [], answers.log_probs or []
    wrong = [f"answer {i} is empty" for i, text in enumerate(texts) if not text]
    if not texts:
        wrong.append("there are no answers")
    wrong += [f"answer {i} has values that are not finite" for i, row in enumerate(theirs) if not _finite(row)]
    wrong += [f"the policy's scores of answer {i} are not finite" for i, row in enumerate(policy) if not _finite(row)]
    largest, tokens = 0.0, 0
    if not wrong:
        pairs = [
            (i, abs(a - b))
            for i, rows in enumerate(zip(theirs, policy, strict=True))
            for a, b in zip(*rows, strict=True)
        ]
        tokens = len(pairs)
        worst, largest = max(pairs, key=lambda pair: pair[1])
        if largest > tolerance:
            wrong.append(
                f"a log-probability in answer {worst} is {largest:.2g} off the policy's (allowed: {tolerance:g})"
            )
    if wrong:
        raise RunError(
            f"{folder} was exported, but a fresh vLLM says something else than the policy: {'; '.join(wrong)}\n"
            "    -> do not use this export; compare it with megaverl convert verify"
        )
    return VllmExport(folder, len(texts), tokens, texts, largest, tolerance)


def _all_float32(folder: Path) -> bool:
    """All tensors of the checkpoint are float32."""
    from megaverl.checkpoint.hf_files import read_headers
    from megaverl.errors import Problems

    problems = Problems()
    found = read_headers(folder, problems)
    problems.raise_if_any()
    return all(info.dtype == "F32" for info in found.values())


def _finite(row: Sequence[float]) -> bool:
    return all(math.isfinite(value) for value in row)
