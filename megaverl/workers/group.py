"""The worker group: the driver's handle on all workers of a pool."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaverl.config.schema import ClusterConfig
from megaverl.errors import MegaverlError, RunError
from megaverl.parallel.layout import Layout
from megaverl.workers import cluster, placement
from megaverl.workers.beats import Watch
from megaverl.workers.liveness import Whereabouts, died, process_state, stuck
from megaverl.workers.spec import WorkerSpec

CLOSE_SECONDS = 5.0
LOOK_SECONDS = 1.0
"""How often a wait looks whether those that are waited for are alive."""
PEER_SECONDS, PEER_LOOK_SECONDS = 7.0, 0.5
"""How long a failure waits for news of a dead peer that may have caused it, and how often it looks."""


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
        self._placement = placement.place(config, spec.device)
        remote = ray.remote(Worker)
        self.ranks = []
        self._posted: list[tuple[str, tuple[Any, ...]]] = []
        self._places: list[Whereabouts] = []
        self._watch: Watch | None = None
        for rank in range(spec.layout.world):
            actor = remote.options(
                num_cpus=1,
                num_gpus=1 if spec.device == "cuda" else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, self._bundle(rank)),
                runtime_env={"env_vars": self._environment(config)},
                max_restarts=0,
                enable_task_events=False,  # Ray would keep a record of each of the run's calls, and grow
            ).remote(spec, rank)
            self.ranks.append(actor)
        try:
            self._start()
        except BaseException:
            self.close()  # else the next run in this process would wait for the place
            raise

    def _start(self) -> None:
        """Numbers the ranks of each node by their GPUs, then has all ranks meet and build their roles."""
        start_limit = self.spec.config.cluster.start_timeout
        refs = [a.whereabouts.remote() for a in self.ranks]
        places: list[Whereabouts] = self._get(refs, "whereabouts", limit=start_limit)
        order = sorted(range(len(places)), key=lambda slot: (self._bundle(slot), places[slot].gpus, slot))
        if order != list(range(len(places))):  # Ray gives GPUs out in any order; TP neighbours shall be neighbours
            self.ranks = [self.ranks[slot] for slot in order]
            places = [places[slot] for slot in order]
            self._get([a.take_rank.remote(rank) for rank, a in enumerate(self.ranks)], "take_rank", limit=start_limit)
        self._places = places
        self._watch = Watch([(place.node, place.port) for place in places])
        address, port = self._get([self.ranks[0].rendezvous.remote()], "rendezvous", limit=start_limit)[0]
        self.call("join", address, port)

    def _bundle(self, slot: int) -> int:
        return slot // self.spec.config.cluster.workers_per_node

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
        return self._get(asked.refs, asked.phase)

    def ask_by_rank(self, method: str, arguments: Callable[[int], Sequence[Any]]) -> Asked:
        """As `ask`, with ``arguments(rank)``."""
        posted, self._posted = self._posted, []
        refs = [a.perform.remote(posted, method, arguments(rank)) for rank, a in enumerate(self.ranks)]
        return Asked(refs, " after ".join([method, *(name for name, _ in reversed(posted))]))

    def _get(self, refs: list[Any], phase: str, limit: float | None = None) -> list[Any]:
        """Results of ``refs``, one per rank from rank 0 on; raises the first failure, not those it causes in peers."""
        import ray

        waiting, rank_of = list(refs), {ref: i for i, ref in enumerate(refs)}
        results: list[Any] = [None] * len(refs)
        key = "cluster.phase_timeout" if limit is None else "cluster.start_timeout"
        limit = limit or self.spec.config.cluster.phase_timeout
        deadline = time.monotonic() + limit
        while waiting:
            left = deadline - time.monotonic()
            done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, min(left, LOOK_SECONDS)))
            if not done:
                self._raise_if_silent([rank_of[ref] for ref in waiting], phase)
                if left <= 0:
                    raise self._stuck([rank_of[ref] for ref in waiting], phase, f"within {limit:g} s ({key})")
                continue
            rank = rank_of[done[0]]
            try:
                results[rank] = ray.get(done[0])
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                if isinstance(cause, MegaverlError):
                    raise cause from None
                self._raise_if_a_peer_died({ref: rank_of[ref] for ref in waiting}, phase)
                raise RunError(f"rank {rank} failed in phase {phase}:\n{error}") from error
            except ray.exceptions.RayError as error:
                raise self._death(rank, phase, error) from error
        return results

    def _raise_if_a_peer_died(self, waiting: dict[Any, int], phase: str) -> None:
        """A rank whose neighbour died sees a broken connection; the neighbour is the one to name.

        It may have finished this phase before it died, or be on a node that is away, which Ray takes long to notice.
        """
        import ray

        failed = time.monotonic()
        left = list(waiting)
        while time.monotonic() - failed < PEER_SECONDS:
            ended, left = ray.wait(left, num_returns=len(left), timeout=PEER_LOOK_SECONDS) if left else ([], [])
            for ref in ended:
                try:
                    ray.get(ref)
                except ray.exceptions.RayTaskError:
                    continue  # it lost the same neighbour, or another one
                except ray.exceptions.RayError as error:
                    raise self._death(waiting[ref], phase, error) from error
            if not left and (self._watch is None or self._watch.all_answered_since(failed)):
                return
            if not left:
                time.sleep(PEER_LOOK_SECONDS)
        self._raise_if_silent(list(range(len(self.ranks))), phase, PEER_SECONDS / 3)

    def _raise_if_silent(self, waiting: list[int], phase: str, short: float | None = None) -> None:
        """Raises when a rank that is waited for has given no sign of life for ``cluster.heartbeat_timeout``.

        Args:
            short: seconds of silence that are enough where something else has failed already.
        """
        bound = self.spec.config.cluster.heartbeat_timeout
        if self._watch is None or bound is None:
            return
        gone = [rank for rank in self._watch.gone(short or PEER_SECONDS) if rank in waiting]
        if gone:
            raise self._death(gone[0], phase, None)
        silent = [rank for rank in self._watch.silent(short or bound) if rank in waiting]
        if silent:
            limit = f"{short:g} s, and a peer failed" if short else f"{bound:g} s (cluster.heartbeat_timeout)"
            raise self._stuck(silent, phase, f"and gave no sign of life for {limit}")

    def _stuck(self, ranks: list[int], phase: str, limit: str) -> RunError:
        heard = self._watch.heard if self._watch else []
        answers = {rank: heard[rank].answer for rank in ranks if heard and not heard[rank].silent}  # no stale ones
        return stuck(ranks, self._places, self._roles, phase, limit, Path(self.spec.log_dir), answers)

    def _death(self, rank: int, phase: str, error: Exception | None) -> RunError:
        place = self._places[rank] if self._places else None
        cause = " ".join(str(error or "").split())
        return died(rank, place, self._roles, phase, cause, Path(self.spec.log_dir) / f"rank_{rank}.log")

    @property
    def _roles(self) -> list[str]:
        return sorted(self.spec.roles)

    def close(self) -> None:
        """Ends all workers and frees their place in the cluster."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if self._watch is not None:
            self._watch.close()
        # A worker that died, or waits for one that did, does not answer: it is ended all the same.
        ray.wait([a.close.remote() for a in self.ranks], num_returns=len(self.ranks), timeout=CLOSE_SECONDS)
        for actor in self.ranks:
            ray.kill(actor)
        self._end_the_stopped()
        self.ranks = []
        remove_placement_group(self._placement)

    def _end_the_stopped(self) -> None:
        """Kills stopped processes of this node, which take no message; Ray does it on other nodes, in its own time."""
        for place in self._places:
            if process_state(place) == "stopped":
                with suppress(ProcessLookupError):
                    os.kill(place.pid, signal.SIGKILL)
