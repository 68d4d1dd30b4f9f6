"""Two Ray nodes with addresses of their own, in network namespaces: TP inside a node, DP across."""

from __future__ import annotations

import pytest

from benchmarks import nodes

REASON = nodes.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

STEPS = 2


def words(task, *more: str) -> list[str]:
    return [
        str(nodes.TINY), f"model.path={task.model}", f"data.train_files=[{task.rows['train']}]", "data.val_files=[]",
        f"reward.function.path={task.scorer}", "trainer.export_dir=null", "actor.layout.tp=2", *more,
    ]  # fmt: skip


def test_two_nodes_train_as_one_does_and_too_many_are_refused(task, tmp_path):
    """Every metric of the run over two nodes is that of the same layout on one node, and ranks are numbered by node."""
    options = ["data.train_batch_size=8", f"trainer.total_steps={STEPS}"]
    with nodes.ray_nodes((2, 2)) as started:
        more = [f"trainer.run_dir={tmp_path / 'two'}", "cluster.nodes=2", "cluster.workers_per_node=2"]
        done = nodes.train_on(started, [*words(task, *options, *more), "--json"])
        refused = nodes.train_on(started, words(task, f"trainer.run_dir={tmp_path / 'no'}", "cluster.nodes=4"))
    assert done.returncode == 0, done.stdout + done.stderr
    with nodes.ray_nodes((4,)) as started:
        more = [f"trainer.run_dir={tmp_path / 'one'}", "cluster.nodes=1", "cluster.workers_per_node=4"]
        alone = nodes.train_on(started, words(task, *options, *more))
    assert alone.returncode == 0, alone.stdout + alone.stderr
    two, one = nodes.rows_of(tmp_path / "two"), nodes.rows_of(tmp_path / "one")
    assert len(two) == STEPS
    assert [row.keys() for row in two] == [row.keys() for row in one]
    for row, alone_row in zip(two, one, strict=True):
        assert row == pytest.approx(alone_row, rel=1e-3, abs=1e-6)  # sums in another order
    assert refused.returncode == 2
    assert "wanted 4 node(s) with 2 CPUs each, the cluster has 2 such node(s)" in refused.stderr
