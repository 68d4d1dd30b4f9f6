"""The worker group: the driver's handle on all workers of a pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaverl.config.schema import ClusterConfig
from megaverl.errors import MegaverlError, RunError
from megaverl.parallel.layout import Layout
from megaverl.workers import cluster
from megaverl.workers.liveness import Whereabouts, died, stuck
from megaverl.workers.spec import WorkerSpec

CLOSE_SECONDS = 5.0
PEER_SECONDS = 5.0
"""How long a failure waits for news of a dead peer that may have caused it."""


@dataclass(frozen=True)
class Asked:
    """A call whose results have not been taken: Ray's references by rank, and its name for messages."""

    refs: list[Any]
    phase: str


class WorkerGroup:
    """Starts one Ray actor per rank and calls them together.

    A call goes to all ranks before any result is awaited, since ranks wait for each other inside it.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from megaverl.workers.worker import Worker

        self.spec = spec
        config: ClusterConfig = spec.config.cluster
        self._placement = cluster.place(config, spec.device)
        remote = ray.remote(Worker)
        self.ranks = []
        self._posted: list[tuple[str, tuple[Any, ...]]] = []
        self._places: list[Whereabouts] = []
        for rank in range(spec.layout.world):
            actor = remote.options(
                num_cpus=1,
                num_gpus=1 if spec.device == "cuda" else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, rank // config.workers_per_node),
                runtime_env={"env_vars": self._environment(config)},
                max_restarts=0,
                enable_task_events=False,  # Ray would keep a record of each of the run's calls, and grow
            ).remote(spec, rank)
            self.ranks.append(actor)
        try:
            address, port = self._get([self.ranks[0].rendezvous.remote()], "rendezvous", [0])[0]
            self._places = self.call("whereabouts")
            self.call("join", address, port)
        except BaseException:
            self.close()  # else the next run in this process would wait for the place
            raise

    @staticmethod
    def _environment(config: ClusterConfig) -> dict[str, str]:
        return {**cluster.WORKER_ENVIRONMENT, "OMP_NUM_THREADS": str(config.threads_per_worker)}

    @property
    def layout(self) -> Layout:
        return self.spec.layout

    def post(self, method: str, *args: Any) -> None:
        """Has every rank do ``method`` just before its next call; that call raises its failure.

        For what has no result: it costs no trip through Ray of its own.
        """
        self._posted.append((method, args))

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls ``method`` with the same arguments on every rank; results by rank."""
        return self.call_by_rank(method, lambda _: args)

    def call_by_rank(self, method: str, arguments: Callable[[int], Sequence[Any]]) -> list[Any]:
        """Calls ``method`` on every rank with ``arguments(rank)``; results by rank."""
        return self.answers(self.ask_by_rank(method, arguments))

    def ask(self, method: str, *args: Any) -> Asked:
        """As `call`, without waiting: a rank does what it was asked in order, one thing straight after the other.

        So a rank need not wait for the driver where it takes up a result only later; `answers` gives the results.
        """
        return self.ask_by_rank(method, lambda _: args)

    def answers(self, asked: Asked) -> list[Any]:
        """The results of what was asked, by rank; raises what a rank raised."""
        return self._get(asked.refs, asked.phase, list(range(len(asked.refs))))

    def ask_by_rank(self, method: str, arguments: Callable[[int], Sequence[Any]]) -> Asked:
        """As `ask`, with ``arguments(rank)``."""
        posted, self._posted = self._posted, []
        if posted:
            refs = [a.perform.remote(posted, method, arguments(rank)) for rank, a in enumerate(self.ranks)]
        else:
            refs = [getattr(a, method).remote(*arguments(rank)) for rank, a in enumerate(self.ranks)]
        return Asked(refs, " after ".join([method, *(name for name, _ in reversed(posted))]))

    def _get(self, refs: list[Any], phase: str, ranks: list[int]) -> list[Any]:
        import ray

        waiting, position = list(refs), {ref: i for i, ref in enumerate(refs)}
        results: list[Any] = [None] * len(refs)
        limit = self.spec.config.cluster.phase_timeout
        deadline = time.monotonic() + limit
        while waiting:  # the first failure is reported, not the peers that then wait for it in a collective
            done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                missing = [ranks[position[ref]] for ref in waiting]
                raise RunError(stuck(missing, self._places, self._roles, phase, limit, Path(self.spec.log_dir)))
            index = position[done[0]]
            try:
                results[index] = ray.get(done[0])
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                if isinstance(cause, MegaverlError):
                    raise cause from None
                self._raise_if_a_peer_died({ref: ranks[position[ref]] for ref in waiting}, phase)
                raise RunError(f"rank {ranks[index]} failed in phase {phase}:\n{error}") from error
            except ray.exceptions.RayError as error:
                raise self._death(ranks[index], phase, error) from error
        return results

    def _raise_if_a_peer_died(self, waiting: dict[Any, int], phase: str) -> None:
        """A rank whose neighbour died sees a broken connection; the neighbour is the one to name."""
        import ray

        ended, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=PEER_SECONDS) if waiting else ([], [])
        for ref in ended:
            try:
                ray.get(ref)
            except ray.exceptions.RayTaskError:
                continue  # it lost the same neighbour, or another one
            except ray.exceptions.RayError as error:
                raise self._death(waiting[ref], phase, error) from error

    def _death(self, rank: int, phase: str, error: Exception) -> RunError:
        place = self._places[rank] if self._places else None
        cause = " ".join(str(error).split())
        return RunError(died(rank, place, self._roles, phase, cause, Path(self.spec.log_dir) / f"rank_{rank}.log"))

    @property
    def _roles(self) -> list[str]:
        return sorted(self.spec.roles)

    def close(self) -> None:
        """Ends all workers and frees their place in the cluster."""
        import ray
        from ray.util.placement_group import remove_placement_group

        # A worker that died, or waits for one that did, does not answer: it is ended all the same.
        ray.wait([a.close.remote() for a in self.ranks], num_returns=len(self.ranks), timeout=CLOSE_SECONDS)
        for actor in self.ranks:
            ray.kill(actor)
        self.ranks = []
        remove_placement_group(self._placement)
