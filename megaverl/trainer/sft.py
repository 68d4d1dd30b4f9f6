"""The supervised loop, on the same parts: rows in, negative log-likelihood of the answers down."""

from __future__ import annotations

import torch

from megaverl.algorithms.losses import Denominators
from megaverl.data.batch import SequenceBatch
from megaverl.data.packing import plan_update
from megaverl.trainer.resume import save_if_due
from megaverl.trainer.run import Run
from megaverl.trainer.updates import run_updates


def train_sft(run: Run) -> None:
    """Runs all steps that are left."""
    while run.goes_on:
        run.step += 1
        run.heartbeat.step(run.step, run.total_steps)
        with run.timer.phase("step"):
            metrics = supervised_step(run)
        save_if_due(run, metrics)
        run.log_step(metrics)


def supervised_step(run: Run) -> dict[str, float]:
    """One optimizer update on the next batch of rows."""
    import ray

    prepared, config = run.prepared, run.config
    items = [prepared.train[i] for i in prepared.sampler.next_batch()]
    batch = SequenceBatch.from_lists([i.prompt_ids for i in items], [i.response_ids or [] for i in items])
    lengths = batch.lengths.tolist()
    plan = plan_update(
        lengths, range(len(items)), dp=prepared.layout.dp, seed=config.trainer.seed * 1_000_003 + run.step
    )
    reference = ray.put(batch)
    with run.timer.phase("distribute"):
        run.workers.post("load", [[(reference, list(home))] for home in plan.home])
    denominators = [Denominators.of(batch.response_lengths.tolist(), config.data.max_response_length)]
    metrics = run_updates(run, "actor", plan, denominators)
    metrics["perf/total_num_tokens"] = int(torch.tensor(lengths).sum())
    return metrics
