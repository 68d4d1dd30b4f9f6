"""Joining the useful prompts of several batches."""

from dataclasses import dataclass, field

from megaverl.trainer.experience import Experience, join


@dataclass
class Shard:
    """A shard whose reference is its own name."""

    batch: str
    prompts: list[int] = field(default_factory=list)


def make(name, groups, scores):
    n = len(groups)
    half = n // 2
    return Experience(
        shards=[Shard(f"{name}0"), Shard(f"{name}1")],
        places=[(0, i) for i in range(half)] + [(1, i) for i in range(n - half)],
        groups=groups,
        prompt_lengths=[10 * g for g in groups],
        response_lengths=list(range(n)),
        clipped=[False] * n,
        scoring=None,
        scores=scores,
        extras=[{"i": i} for i in range(n)],
        baselines=[float(g) for g in groups],
    )


def test_sequences_of_chosen_prompts_keep_their_places_and_get_new_numbers():
    first = make("a", [0, 0, 2, 2, 1, 1], [1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    second = make("b", [0, 0, 1, 1], [0.0, 0.0, 0.5, 1.0])
    whole = join([(first, [1]), (second, [1, 0])])
    assert whole.groups == [0, 0, 2, 2, 1, 1]
    assert whole.scores == [0.0, 1.0, 0.0, 0.0, 0.5, 1.0]
    assert whole.baselines == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert whole.response_lengths == [4, 5, 0, 1, 2, 3]
    assert [extra["i"] for extra in whole.extras] == [4, 5, 0, 1, 2, 3]
    assert whole.pieces(range(6)) == [("a1", [1, 2]), ("b0", [0, 1]), ("b1", [0, 1])]
    assert whole.lengths[0] == 10 + 4
