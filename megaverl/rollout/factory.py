"""Choosing the generation engine. The choice is made before anything heavy is imported, and comes with its reason."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megaverl.config.schema import RolloutConfig
from megaverl.errors import Problem, UserError
from megaverl.models.shape import ModelShape
from megaverl.parallel.layout import Layout
from megaverl.resharding.plan import ReshardPlan
from megaverl.rollout.compat_vllm import unlisted_version, vllm_refusal
from megaverl.rollout.engine import RolloutEngine
from megaverl.rollout.requests import hf_refusal

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class EngineChoice:
    """Which engine runs, and why.

    Attributes:
        name: ``vllm`` or ``hf``.
        reason: one sentence for the log.
        listed: the engine's version is one that this software was tested with.
    """

    name: Literal["vllm", "hf"]
    reason: str
    listed: bool = True

    def __str__(self) -> str:
        return f"rollout engine {self.name}: {self.reason}"


def choose_engine(wanted: Literal["auto", "vllm", "hf"], shape: ModelShape, device: str, tp: int) -> EngineChoice:
    """Decides what ``rollout.engine`` means here; imports neither vLLM nor transformers.

    Args:
        wanted: the configured value.
        device: ``cpu`` or ``cuda``.
        tp: the rollout's tensor parallel size.

    Raises:
        UserError: what was asked for cannot run, or ``auto`` finds neither engine usable; with the reasons.
    """
    no_vllm = vllm_refusal(shape, device, tp)
    no_hf = hf_refusal(tp)
    if wanted == "vllm":
        if no_vllm:
            extra = "cpu" if device == "cpu" else "gpu"
            raise _refused(no_vllm, f"install megaverl[{extra}]" + ("" if no_hf else ", or set rollout.engine=hf"))
        return _vllm("as configured", device)
    if wanted == "hf":
        if no_hf:
            raise _refused(no_hf, "set rollout.engine=vllm, or rollout.tp=1")
        return EngineChoice("hf", "as configured")
    if not no_vllm:
        return _vllm("vLLM is installed and supports the model", device)
    if no_hf:
        raise _refused(f"no engine can generate: {no_vllm}; {no_hf}", "set rollout.tp=1")
    return EngineChoice("hf", f"vLLM cannot be used: {no_vllm}")


def _vllm(reason: str, device: str) -> EngineChoice:
    warning = unlisted_version(device)
    if warning is None:
        return EngineChoice("vllm", reason)
    return EngineChoice("vllm", f"{reason}; {warning}: the self-test decides", listed=False)


def _refused(what: str, fix: str) -> UserError:
    return UserError(Problem(what, "rollout.engine", fix))


def make_engine(
    model_path: str | Path,
    shape: ModelShape,
    plan: ReshardPlan,
    params: Mapping[str, Tensor],
    layout: Layout,
    config: RolloutConfig,
    max_model_len: int,
    device: torch.device | str = "cpu",
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> tuple[RolloutEngine, EngineChoice]:
    """The engine that ``config.engine`` asks for, bound to ``params``, and the choice that was made.

    All ranks call it alike, after torch.distributed and the training model (DDP included) are set up. Arguments as
    `megaverl.rollout.vllm_engine.VllmEngine`.

    Raises:
        UserError: no such engine can run here.
        RunError: the engine did not take the parameters.
    """
    device_type = getattr(device, "type", str(device)).split(":")[0]
    choice = choose_engine(config.engine, shape, device_type, plan.rollout_tp)
    logging.getLogger(__name__).log(logging.INFO if choice.listed else logging.WARNING, "%s", choice)
    if choice.name == "vllm":
        from megaverl.rollout.vllm_engine import VllmEngine

        return VllmEngine(model_path, shape, plan, params, layout, config, max_model_len, device, seed, dtype), choice
    import torch.distributed as dist

    from megaverl.rollout.hf_engine import HfEngine

    rank = dist.get_rank() if dist.is_initialized() else 0
    engine = HfEngine(
        model_path,
        shape,
        plan,
        params,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        rank=rank,
        dtype=dtype,
        free_cache=config.free_cache,
    )
    return engine, choice
