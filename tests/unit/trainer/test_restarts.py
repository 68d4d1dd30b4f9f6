"""Restarts after lost workers, without workers: what is tried, how often, and with which configuration."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megaverl.config.load import load_config
from megaverl.errors import RunError
from megaverl.observe.console import Console
from megaverl.trainer import restarts
from megaverl.workers.liveness import WorkersLost


class Attempts:
    """Fails with the given errors first."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.ends = list(errors), 0

    def __call__(self, prepared) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "done"

    def end(self) -> None:
        self.ends += 1


@pytest.fixture
def prepared(monkeypatch):
    monkeypatch.setattr(restarts, "prepared_again", lambda prepared, error: prepared)
    return lambda allowed: SimpleNamespace(config=load_config(None, [f"trainer.max_restarts={allowed}"]))


def test_a_pool_is_built_again_as_often_as_allowed(prepared, capsys):
    attempts = Attempts(WorkersLost("rank 1 died"), WorkersLost("rank 0 died"))
    assert restarts.with_restarts(prepared(2), Console(), attempts, attempts.end) == "done"
    assert attempts.ends == 2
    captured = capsys.readouterr()
    assert "restart 2 of 2" in captured.out + captured.err
    attempts = Attempts(WorkersLost("rank 1 died"), WorkersLost("rank 0 died"))
    with pytest.raises(WorkersLost, match="rank 0 died"):
        restarts.with_restarts(prepared(1), Console(), attempts, attempts.end)


def test_an_error_of_the_program_is_not_tried_again(prepared):
    attempts = Attempts(RunError("the disk is full"))
    with pytest.raises(RunError, match="the disk is full"):
        restarts.with_restarts(prepared(3), Console(), attempts, attempts.end)


def prepared_run(tmp_path, *overrides: str):
    config = load_config(
        None,
        [
            "model.path=m",
            "data.train_files=[a]",
            f"trainer.run_dir={tmp_path}",
            "trainer.resume=never",
            "data.train_batch_size=16",
            *overrides,
        ],
    )
    from megaverl.config.derived import train_layout
    from megaverl.data.sampler import EpochSampler
    from megaverl.trainer.preflight import Prepared

    sampler = EpochSampler(64, config.data.train_batch_size, 0)
    sampler.next_batch()
    rows = [None] * 64
    return Prepared(config, None, None, train_layout(config), None, rows, None, sampler, [], 4)


def test_without_a_spare_node_data_parallelism_shrinks_and_the_data_begins_anew(tmp_path, monkeypatch):
    run = prepared_run(tmp_path, "cluster.nodes=2", "cluster.workers_per_node=2", "actor.layout.tp=2", "rollout.n=8")
    monkeypatch.setattr(restarts, "_living_nodes", lambda config: 1)
    again = restarts.prepared_again(run, WorkersLost("rank 3 died"))
    assert (str(run.layout), str(again.layout)) == ("tp2-pp1-dp2", "tp2-pp1-dp1")
    assert again.config.cluster.nodes == 1
    assert again.config.trainer.resume == "never"  # there is no checkpoint to go on from
    assert again.sampler.position == 0
    (tmp_path / "checkpoints" / "step_3").mkdir(parents=True)
    assert restarts.prepared_again(run, WorkersLost("rank 3 died")).config.trainer.resume == "auto"


def test_a_layout_that_does_not_fit_what_is_left_ends_the_run_with_both_reasons(tmp_path, monkeypatch):
    run = prepared_run(tmp_path, "cluster.nodes=2", "cluster.workers_per_node=2", "actor.layout.pp=4")
    monkeypatch.setattr(restarts, "_living_nodes", lambda config: 1)
    with pytest.raises(RunError, match=r"(?s)rank 3 died.*no restart: .*2 workers cannot hold"):
        restarts.prepared_again(run, WorkersLost("rank 3 died"))
    monkeypatch.setattr(restarts, "_living_nodes", lambda config: 0)
    with pytest.raises(RunError, match="no node that is alive has enough"):
        restarts.prepared_again(run, WorkersLost("rank 3 died"))
