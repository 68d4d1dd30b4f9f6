"""Carrying out a reshard plan: copies within the rank, point-to-point messages between ranks.

All ranks put their messages into the same order and start them in it, as many at a time as the staging memory allows.
The oldest unfinished message of the world therefore always has both of its ends started, so no order of events can lock
up. Pieces that lie contiguously are sent from and received into the parameters themselves; only others are staged.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megaverl.errors import RunError
from megaverl.resharding.binding import own_parameters
from megaverl.resharding.geometry import Box
from megaverl.resharding.plan import ParameterClass, Part, ReshardPlan

Verify = Literal["off", "checksum", "full"]
IN_FLIGHT = 64
"""Messages that a rank has started and not finished, at most."""
STAGED_TOGETHER = 4
"""A staged message takes at most this fraction of the staging memory, so that several overlap."""


@dataclass(frozen=True)
class Moved:
    """What one transfer did on this rank.

    Attributes:
        bytes_copied: written from the rank's own training parameters.
        bytes_received: written from messages.
        staging_peak: most bytes that were staged at one time.
    """

    bytes_copied: int = 0
    bytes_received: int = 0
    staging_peak: int = 0


@dataclass(frozen=True)
class _Message:
    """One message; ``order`` is its place among all messages of the world, ``name`` the parameter's in vLLM."""

    order: tuple[int, ...]
    name: str
    peer: int
    tensor: Tensor
    sends: bool
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """What travels."""
        return self.tensor.numel() * self.dtype.itemsize

    @property
    def direct(self) -> bool:
        """The parameter itself is sent from or received into."""
        return self.tensor.is_contiguous() and self.tensor.dtype == self.dtype


class Transfer:
    """Fills the rollout parameters of one rank that are not aliases; all ranks make and call it alike.

    Args:
        plan: the whole reshard plan.
        rank: this rank.
        params: Megatron name -> this rank's training parameter, final in place.
        weights: vLLM's name -> this rank's rollout parameter (`megaverl.resharding.binding.rollout_tensors`).
        bucket_bytes: staging memory; may be smaller than a parameter, or a row of it.
        verify: what is compared after each transfer (`check`).

    Raises:
        RunError: the training parameters do not fit the plan.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        params: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        bucket_bytes: int = 64 << 20,
        verify: Verify = "off",
    ) -> None:
        self.bucket_bytes = bucket_bytes
        self.verify: Verify = verify
        self._rank = rank
        first = next(iter(weights.values()))
        self._device = first.device
        dtypes = next(iter(params.values())).dtype, first.dtype
        self.training_bytes = sum(p.numel() * p.element_size() for p in params.values())
        self._sent_dtype = min(dtypes, key=lambda dtype: dtype.itemsize)  # of two formats the smaller one travels
        own = own_parameters(plan.ranks[rank], params)
        self._copies: list[tuple[str, Tensor, Tensor]] = []
        self._messages: list[_Message] = []
        for c, layer, position, part in _spelled_out(plan.ranks[rank].classes):
            entry = c.entry(part, layer)
            if part.kind == "copy":
                source = own[entry.megatron][entry.source.slices]
                self._copies.append((entry.vllm, source, weights[entry.vllm][entry.target.slices]))
            elif part.source_rank is not None:
                order = c.number, layer, rank, position
                self._add(order, entry.vllm, part.source_rank, weights[entry.vllm], entry.target, sends=False)
        for receiver, c, position, part in plan.sent_by(rank):
            for layer in c.layers:
                entry, order = c.entry(part, layer), (c.number, layer, receiver, position)
                self._add(order, entry.vllm, receiver, own[entry.megatron], entry.source, sends=True)
        self._messages.sort(key=lambda m: m.order)
        self._manifest = _manifest(plan, self._sent_dtype, bucket_bytes)

    def check_manifest(self) -> None:
        """Compares the plans of all ranks, names and sizes included; all ranks call it alike.

        Raises:
            RunError: a rank has another plan (another version of the software, or another configuration).
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        found: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(found, self._manifest)
        other = [str(rank) for rank, manifest in enumerate(found) if manifest != found[0]]
        if other:
            raise RunError(f"ranks {', '.join(other)} have another reshard plan than rank 0: same software everywhere?")

    def run(self) -> Moved:
        """Moves all bytes; on return the rollout parameters are final, and on a GPU all work on the weights is done:
        a failure of it shows here, before a version is committed.

        Raises:
            RuntimeError: of torch.distributed, when a peer has died or the time limit of the world is over.
            RunError: as `check`.
        """
        window = _Window(self.bucket_bytes)
        with torch.no_grad():
            for _, source, target in self._copies:
                target.copy_(source)
            for message in self._messages:
                window.start(message)
            window.finish(0)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            if window.peak:
                torch.cuda.empty_cache()  # the engine's cache comes from outside torch's pool
        copied = sum(target.numel() * target.element_size() for _, _, target in self._copies)
        self.check(self.verify)
        return Moved(copied, window.received, window.peak)

    def check(self, verify: Verify) -> None:
        """Compares every rollout parameter that is not an alias with its source; all ranks call it alike.

        ``checksum`` sends two numbers for each piece, ``full`` sends all bytes once more.

        Raises:
            RunError: names the parameters of this rank that differ.
        """
        if verify == "off":
            return
        look = _checksum if verify == "checksum" else torch.Tensor.contiguous
        window = _Comparison(self.bucket_bytes, look)
        with torch.no_grad():
            wrong = {
                name
                for name, source, target in self._copies
                if not _same_bits(look(source.to(target.dtype)), look(target))
            }
            for message in self._messages:
                window.start(message)
            window.finish(0)
        wrong |= window.wrong
        if wrong:
            names = ", ".join(sorted(wrong))
            raise RunError(f"rank {self._rank}: these rollout parameters are not what training has: {names}")

    def _add(self, order: tuple[int, ...], name: str, peer: int, tensor: Tensor, box: Box, *, sends: bool) -> None:
        limit = max(1, self.bucket_bytes // STAGED_TOGETHER // self._sent_dtype.itemsize)
        for number, piece in enumerate(_divided(box, limit)):
            message = _Message((*order, number), name, peer, tensor[piece.slices], sends, self._sent_dtype)
            self._messages.append(message)


class _Window:
    """Messages that were started and not finished, oldest first, and the memory that they stage in."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.received = 0
        self.peak = 0
        self._staged = 0
        self._open: deque[tuple[_Message, Tensor, int, Any]] = deque()

    def start(self, message: _Message) -> None:
        """Starts ``message``, after waiting for the oldest ones if there is no room for it."""
        need = 0 if message.direct else message.bytes
        self.finish(IN_FLIGHT - 1, self.budget - need)
        self._post(message, self._buffer(message), need)

    def finish(self, keep: int, staged: int | None = None) -> None:
        """Finishes the oldest messages until ``keep`` are open and at most ``staged`` bytes are staged."""
        while self._open and (len(self._open) > keep or (staged is not None and self._staged > staged)):
            message, buffer, need, work = self._open.popleft()
            work.wait()
            if not message.sends:
                self._take(message, buffer)
                self.received += message.bytes
            self._staged -= need

    def _post(self, message: _Message, buffer: Tensor, need: int) -> None:
        self._staged += need
        self.peak = max(self.peak, self._staged)
        work = dist.isend(buffer, message.peer) if message.sends else dist.irecv(buffer, message.peer)
        self._open.append((message, buffer, need, work))

    def _buffer(self, message: _Message) -> Tensor:
        if message.sends or message.direct:
            return message.tensor.to(message.dtype).contiguous()
        return torch.empty_like(message.tensor, dtype=message.dtype, memory_format=torch.contiguous_format)

    def _take(self, message: _Message, buffer: Tensor) -> None:
        if not message.direct:
            message.tensor.copy_(buffer)


class _Comparison(_Window):
    """Sends what ``look`` sees in each piece, and compares it with what ``look`` sees in the receiver's."""

    def __init__(self, budget: int, look: Callable[[Tensor], Tensor]) -> None:
        super().__init__(budget)
        self.look = look
        self.wrong: set[str] = set()

    def start(self, message: _Message) -> None:
        """As `_Window.start`; received pieces are always staged."""
        self.finish(IN_FLIGHT - 1, self.budget - message.bytes)
        self._post(message, self._buffer(message), message.bytes)

    def _buffer(self, message: _Message) -> Tensor:
        seen = self.look(message.tensor.to(message.dtype))
        return seen if message.sends else torch.empty_like(seen)

    def _take(self, message: _Message, buffer: Tensor) -> None:
        if not _same_bits(buffer, self.look(message.tensor.to(message.dtype))):
            self.wrong.add(message.name)


def _manifest(plan: ReshardPlan, dtype: torch.dtype, bucket_bytes: int) -> str:
    """A digest of all that ranks must agree on: who sends which piece of which name to whom, in what form."""
    digest = hashlib.sha256(f"{plan.train}/{plan.rollout_tp}/{dtype}/{bucket_bytes}".encode())
    for rank in plan.ranks:
        for c in rank.classes:
            digest.update(repr((rank.rank, c.row.megatron, c.row.vllm, c.layers, c.shape, c.parts)).encode())
    return digest.hexdigest()


def _checksum(tensor: Tensor) -> Tensor:
    """Two numbers [2] that depend on every bit and on which row it is in."""
    word = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    rows = tensor.contiguous().view(word).reshape(tensor.shape[0], -1).sum(1, dtype=torch.int64)
    return torch.stack([rows.sum(), (rows * torch.arange(1, len(rows) + 1, device=rows.device)).sum()])


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _spelled_out(classes: tuple[ParameterClass, ...]) -> Iterator[tuple[ParameterClass, int, int, Part]]:
    for c in classes:
        for layer in c.layers:
            for position, part in enumerate(c.parts):
                yield c, layer, position, part


def _divided(box: Box, limit: int) -> Iterator[Box]:
    """``box`` in pieces of at most ``limit`` elements, whole rows where a row fits. Depends on its size alone."""
    rows, *rest = box.size
    width = 1
    for size in rest:
        width *= size
    step_rows, step_columns = max(1, limit // width), min(width, limit)
    if not rest:
        for at in range(0, rows, step_rows):
            yield Box((box.start[0] + at,), (min(step_rows, rows - at),))
        return
    for at, column in itertools.product(range(0, rows, step_rows), range(0, width, step_columns)):
        size = min(step_rows, rows - at), min(step_columns, width - column)
        yield Box((box.start[0] + at, box.start[1] + column), size)
