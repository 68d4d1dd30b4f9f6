"""Megatron's data parallel wrapper and (distributed) AdamW around a model part."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megaverl.config.schema import OptimizerConfig
from megaverl.errors import Problem, UserError
from megaverl.parallel.compat_megatron import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    MegatronOptimizerConfig,
    clip_grad_by_total_norm_fp32,
    finalize_model_grads,
    get_megatron_optimizer,
    optimizer_part,
    parallel_state,
    torch_adam,
)
from megaverl.parallel.lr_schedule import learning_rate
from megaverl.parallel.offload import HostCopies
from megaverl.parallel.shared_rows import counted_once, sum_shared_rows

NOT_MOMENTS = ("start", "end", "main", "group_step")
"""Keys of a parameter's saved slice that are no state of the inner optimizer."""


def wrap_data_parallel(model: nn.Module, *, distributed_optimizer: bool) -> DistributedDataParallel:
    """Wraps ``model`` so that gradients are accumulated in float32 and summed over DP at the end of an update.

    With the distributed optimizer the parameters move into one flat buffer here; their storage is final afterwards.
    Gradients are summed, not averaged, because losses carry global denominators (`calculate_per_token_loss` makes
    Megatron's own factor 1).
    """
    wrapped = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=distributed_optimizer,
            check_for_nan_in_grad=False,  # a non-finite norm skips the update, see `Optimizer.step`
        ),
        model,
    )
    model.config.finalize_model_grads_func = _sum_gradients
    return wrapped


def _sum_gradients(model: list[nn.Module], num_tokens: torch.Tensor | None = None, **groups: Any) -> None:
    """Megatron's reductions over DP, TP (norms) and PP (tied embedding), without its division by the number of tokens,
    and the sum over the TP ranks that hold the same KV head."""
    finalize_model_grads(model, None, **groups)
    for chunk in model:
        sum_shared_rows(chunk, parallel_state.get_tensor_model_parallel_group())


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        grad_norm: norm of the whole gradient over all ranks, before clipping.
        lr: learning rate of this step.
        applied: False when the norm was not finite; weights and moments are then untouched.
    """

    grad_norm: float
    lr: float
    applied: bool


class Optimizer:
    """AdamW over the wrapped model chunks of a rank; weights are complete on every rank when `step` returns.

    Its moments and float32 weight copies may wait in host memory (`to_host`); every method that needs them brings
    them back.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], config: OptimizerConfig, total_updates: int) -> None:
        self.config = config
        self._chunks = list(chunks)
        self.total_updates = total_updates
        self.updates = 0
        megatron = self._chunks[0].config
        # Transformer Engine's (or Apex's) fused Adam belongs to its backend, torch's to the others.
        with contextlib.nullcontext() if megatron.kernels == "te" else torch_adam():
            self._megatron = get_megatron_optimizer(
                MegatronOptimizerConfig(
                    optimizer="adam",
                    lr=config.lr,
                    min_lr=config.lr * config.min_lr_ratio,
                    weight_decay=config.weight_decay,
                    adam_beta1=config.beta1,
                    adam_beta2=config.beta2,
                    adam_eps=config.eps,
                    clip_grad=config.clip_grad,
                    bf16=megatron.bf16,
                    params_dtype=megatron.params_dtype,
                    use_distributed_optimizer=config.distributed,
                ),
                self._chunks,
                use_gloo_process_groups=False,
            )
        if megatron.kernels == "flash":
            for group in (g for o in self._inner() for g in o.param_groups):
                group.update(
                    fused=True, foreach=False
                )  # one kernel for all parameters; Megatron passes no such wish on
        for group in self._megatron.param_groups:
            # Megatron marks norms and biases with wd_mult 0 and leaves the product to its scheduler.
            group["weight_decay"] = config.weight_decay * group["wd_mult"]

        self._copies = HostCopies(self._own_tensors)

    def to_host(self) -> int:
        """Moments and float32 weight copies leave the GPU; returns the bytes freed. Nothing to do on a CPU."""
        return self._copies.to_host()

    def to_device(self) -> None:
        """The inverse of `to_host`; does nothing when they are there."""
        self._copies.to_device()

    def zero_grad(self) -> None:
        """Forgets the gradients of the last step (the model's gradient buffer is cleared by its owner)."""
        self._megatron.zero_grad()

    def step(self) -> StepResult:
        """Clips and steps with the gradients in the model's buffer; collective over the model's ranks.

        The schedule goes on after a skipped step, so that it stays tied to the run's steps.
        """
        self.to_device()
        lr = learning_rate(self.config, self.updates, self.total_updates)
        for group in self._megatron.param_groups:
            group["lr"] = lr
        overflow = self._megatron.prepare_grads()
        with counted_once(self._chunks):
            norm = float(self._megatron.get_grad_norm())
        applied = not overflow and math.isfinite(norm)
        if applied:
            if self.config.clip_grad > 0:
                clip_grad_by_total_norm_fp32(self._parameters(), max_norm=self.config.clip_grad, total_norm=norm)
            self._megatron.step_with_ready_grads()
        self.updates += 1
        return StepResult(norm, lr, applied)

    def reload_weights(self) -> None:
        """Takes over model weights that were written in place from outside (the optimizer may keep float32 copies)."""
        self.to_device()
        self._megatron.reload_model_params()

    def owned(self, names: Mapping[str, nn.Parameter]) -> dict[str, tuple[int, int]]:
        """Which elements of each named parameter (start, end; flattened) this rank keeps moments of."""
        return {name: (part.start, part.end) for name, part in self._parts(names).items()}

    def state_dict(self, names: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        """Schedule position, and by parameter moments and float32 weights of the elements this rank owns; not copied.

        Args:
            names: the model's parameters by name, in any order.
        """
        self.to_device()
        slices = {}
        for name, part in self._parts(names).items():
            state = part.optimizer.state.get(part.tensor, {})
            found = {key: value for key, value in state.items() if value is not None}
            if "step" in part.group:  # fused optimizers count in the group
                found["group_step"] = part.group["step"]
            if self._keeps_copies():
                found["main"] = part.tensor.data
            slices[name] = {"start": part.start, "end": part.end, **found}
        return {"updates": self.updates, "slices": slices}

    def load_state_dict(self, state: dict[str, Any], names: Mapping[str, nn.Parameter]) -> None:
        """The inverse of `state_dict`. Load the model's weights as well, before or after.

        Raises:
            UserError: the state is of another layout, model or optimizer.
        """
        self.to_device()
        parts, slices = self._parts(names), state["slices"]
        _check_slices(parts, slices)
        for inner in self._inner():
            mine = {id(part.tensor): _shaped(slices[name], part) for name, part in parts.items()}
            saved = inner.state_dict()
            groups = zip(inner.param_groups, saved["param_groups"], strict=True)
            numbers = {
                number: mine[id(param)]
                for group, numbered in groups
                for param, number in zip(group["params"], numbered["params"], strict=True)
            }
            saved["state"] = {
                number: {key: value for key, value in found.items() if key not in NOT_MOMENTS}
                for number, found in numbers.items()
                if "exp_avg" in found
            }
            for numbered in saved["param_groups"]:
                steps = [numbers[n]["group_step"] for n in numbered["params"] if "group_step" in numbers[n]]
                if steps:
                    numbered["step"] = steps[0]
            inner.load_state_dict(saved)
        self.updates = state["updates"]
        if self._keeps_copies():
            for name, part in parts.items():
                if "main" in slices[name]:
                    part.tensor.data.copy_(slices[name]["main"].view(part.tensor.shape))

    def _parts(self, names: Mapping[str, nn.Parameter]) -> dict[str, _Part]:
        parts = {}
        for megatron in self._megatron.chained_optimizers:
            if megatron.optimizer is None:
                continue
            groups = {id(p): group for group in megatron.optimizer.param_groups for p in group["params"]}
            for name, param in names.items():
                found = optimizer_part(megatron, param)
                if found is not None:
                    parts[name] = _Part(megatron.optimizer, groups[id(found[0])], *found)
        return parts

    def _inner(self) -> list[torch.optim.Optimizer]:
        return [o.optimizer for o in self._megatron.chained_optimizers if o.optimizer is not None]

    def _parameters(self) -> list[nn.Parameter]:
        return [p for o in self._megatron.chained_optimizers for p in o.get_parameters()]

    def _own_tensors(self) -> Iterator[torch.Tensor]:
        """Moments and weight copies; not the weights that the optimizer updates in place, which the model owns."""
        owned = {p.untyped_storage().data_ptr() for chunk in self._chunks for p in chunk.parameters()}
        for optimizer in self._inner():
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))
        yield from (p.data for p in self._parameters() if p.untyped_storage().data_ptr() not in owned)

    def _keeps_copies(self) -> bool:
        return bool(self._megatron.config.bf16)


@dataclass(frozen=True)
class _Part:
    """What an inner optimizer steps of one parameter: elements ``start`` to ``end``, as ``tensor`` in ``group``."""

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    tensor: torch.Tensor
    start: int
    end: int


def _shaped(saved: Mapping[str, Any], part: _Part) -> dict[str, Any]:
    """The slice with moments of the shape that is stepped: flat in the distributed optimizer, else the parameter's."""
    moments = {key: saved[key].reshape(part.tensor.shape) for key in ("exp_avg", "exp_avg_sq") if key in saved}
    return {**saved, **moments}


def _check_slices(parts: Mapping[str, _Part], slices: Mapping[str, Mapping[str, Any]]) -> None:
    if parts.keys() != slices.keys():
        odd = sorted(parts.keys() ^ slices.keys())
        raise UserError(_wrong_state(f"{len(slices)} parameters saved, {len(parts)} present, e.g. {odd[0]}"))
    for name, part in parts.items():
        saved = slices[name]
        if (saved["start"], saved["end"]) != (part.start, part.end):
            raise UserError(
                _wrong_state(f"{name}: {saved['start']}:{saved['end']} saved, {part.start}:{part.end} present")
            )
        moment = saved.get("exp_avg")
        if moment is not None and moment.numel() != part.tensor.numel():
            raise UserError(
                _wrong_state(f"{name}: a moment of {tuple(moment.shape)} for a part of {tuple(part.tensor.shape)}")
            )


def _wrong_state(what: str) -> Problem:
    return Problem(
        f"the optimizer state does not fit this model and layout: {what}",
        fix="resume with the layout that the checkpoint was saved with",
    )
