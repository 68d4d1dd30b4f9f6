"""The order of the training rows: a new shuffle in every epoch, a pure function of (seed, epoch), and resumable."""

from __future__ import annotations

import random
from typing import Any

from megaverl.data.mixture import Mixture
from megaverl.errors import Problem, UserError


class EpochSampler:
    """Gives the rows of one global batch at a time.

    The order does not depend on the number of workers: it is made for the global batch, which is divided later.
    Rows at the end of an epoch that do not fill a batch are left out of that epoch (with shuffling, others are
    left out in the next one); ``left_out`` is their number, to be told at the start.

    Args:
        size: rows of the data set.
        batch_size: rows of a global batch.
        seed: seed of the shuffles.
        shuffle: False gives the rows in their own order in every epoch.
        mixture: how rows of several sources are mixed; None takes every row once in an epoch.

    Raises:
        UserError: there are fewer rows than one batch needs.
    """

    def __init__(
        self, size: int, batch_size: int, seed: int, *, shuffle: bool = True, mixture: Mixture | None = None
    ) -> None:
        if size < batch_size:
            fix = f"Set it to at most {size} or give more rows." if size else "Give rows."
            what = f"a batch needs {batch_size} rows, the training data has {size}"
            raise UserError(Problem(what, "key data.train_batch_size", fix))
        self.size, self.batch_size, self.seed, self.shuffle = size, batch_size, seed, shuffle
        self.mixture = mixture
        self.epoch, self.position = 0, 0
        self._order = self.order(0)

    @property
    def batches_per_epoch(self) -> int:
        return self.size // self.batch_size

    @property
    def left_out(self) -> int:
        """Rows that an epoch leaves out because they do not fill a batch."""
        return self.size % self.batch_size

    def order(self, epoch: int) -> list[int]:
        """The rows of one epoch in their order [size]."""
        if self.mixture is not None:
            rows = self.mixture.rows(self.size, epoch, self.seed, shuffle=self.shuffle)
        else:
            rows = list(range(self.size))
        if self.shuffle:
            random.Random(f"rows/{self.seed}/{epoch}").shuffle(rows)
        return rows

    def next_batch(self) -> list[int]:
        """Positions in the data set of the next global batch [batch_size]; goes on into the next epoch by itself."""
        if self.position + self.batch_size > self.size:
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self.order(self.epoch)
        batch = self._order[self.position : self.position + self.batch_size]
        self.position += self.batch_size
        return batch

    def state(self) -> dict[str, Any]:
        """Where it stands, to be stored with a checkpoint (plain JSON values)."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "size": self.size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "mixture": self.mixture.state() if self.mixture else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on exactly where `state` was taken. The batch size may have changed.

        Raises:
            UserError: the state belongs to other rows, another seed or another order.
        """
        keys = {
            "size": "data.train_files",
            "seed": "trainer.seed",
            "shuffle": "data.shuffle",
            "mixture": "data.train_weights",
        }
        own = self.state()
        problems = [
            Problem(
                f"the checkpoint's data has {name} {state.get(name)!r}, this run's has {own[name]!r}",
                f"key {key}",
                "Use the same training data and seed to go on, or start anew with trainer.resume=never.",
            )
            for name, key in keys.items()
            if state.get(name) != own[name]
        ]
        if problems:
            raise UserError(problems)
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._order = self.order(self.epoch)
