"""Rows of several sources by weight: a pure function of seed and epoch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from megaverl.errors import Problems


class Mixture:
    """Rows of several sources by weight. An epoch has as many rows as all sources together.

    Of them each source gives its share. It goes through its own rows in passes, each in an order of its own, and an
    epoch goes on where the one before it ended; so a source with more than its share is used up over several epochs,
    and one with less goes round again.

    Args:
        parts: rows of each source; the sources follow each other in the data set.
        weights: one for each source, in any unit.

    Raises:
        UserError: the weights do not fit the sources, all that is wrong with them.
    """

    def __init__(self, parts: Sequence[int], weights: Sequence[float]) -> None:
        problems = Problems()
        where = f"data.train_weights=[{', '.join(f'{w:g}' for w in weights)}]"
        if len(parts) != len(weights):
            fix = "give one weight for each entry of data.train_files"
            problems.add(f"{len(weights)} weights for {len(parts)} sources", where=where, fix=fix)
        if any(weight < 0 for weight in weights) or not sum(weights) > 0:
            problems.add("weights must be 0 or more, and one of them more", where=where, fix="give positive numbers")
        for number, (rows, weight) in enumerate(zip(parts, weights, strict=False)):
            if weight > 0 and not rows:
                fix = "leave it out of data.train_files, or look at data.truncation"
                problems.add(f"entry {number} of data.train_files has a weight and no rows", where=where, fix=fix)
        problems.raise_if_any()
        self.parts, self.weights = list(parts), [float(weight) for weight in weights]

    def shares(self, size: int) -> list[int]:
        """Rows of each source in an epoch of ``size`` rows: by largest remainders, so that they add up."""
        exact = [size * weight / sum(self.weights) for weight in self.weights]
        shares = [int(value) for value in exact]
        by_rest = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
        for i in by_rest[: size - sum(shares)]:
            shares[i] += 1
        return shares

    def rows(self, size: int, epoch: int, seed: int, *, shuffle: bool) -> list[int]:
        """The rows of an epoch [size], source by source: a function of its arguments alone."""
        found: list[int] = []
        start = 0
        for source, (rows, share) in enumerate(zip(self.parts, self.shares(size), strict=True)):
            first = epoch * share
            for turn in range(first // max(rows, 1), -(-(first + share) // max(rows, 1))):
                order = list(range(rows))
                if shuffle:
                    random.Random(f"mixture/{seed}/{source}/{turn}").shuffle(order)
                begin = max(first - turn * rows, 0)
                found += [start + row for row in order[begin : first + share - turn * rows]]
            start += rows
        return found

    def state(self) -> dict[str, Any]:
        """What tells it from another (plain JSON values)."""
        return {"parts": self.parts, "weights": self.weights}
