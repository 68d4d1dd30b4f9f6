"""Megatron's data parallel wrapper and (distributed) AdamW around a model part."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
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
    parallel_state,
    torch_adam,
)
from megaverl.parallel.lr_schedule import learning_rate
from megaverl.parallel.offload import HostCopies
from megaverl.parallel.shared_rows import counted_once, sum_shared_rows

SETTINGS = ("betas", "eps", "weight_decay")
"""AdamW's numbers that a resumed run takes from its own configuration."""


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

    def state_dict(self) -> dict[str, Any]:
        """This rank's moments, float32 weight copies and schedule position, for the same layout; not copied."""
        self.to_device()
        return {
            "updates": self.updates,
            "inner": [o.state_dict() for o in self._inner()],
            "main_params": [p.data for p in self._parameters()] if self._keeps_copies() else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`. Load the model's weights as well, before or after.

        Raises:
            UserError: the state is of another layout, model or optimizer.
        """
        self.to_device()
        inner = list(self._inner())
        if len(inner) != len(state["inner"]):
            raise UserError(_wrong_state(f"{len(state['inner'])} optimizers saved, {len(inner)} present"))
        for optimizer, saved in zip(inner, state["inner"], strict=True):
            _check_moments(optimizer, saved)
            settings = [{name: group[name] for name in SETTINGS} for group in optimizer.param_groups]
            optimizer.load_state_dict(saved)
            for group, own in zip(optimizer.param_groups, settings, strict=True):
                group.update(own)  # torch brings the saved ones back; what the configuration says now holds
        self.updates = state["updates"]
        if self._keeps_copies():
            for param, saved in zip(self._parameters(), state["main_params"], strict=True):
                param.data.copy_(saved)

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


def _check_moments(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    own = [p for group in optimizer.param_groups for p in group["params"]]
    ids = [i for group in saved["param_groups"] for i in group["params"]]
    if len(own) != len(ids):
        raise UserError(_wrong_state(f"{len(ids)} parameters saved, {len(own)} present"))
    for param, i in zip(own, ids, strict=True):
        moment = saved["state"].get(i, {}).get("exp_avg")
        if moment is not None and moment.shape != param.shape:
            raise UserError(_wrong_state(f"a moment of {tuple(moment.shape)} saved for a part of {tuple(param.shape)}"))


def _wrong_state(what: str) -> Problem:
    return Problem(
        f"the optimizer state does not fit this model and layout: {what}",
        fix="resume with the layout that the checkpoint was saved with",
    )
