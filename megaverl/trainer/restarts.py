"""Restarts: when workers are lost, the pool is built anew on what is left and the run goes on from its checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from megaverl.checkpoint.train_state import complete_steps
from megaverl.config.derived import train_layout
from megaverl.config.rules import check_rules
from megaverl.config.schema import Config
from megaverl.data.sampler import EpochSampler
from megaverl.errors import Problems, RunError
from megaverl.observe.console import Console
from megaverl.trainer.preflight import Prepared
from megaverl.workers import cluster
from megaverl.workers.liveness import WorkersLost
from megaverl.workers.placement import answers, fitting_nodes

SETTLE_SECONDS = 30.0
"""How long Ray may take until it counts a dead node's resources out and gives the living ones' back."""


R = TypeVar("R")


def with_restarts(prepared: Prepared, console: Console, attempt: Callable[[Prepared], R], end: Callable[[], None]) -> R:
    """Returns what ``attempt`` returns; after lost workers it is tried again ``trainer.max_restarts`` times.

    Args:
        end: frees what a failed attempt holds: workers, their place in the cluster, the run directory.

    Raises:
        RunError: the workers were lost once more, or what is left of the cluster cannot hold the run.
    """
    allowed = prepared.config.trainer.max_restarts
    for number in range(1, allowed + 2):
        try:
            return attempt(prepared)
        except WorkersLost as error:
            end()
            if number > allowed:
                raise
            console.warn(f"{error}\nrestart {number} of {allowed} (trainer.max_restarts)")
            prepared = prepared_again(prepared, error)
    raise AssertionError("not reached: the last attempt returns or raises")


def prepared_again(prepared: Prepared, error: WorkersLost) -> Prepared:
    """The run from its newest checkpoint, or from its start without one, on as many nodes as are alive.

    Raises:
        RunError: no layout of the run fits what is left.
    """
    config = prepared.config
    nodes = min(config.cluster.nodes, _living_nodes(config))
    changes = {"nodes": nodes} if nodes else {}
    trainer = {"resume": "auto"} if complete_steps(config.trainer.run_dir) else {}
    config = config.model_copy(
        update={
            "cluster": config.cluster.model_copy(update=changes),
            "trainer": config.trainer.model_copy(update=trainer),
        }
    )
    problems = Problems()
    check_rules(config, problems)
    if not nodes or problems.found:
        why = "; ".join(str(p) for p in problems.found) or "no node that is alive has enough for its workers"
        raise RunError(f"{error}\nno restart: {why}") from error
    old = prepared.sampler
    sampler = EpochSampler(old.size, old.batch_size, old.seed, shuffle=old.shuffle, mixture=old.mixture)
    return replace(prepared, config=config, layout=train_layout(config), sampler=sampler)


def _living_nodes(config: Config) -> int:
    """Nodes that can hold their workers, once Ray has noticed who is gone."""
    device = cluster.choose_device(config.cluster)
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        fitting = fitting_nodes(config.cluster, device)
        silent = [node for node in fitting if not answers(node)]
        if (len(fitting) >= config.cluster.nodes and not silent) or time.monotonic() > deadline:
            return len(fitting) - len(silent)
        time.sleep(1.0)
