"""The sequence batch: prompts + responses packed back to back, without padding.

A per-token column is aligned with the token it speaks of: ``columns["log_probs"][t]`` is the log-probability
of ``tokens[t]`` given the tokens before it in its own sequence. It has no meaning at a sequence's first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

UNIT = "unit"
"""Per-sequence column, int64: sequences with the same number (a pair) stay together on a rank and in a micro-batch."""


@dataclass
class SequenceBatch:
    """Packed sequences.

    Attributes:
        tokens: int64 [tokens], all sequences back to back.
        cu_seqlens: int32 [sequences + 1], where each sequence starts; the last entry is the token count.
        response_mask: bool [tokens], True at the tokens that were generated (or are to be learnt in SFT).
        columns: name -> float32 [tokens].
        per_sequence: name -> Tensor [sequences].
    """

    tokens: Tensor
    cu_seqlens: Tensor
    response_mask: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)
    per_sequence: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def from_lists(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        *,
        response_columns: dict[str, Sequence[Sequence[float]]] | None = None,
        per_sequence: dict[str, Tensor] | None = None,
    ) -> SequenceBatch:
        """Packs pairs of prompt and response ids; response columns are zero over the prompts."""
        lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
        tokens = [t for p, r in zip(prompts, responses, strict=True) for t in (*p, *r)]
        mask = [m for p, r in zip(prompts, responses, strict=True) for m in [False] * len(p) + [True] * len(r)]
        columns = {}
        for name, values in (response_columns or {}).items():
            flat = [v for p, c in zip(prompts, values, strict=True) for v in [0.0] * len(p) + list(c)]
            columns[name] = torch.tensor(flat, dtype=torch.float32)
        return cls(
            tokens=torch.tensor(tokens, dtype=torch.int64),
            cu_seqlens=cumulative(lengths),
            response_mask=torch.tensor(mask, dtype=torch.bool),
            columns=columns,
            per_sequence=dict(per_sequence or {}),
        )

    def __len__(self) -> int:
        """Number of sequences."""
        return self.cu_seqlens.numel() - 1

    @property
    def lengths(self) -> Tensor:
        """int64 [sequences], tokens of each sequence."""
        return self.cu_seqlens.diff().long()

    @property
    def response_lengths(self) -> Tensor:
        """int64 [sequences], tokens of each sequence under the response mask."""
        return segment_sum(self.response_mask.float(), self.cu_seqlens).long()

    @property
    def position_ids(self) -> Tensor:
        """int64 [tokens], position of each token in its own sequence."""
        starts = torch.repeat_interleave(self.cu_seqlens[:-1].long(), self.lengths)
        return torch.arange(self.tokens.numel()) - starts

    @property
    def sequence_ids(self) -> Tensor:
        """int64 [tokens], the number of the sequence that each token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    def select(self, sequences: Sequence[int]) -> SequenceBatch:
        """The batch of these sequences, in the given order."""
        starts, ends = self.cu_seqlens[:-1].tolist(), self.cu_seqlens[1:].tolist()
        spans = [torch.arange(starts[i], ends[i]) for i in sequences]
        index = torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)
        chosen = torch.tensor(list(sequences), dtype=torch.int64)
        return SequenceBatch(
            tokens=self.tokens[index],
            cu_seqlens=cumulative([ends[i] - starts[i] for i in sequences]),
            response_mask=self.response_mask[index],
            columns={k: v[index] for k, v in self.columns.items()},
            per_sequence={k: v[chosen] for k, v in self.per_sequence.items()},
        )

    @staticmethod
    def concat(batches: Sequence[SequenceBatch]) -> SequenceBatch:
        """All sequences of all batches, in order; the batches must have the same columns."""
        first = batches[0]
        return SequenceBatch(
            tokens=torch.cat([b.tokens for b in batches]),
            cu_seqlens=cumulative([n for b in batches for n in b.lengths.tolist()]),
            response_mask=torch.cat([b.response_mask for b in batches]),
            columns={k: torch.cat([b.columns[k] for b in batches]) for k in first.columns},
            per_sequence={k: torch.cat([b.per_sequence[k] for b in batches]) for k in first.per_sequence},
        )


def cumulative(lengths: Sequence[int]) -> Tensor:
    """int32 [len + 1], running sum of ``lengths`` from 0."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)


def segment_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum of ``values`` [tokens] over each sequence -> [sequences]; differentiable, exact for empty sequences."""
    lengths = cu_seqlens.diff().long()
    ids = torch.repeat_interleave(torch.arange(lengths.numel(), device=values.device), lengths.to(values.device))
    return values.new_zeros(lengths.numel()).index_add(0, ids, values)
