import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaverl.models.packed import FILL, SLACK, PackLayout, from_slots, to_slots

lengths_of_packs = st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any)


@given(lengths_of_packs)
def test_every_token_has_one_slot_in_a_row_of_its_own_sequence(lengths):
    layout = PackLayout.of(lengths)
    tokens = torch.arange(sum(lengths))
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    assert torch.equal(from_slots(to_slots(tokens, layout), layout), tokens)
    home = layout.home if layout.home is not None else tokens
    assert home.unique().numel() == tokens.numel()
    assert torch.equal(layout.positions, torch.cat([torch.arange(n) for n in lengths]))
    for bucket in layout.buckets:
        inside = (home >= bucket.start) & (home < bucket.start + bucket.sequences * bucket.length)
        row, column = (home[inside] - bucket.start).div(bucket.length, rounding_mode="floor"), None
        column = (home[inside] - bucket.start) % bucket.length
        assert torch.equal(column, layout.positions[inside])  # real tokens first, padding behind
        for r in range(bucket.sequences):
            assert sequence[inside][row == r].unique().numel() == 1


@given(lengths_of_packs)
def test_padding_is_bounded(lengths):
    layout = PackLayout.of(lengths)
    assert sum(b.sequences * b.length for b in layout.buckets) == layout.slots.numel()
    assert sum(b.sequences for b in layout.buckets) == sum(n > 0 for n in lengths)
    shortest = lambda b: min(  # noqa: E731
        n for n in lengths if n and n <= b.length and n >= min(FILL * b.length, b.length - SLACK)
    )
    for bucket in layout.buckets:
        assert bucket.length - shortest(bucket) <= max((1 - FILL) * bucket.length, SLACK)


def test_equal_lengths_are_not_moved():
    layout = PackLayout.of([5, 5, 5])
    x = torch.randn(15, 2)
    assert layout.home is None
    assert to_slots(x, layout) is x
    assert from_slots(x, layout) is x


def test_gradients_of_the_way_there_and_back():
    layout = PackLayout.of([3, 40, 7, 40])
    x = torch.randn(90, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(90, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda t: (from_slots(to_slots(t, layout) * 2, layout) * weight).sum(), (x,))


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [100, 1], [0, 4, 0]])
def test_corner_cases(lengths):
    layout = PackLayout.of(lengths)
    assert layout.positions.numel() == sum(lengths)
