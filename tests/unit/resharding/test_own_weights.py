import torch

from megaverl.models.family import weight_map
from megaverl.parallel.layout import Layout
from megaverl.resharding.binding import rollout_tensors
from megaverl.resharding.own_weights import OwnWeights, not_numbers, own_weights
from megaverl.resharding.planner import make_plan
from tests.unit.resharding.weights import SMALL, train_params


def test_freed_weights_come_back_with_their_views_and_training_weights_stay():
    plan = make_plan(weight_map(SMALL), Layout(pp=2), 1)
    params = train_params(SMALL, Layout(pp=2), 0)
    tensors = rollout_tensors(plan.ranks[0], params)
    own = own_weights(tensors, params)
    assert own.keys() == {e.vllm for e in plan.ranks[0].entries if e.kind != "alias"}
    memory = OwnWeights(own.values())
    views = {name: tensor[:1] for name, tensor in own.items()}
    kept = {name: p.clone() for name, p in params.items()}
    assert memory.bytes == memory.bytes_held == plan.ranks[0].peak_extra_bytes > 0
    memory.free()
    assert memory.bytes_held == 0
    assert all(torch.equal(kept[name], p) for name, p in params.items())
    memory.allocate()
    memory.allocate()
    assert memory.bytes_held == memory.bytes
    for name, tensor in own.items():
        tensor.fill_(3.0)
        assert bool((views[name] == 3).all())


def test_nan_is_found_by_name():
    assert not_numbers({"b": torch.tensor([1.0, float("nan")]), "a": torch.tensor([float("nan")])}) == ["a", "b"]
    assert not_numbers({"c": torch.tensor([float("inf")])}) == []
