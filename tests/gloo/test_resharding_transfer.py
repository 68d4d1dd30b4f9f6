"""The transfer between real processes: every pair of layouts, with plain tensors in place of the two models."""

import pytest
import torch

from megaverl.errors import RunError
from megaverl.models.family import weight_map
from megaverl.parallel.layout import Layout
from megaverl.resharding.binding import rollout_tensors
from megaverl.resharding.planner import make_plan
from megaverl.resharding.transfer import Transfer
from tests.gloo.launch import run_ranks
from tests.unit.resharding.weights import SMALL, TIED, rollout_params, train_params

UPDATES = 3
BUCKET = 4096
TINY_BUCKET = 96  # smaller than a row of the largest matrices and than most tensors


def hand_off(rank, shape, train, rollout_tp, bucket):
    """One pair of layouts through three updates in place; returns what disagrees."""
    plan = make_plan(weight_map(shape), train, rollout_tp)
    params = train_params(shape, train, rank)
    weights = rollout_tensors(plan.ranks[rank], params)
    pointers = {name: tensor.data_ptr() for name, tensor in weights.items()}
    transfer = Transfer(plan, rank, params, weights, bucket_bytes=bucket, verify="full")
    wrong = []
    for update in range(UPDATES + 1):
        for name, tensor in train_params(shape, train, rank, update).items():
            params[name].copy_(tensor)
        moved = transfer.run()
        expected = rollout_params(shape, train, rollout_tp, rank, update)
        wrong += [f"update {update}: {n}" for n in expected if not torch.equal(weights[n], expected[n])]
        own = plan.ranks[rank]
        if (moved.bytes_copied, moved.bytes_received) != (own.bytes_copied, own.bytes_received):
            wrong.append(f"{moved}, the plan says {own.bytes_copied} and {own.bytes_received}")
        if moved.staging_peak > bucket:
            wrong.append(f"{moved.staging_peak} bytes staged at once")
    if pointers != {name: tensor.data_ptr() for name, tensor in weights.items()}:
        wrong.append("storage moved")
    return wrong


def other_format(rank, world, train_dtype, rollout_dtype):
    """Rollout weights in another number format than training's; returns what disagrees and how many bytes travelled."""
    train = Layout(pp=2)
    plan = make_plan(
        weight_map(SMALL), train, 1, element_bytes=train_dtype.itemsize, rollout_element_bytes=rollout_dtype.itemsize
    )
    own = plan.ranks[rank]
    params = {name: p.to(train_dtype) for name, p in train_params(SMALL, train, rank).items()}
    weights = rollout_tensors(own, params, rollout_dtype)
    moved = Transfer(plan, rank, params, weights, bucket_bytes=BUCKET, verify="full").run()
    expected = {n: t.to(train_dtype).to(rollout_dtype) for n, t in rollout_params(SMALL, train, 1, rank).items()}
    wrong = [name for name, tensor in expected.items() if not torch.equal(weights[name], tensor)]
    assert own.bytes_aliased == 0
    assert own.peak_extra_bytes == sum(t.numel() * t.element_size() for t in weights.values())
    assert (moved.bytes_copied, moved.bytes_received) == (own.bytes_copied, own.bytes_received)
    assert moved.bytes_received == own.bytes_received_bound
    assert moved.staging_peak <= BUCKET
    return wrong, moved.bytes_received


@pytest.mark.parametrize(
    "formats", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=["narrower", "wider"]
)
def test_another_number_format_is_copied_and_its_narrower_form_travels(formats):
    plain = make_plan(weight_map(SMALL), Layout(pp=2), 1, element_bytes=2)
    for rank, (wrong, received) in enumerate(run_ranks(other_format, 2, *formats)):
        assert wrong == []
        assert received == plain.ranks[rank].bytes_received > 0


def spoil(rank, world, verify):
    """What the check says after one element of each rank's rollout weights changed, by parameter; None is nothing."""
    train = Layout(tp=world)
    plan = make_plan(weight_map(SMALL), train, 1)
    params = train_params(SMALL, train, rank)
    weights = rollout_tensors(plan.ranks[rank], params)
    transfer = Transfer(plan, rank, params, weights, bucket_bytes=BUCKET, verify=verify)
    found = {}
    transfer.run()
    for name in ("model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"):
        kept = weights[name].clone()
        weights[name][rank * weights[name].shape[0] // 2, -1] += 1e-3
        found[name] = checked(transfer, verify)
        weights[name].copy_(kept.roll(1, 0))
        found[f"{name} rolled"] = checked(transfer, verify)
        weights[name].copy_(kept)
    found["clean"] = checked(transfer, verify)
    return found


def checked(transfer, verify):
    try:
        transfer.check(verify)
    except RunError as error:
        return str(error)
    return None


@pytest.mark.parametrize("verify", ["checksum", "full"])
def test_a_rollout_parameter_that_differs_from_its_source_is_named(verify):
    for rank, found in enumerate(run_ranks(spoil, 2, verify)):
        assert found.pop("clean") is None
        for name, text in found.items():
            parameter = name.removesuffix(" rolled")
            assert text == f"rank {rank}: these rollout parameters are not what training has: {parameter}"


def pairs(world):
    layouts = [
        Layout(tp=tp, pp=pp, dp=world // tp // pp) for tp in (1, 2, 4) for pp in (1, 2) if world % (tp * pp) == 0
    ]
    return [(train, rollout) for train in layouts for rollout in (1, 2, 4) if rollout <= world]


def matrix(rank, world):
    found = {}
    for shape in (SMALL, TIED):
        for train, rollout_tp in pairs(world):
            key = f"{shape.family} {train} -> tp{rollout_tp}"
            found[key] = hand_off(rank, shape, train, rollout_tp, BUCKET)
    virtual = Layout(tp=world // 2, pp=2, vpp=2)
    found["virtual"] = hand_off(rank, SMALL, virtual, 1, BUCKET)
    found["tiny bucket"] = hand_off(rank, SMALL, virtual, min(2, world // 2), TINY_BUCKET)
    return found


@pytest.mark.parametrize("world", [2, 4, 8])
def test_rollout_parameters_are_the_slices_of_the_full_tensors_after_updates_in_place(world):
    results = run_ranks(matrix, world)
    assert len(results[0]) == 2 * len(pairs(world)) + 2
    for rank, found in enumerate(results):
        assert {key: wrong for key, wrong in found.items() if wrong} == {}, f"rank {rank}"
