"""What every trained model on this rank shares: its parameters by name, passes over packed sequences, updates.

`models/policy.py` puts log-probabilities on top of it, `models/critic.py` values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaverl.config.schema import OptimizerConfig
from megaverl.data.batch import UNIT, SequenceBatch
from megaverl.data.packing import micro_batches as cut_micro_batches
from megaverl.models.family import weight_map
from megaverl.models.gpt import PackedGPTModel, Recompute, build_gpt
from megaverl.models.packed import PackLayout
from megaverl.models.shape import ModelShape
from megaverl.parallel.device import Device
from megaverl.parallel.layout import Layout
from megaverl.parallel.micro_batches import fill_pipeline, fill_pipeline_with_units
from megaverl.parallel.offload import GradientBuffers, HostCopies
from megaverl.parallel.optimizer import Optimizer, wrap_data_parallel
from megaverl.parallel.schedule import evaluate_micro_batches, train_micro_batches
from megaverl.parallel.setup import current_grid

LOCAL_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class UpdateResult:
    """What one optimizer update did.

    Attributes:
        grad_norm: norm of the whole gradient over all ranks, before clipping.
        lr: learning rate of the update.
        sums: what the loss function returned, added over this rank's micro-batches (not over DP ranks).
        applied: False when the gradient was not finite; the weights are then unchanged.
    """

    grad_norm: float
    lr: float
    sums: dict[str, Tensor]
    applied: bool


@dataclass(frozen=True)
class Pack:
    """One micro-batch, ready for the model.

    Attributes:
        batch: its sequences, on the device; none in a micro-batch that only fills up a pipeline.
        tokens: int64 [1, tokens], with filler behind where sequence parallelism needs a multiple of tp, and in an
            empty micro-batch.
        rows: int64 [n], the tokens to score: response tokens that have a token before them in their sequence.
        layout: positions and attention buckets, filler included.
    """

    batch: SequenceBatch
    tokens: Tensor
    rows: Tensor
    layout: PackLayout

    def place(self, values: Tensor) -> Tensor:
        """[n], one value per row -> [tokens], 0 at all other tokens."""
        return values.new_zeros(self.batch.tokens.numel()).index_copy(0, self.rows, values)


class PackedModel:
    """This rank's part of a model over packed sequences. All ranks call every method alike."""

    MODEL: type[PackedGPTModel] = PackedGPTModel
    """The Megatron model to build."""

    def __init__(
        self,
        shape: ModelShape,
        layout: Layout,
        device: Device,
        *,
        trainable: bool,
        sequence_parallel: bool = False,
        recompute: Recompute = "none",
    ) -> None:
        """Builds the part for this rank, randomly initialised; `init_model_parallel` must have run.

        Args:
            recompute: activations that the backward pass computes again.
        """
        self.shape, self.layout, self.device = shape, layout, device
        self.grid = current_grid(layout)
        self.sequence_parallel = sequence_parallel and layout.tp > 1
        self.chunks = build_gpt(
            shape,
            layout,
            device,
            sequence_parallel=self.sequence_parallel,
            at=self.grid.at,
            recompute=recompute if trainable else "none",
            model_class=self.MODEL,
        )
        self.trainable = trainable
        if not trainable:
            for chunk in self.chunks:
                chunk.requires_grad_(False)
        self._runs: list[nn.Module] = list(self.chunks)  # what the schedule runs; once training is prepared, wrapped
        self.optimizer: Optimizer | None = None
        self._gradients: GradientBuffers | None = None
        self._weights = HostCopies(
            lambda: (p for chunk in self.chunks for p in chunk.parameters()), constant=not trainable
        )

    @property
    def model(self) -> PackedGPTModel:
        """The last model chunk of this rank: the only one without a virtual pipeline, the output's on the last rank."""
        return self.chunks[-1]

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Parameters of this pipeline rank by the names of the weight map (layer numbers are global).

        With several stages the last one of a tied model holds a copy of the embedding; it has the embedding's name.
        Parameters that Transformer Engine calls differently have the names that they have without it.
        """
        self._weights.to_device()
        rows = weight_map(self.shape).expand()
        usual = {name: row.megatron for row in rows for name in row.alternatives}
        found = {}
        for chunk in self.chunks:
            layers = chunk.decoder.layers

            def numbered(name: str, layers: nn.ModuleList = layers) -> str:
                if name == "output_layer.weight" and self.shape.tied:
                    return "embedding.word_embeddings.weight"
                name = LOCAL_LAYER.sub(lambda m: f"decoder.layers.{layers[int(m[1])].layer_number - 1}.", name)
                return usual.get(name, name)

            found.update((numbered(name), p) for name, p in chunk.named_parameters())
        return found

    def prepare_training(self, optimizer: OptimizerConfig, total_updates: int) -> None:
        """Wraps the model for data parallelism and makes the optimizer. Parameter storage is final afterwards.

        Args:
            total_updates: optimizer updates of the whole run, for the learning-rate schedule.
        """
        if not self.trainable:
            raise RuntimeError("a frozen model cannot be trained")
        if self.optimizer is not None:
            raise RuntimeError("prepare_training was called before")
        wrapped = [wrap_data_parallel(chunk, distributed_optimizer=optimizer.distributed) for chunk in self.chunks]
        self._runs = list(wrapped)
        self.optimizer = Optimizer(wrapped, optimizer, total_updates)
        self._gradients = GradientBuffers(wrapped)

    def release_for_rollout(self, *, optimizer: bool, gradients: bool, parameters: bool = False) -> int:
        """Frees the memory of what only training needs, until training asks for it again; returns the bytes freed.

        Whoever needs something brings it back: a pass and `parameters_by_name` the weights, `state_dict` the
        optimizer's part, an update all of it.

        Args:
            optimizer: moments and float32 weight copies go to pinned host memory; nothing on a CPU.
            gradients: the gradient buffers are freed, without a copy.
            parameters: the weights go to pinned host memory too; not for a model that a rollout engine serves from.
        """
        freed = 0
        if self.optimizer is not None and optimizer:
            freed += self.optimizer.to_host()
        if self._gradients is not None and gradients:
            freed += self._gradients.free()
        if parameters:
            freed += self._weights.to_host()
        if freed and self.device.kind == "cuda":
            torch.cuda.empty_cache()  # the rollout engine allocates outside torch's pool
        return freed

    def claim_for_training(self) -> None:
        """Brings back all that `release_for_rollout` freed; what the gradients hold is not defined then."""
        self._weights.to_device()
        if self.optimizer is not None:
            self.optimizer.to_device()
        if self._gradients is not None:
            self._gradients.allocate()

    def weights_written(self) -> None:
        """To be called after parameters were written in place from outside, unless that was the first thing done."""
        self._weights.changed()
        if self.optimizer is not None:
            self.optimizer.reload_weights()

    def state_dict(self) -> dict[str, Any]:
        """Optimizer and schedule state of this rank, by parameter and slice (weights are not in it)."""
        if self.optimizer is None:
            raise RuntimeError("there is no optimizer before prepare_training")
        return self.optimizer.state_dict(self.parameters_by_name())

    def owned_elements(self) -> dict[str, tuple[int, int]]:
        """Which elements of each parameter (start, end; flattened) this rank's optimizer keeps moments of."""
        if self.optimizer is None:
            raise RuntimeError("there is no optimizer before prepare_training")
        return self.optimizer.owned(self.parameters_by_name())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`. Raises UserError when the state is of another layout or model."""
        if self.optimizer is None:
            raise RuntimeError("there is no optimizer before prepare_training")
        self.optimizer.load_state_dict(state, self.parameters_by_name())

    def _evaluate(
        self,
        batch: SequenceBatch,
        names: Sequence[str],
        max_tokens: int,
        score: Callable[[Tensor, Pack], Sequence[Tensor | None]],
    ) -> dict[str, Tensor]:
        """Passes without gradient over the whole batch.

        Args:
            names: of the columns that come out.
            max_tokens: tokens to put through the model at once.
            score: (the model's output, pack) -> at least one [tokens] per name; called on the last stage.

        Returns:
            name -> float32 [tokens] on the CPU, aligned with the batch, on every rank of the replica.
        """
        self._weights.to_device()
        groups, packs = self._packs(batch, max_tokens)

        def forward(model: nn.Module, pack: Pack) -> tuple[Tensor, Callable[[Tensor], dict[str, Tensor]]]:
            def finish(output: Tensor) -> dict[str, Tensor]:
                if not len(pack.batch):
                    return {}
                return {name: value.cpu() for name, value in zip(names, score(output, pack))}

            return model(pack.tokens, pack.layout), finish

        found = evaluate_micro_batches(self._runs, packs, forward)
        result = torch.zeros(len(names), batch.tokens.numel())
        for group, values in zip(groups, found):
            if not group:
                continue
            at = _token_positions(batch, group)
            for row, name in enumerate(names):
                result[row, at] = values[name].float()
        self._share_from_last_stage(result)
        return dict(zip(names, result))

    def _train(
        self,
        batch: SequenceBatch,
        micro_batches: Sequence[Sequence[int]],
        loss: Callable[[Tensor, Pack], tuple[Tensor, dict[str, Tensor]]],
    ) -> UpdateResult:
        """One optimizer update with this rank's share of a mini-batch.

        Args:
            loss: (the model's output, pack) -> (loss, sums), on the last stage; divided by global denominators already.
        """
        if self.optimizer is None:
            raise RuntimeError("call prepare_training before update")
        self.claim_for_training()
        for run in self._runs:
            run.zero_grad_buffer()
        self.optimizer.zero_grad()
        groups = self._fill(micro_batches, batch, batch.per_sequence.get(UNIT))
        packs = [self._pack(batch.select(group)) for group in groups]

        def finish(pack: Pack, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            if not len(pack.batch):
                return output.sum() * 0, {}
            value, sums = loss(output, pack)
            return value, {name: torch.as_tensor(part).detach() for name, part in sums.items()}

        def forward(model: nn.Module, pack: Pack) -> tuple[Tensor, Callable[[Tensor], Any]]:
            return model(pack.tokens, pack.layout), partial(finish, pack)

        sums: dict[str, Tensor] = {}
        for one in train_micro_batches(self._runs, packs, forward):
            for name, value in one.items():
                sums[name] = sums[name] + value if name in sums else value
        step = self.optimizer.step()
        return UpdateResult(step.grad_norm, step.lr, self._sums_from_last_stage(sums), step.applied)

    def _packs(self, batch: SequenceBatch, max_tokens: int) -> tuple[list[list[int]], list[Pack]]:
        """The batch in micro-batches of at most ``max_tokens``: the sequence numbers of each, and each made ready."""
        groups = self._fill(cut_micro_batches(batch.lengths.tolist(), max_tokens), batch)
        return groups, [self._pack(batch.select(group)) for group in groups]

    def _fill(
        self, groups: Sequence[Sequence[int]], batch: SequenceBatch, units: Tensor | None = None
    ) -> list[list[int]]:
        """As many micro-batches as the schedule needs: any number, or a multiple of pp with a virtual pipeline.

        Args:
            units: [sequences]; those with the same number stay together.
        """
        multiple, lengths = self.layout.pp if self.layout.vpp > 1 else 1, batch.lengths.tolist()
        if units is not None:
            return fill_pipeline_with_units(groups, lengths, units.tolist(), multiple)
        return fill_pipeline(groups, lengths, multiple)

    def _pack(self, batch: SequenceBatch) -> Pack:
        device = self.device.torch_device
        lengths, tokens = batch.lengths.tolist(), batch.tokens
        rows = (batch.response_mask & (batch.position_ids > 0)).nonzero().squeeze(1)
        multiple = self.layout.tp if self.sequence_parallel else 1
        filler = -tokens.numel() % multiple if len(batch) else multiple
        if filler:  # a sequence of its own, whose hidden states are dropped
            lengths.append(filler)
            tokens = torch.cat([tokens, tokens.new_zeros(filler)])
        return Pack(
            batch=_to(batch, device),
            tokens=tokens.to(device).unsqueeze(0),
            rows=rows.to(device),
            layout=PackLayout.of(lengths, device),
        )

    def _share_from_last_stage(self, result: Tensor) -> None:
        if self.layout.pp == 1:
            return
        moved = result.to(self.device.torch_device)
        dist.broadcast(moved, group_src=self.layout.pp - 1, group=self.grid.pp)
        result.copy_(moved)

    def _sums_from_last_stage(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.layout.pp == 1:
            return sums
        box = [{name: value.cpu() for name, value in sums.items()}]
        dist.broadcast_object_list(box, group_src=self.layout.pp - 1, group=self.grid.pp)
        return box[0]


def _token_positions(batch: SequenceBatch, sequences: Sequence[int]) -> Tensor:
    starts = batch.cu_seqlens.tolist()
    return torch.cat([torch.arange(starts[s], starts[s + 1]) for s in sequences])


def _to(batch: SequenceBatch, device: torch.device) -> SequenceBatch:
    if device.type == "cpu":
        return batch
    return SequenceBatch(
        tokens=batch.tokens.to(device),
        cu_seqlens=batch.cu_seqlens.to(device),
        response_mask=batch.response_mask.to(device),
        columns={k: v.to(device) for k, v in batch.columns.items()},
        per_sequence={k: v.to(device) for k, v in batch.per_sequence.items()},
    )
