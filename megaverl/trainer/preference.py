"""The loop of preference training, on the same parts: answers with a judgement in, a policy or a reward model out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from megaverl.algorithms.losses import TOKENS, finish_metrics
from megaverl.algorithms.preference import BASELINE, PREFERRED, PreferenceCounts, kto_baseline
from megaverl.config.derived import needs_reference
from megaverl.data.batch import SequenceBatch
from megaverl.data.packing import UpdatePlan, plan_units, plan_update
from megaverl.data.preference_dataset import PreferenceItem, judged_batch, pairs_batch
from megaverl.trainer.resume import save_if_due
from megaverl.trainer.run import Run
from megaverl.trainer.updates import run_updates


def train_preference(run: Run) -> None:
    """Runs all steps that are left."""
    if run.config.trainer.val_before_train and run.step == 0 and run.prepared.val is not None:
        run.trackers.log(validate_preferences(run) | run.timer.metrics(), run.step)
    while run.goes_on:
        run.step += 1
        run.heartbeat.step(run.step, run.total_steps)
        with run.timer.phase("step"):
            metrics = preference_step(run)
        metrics |= validate_if_due(run)
        save_if_due(run, metrics)
        run.log_step(metrics)


def preference_step(run: Run) -> dict[str, float]:
    """One optimizer update on the next batch of pairs or judged answers."""
    prepared, config = run.prepared, run.config
    items = [prepared.train[i] for i in prepared.sampler.next_batch()]
    judged = config.algorithm.name == "kto"
    batch = judged_batch(items, PREFERRED, BASELINE) if judged else pairs_batch(items, PREFERRED)
    units = len(items)
    held = [(i, i + units) if judged else (2 * i, 2 * i + 1) for i in range(units)]
    trained = [(i,) for i in range(units)] if judged else held
    plan = distribute(run, batch, held, trained, config.trainer.seed * 1_000_003 + run.step)
    reference_log_probs(run)
    baseline = {"kto/baseline": _baseline(run)} if judged else {}
    chosen = [i for own in trained for i in own]
    counts = _counts(batch.select(chosen), units, config.data.max_response_length, baseline.get("kto/baseline", 0.0))
    metrics = run_updates(run, "actor", plan, [counts])
    return metrics | baseline | {"perf/total_num_tokens": int(batch.tokens.numel())}


def distribute(
    run: Run, batch: SequenceBatch, held: Sequence[Sequence[int]], trained: Sequence[Sequence[int]], seed: int
) -> UpdatePlan:
    """Balances units over data parallel ranks and has each rank fetch its own from the object store."""
    import ray

    lengths = batch.lengths.tolist()
    by_unit = plan_update(
        [sum(lengths[i] for i in own) for own in held], range(len(held)), dp=run.prepared.layout.dp, seed=seed
    )
    plan = plan_units(by_unit, held, trained)
    reference = ray.put(batch)
    with run.timer.phase("distribute"):
        run.workers.call("load", [[(reference, list(home))] for home in plan.home])
    return plan


def reference_log_probs(run: Run) -> None:
    """The reference's log-probabilities of the loaded answers, once; they stay in the workers."""
    if needs_reference(run.config):
        with run.timer.phase("ref"):
            run.workers.call("reference_log_probs")


def validate_if_due(run: Run) -> dict[str, float]:
    """Validates every ``trainer.val_every`` steps and after the last one."""
    every = run.config.trainer.val_every
    due = run.step == run.total_steps or (every and run.step % every == 0)
    return validate_preferences(run) if due else {}


def validate_preferences(run: Run) -> dict[str, float]:
    """How the model ranks the held-out pairs: ``val/rewards/accuracies`` and its relatives, exact over all pairs.

    Empty without validation rows.
    """
    prepared = run.prepared
    if prepared.val is None:
        return {}
    items: Sequence[PreferenceItem] = prepared.val.items
    everything = pairs_batch(items, PREFERRED)
    counts = _counts(everything, len(items), run.config.data.max_response_length)
    sums: dict[str, list[float]] = {}
    with run.timer.phase("testing"):
        for start, end in _chunks(len(items), max(run.config.data.train_batch_size, prepared.layout.dp)):
            held = [(2 * i, 2 * i + 1) for i in range(end - start)]
            distribute(run, everything.select(range(2 * start, 2 * end)), held, held, seed=0)
            reference_log_probs(run)
            for part in run.workers.call("measure_preferences", counts):
                for name, value in (part or {}).items():
                    sums.setdefault(name, []).append(value)
    metrics = finish_metrics({name: math.fsum(values) for name, values in sums.items()}, counts)
    run.validations.append((run.step, metrics["rewards/accuracies"]))
    return {f"val/{name}": value for name, value in metrics.items() if name != TOKENS}


def _baseline(run: Run) -> float:
    with run.timer.phase("baseline"):
        parts = run.workers.call("baseline_ratios")
    return kto_baseline(torch.tensor(sorted(ratio for part in parts if part is not None for ratio in part)))


def _counts(batch: SequenceBatch, units: int, norm: int, baseline: float = 0.0) -> PreferenceCounts:
    chosen = int((batch.per_sequence[PREFERRED] == 1).sum())
    tokens = int(batch.response_mask.sum())
    return PreferenceCounts(tokens, len(batch), norm, units, chosen, len(batch) - chosen, baseline)


def _chunks(rows: int, size: int) -> list[tuple[int, int]]:
    """Nearly equal spans of at most ``size`` rows, so that none is too small for the data parallel ranks."""
    number = -(-rows // size)
    ends = [rows * n // number for n in range(number + 1)]
    return list(itertools.pairwise(ends))
