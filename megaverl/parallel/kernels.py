"""What fast kernels need, and what of it this machine and its packages have.

`parallel/device.py` makes the choice; this module finds the facts for it and keeps Megatron, which takes Transformer
Engine and Apex wherever they import, from taking them on hardware that cannot run them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megaverl.errors import Problem, UserError

PRETEND = "MEGAVERL_CAPABILITY"
"""Environment variable that makes any machine behave as one with a GPU of this compute capability, e.g. ``6.1``."""

FAST_CAPABILITY = (8, 0)
"""Compute capability from which bf16 arithmetic and flash attention exist (Ampere)."""

OLD_GPU_WHEELS = (
    "torch's wheels for CUDA 12.6 still carry Maxwell, Pascal and Volta (sm_50, sm_60, sm_70; known up to torch 2.14); "
    "those for CUDA 12.8 and newer lost Maxwell and Pascal with torch 2.8 and Volta with torch 2.11"
)

_TRANSFORMER_ENGINE = ("transformer_engine", "transformer_engine_torch")
_APEX = ("apex", "amp_C", "fused_weight_gradient_mlp_cuda")


def capability() -> tuple[int, int] | None:
    """Compute capability of the current GPU, or what `PRETEND` says; None without either.

    Raises:
        UserError: the variable does not hold a compute capability.
    """
    pretended = os.environ.get(PRETEND)
    if pretended:
        match = re.fullmatch(r"(\d+)\.(\d+)", pretended.strip())
        if match is None:
            raise UserError(
                Problem(f"{pretended!r} is not a compute capability", where=PRETEND, fix="write it like 6.1 or 9.0")
            )
        return int(match[1]), int(match[2])
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def is_fast() -> bool:
    """Whether there is a GPU here that has bf16 arithmetic and flash attention."""
    found = capability()
    return torch.cuda.is_available() and found is not None and found >= FAST_CAPABILITY


@functools.cache
def transformer_engine_problem() -> str | None:
    """Why Transformer Engine cannot be used here, or None. Imports it, so ask only on hardware that can run it."""
    return _import_problem("Transformer Engine", "transformer_engine", "transformer_engine.pytorch")


@functools.cache
def flash_problem() -> str | None:
    """Why the backend ``flash`` cannot be used here, or None. Imports what it needs."""
    return (
        _import_problem("torch's attention for packed sequences", "torch", "torch.nn.attention.varlen")
        or _import_problem("Triton", "triton", "triton.language")
        or _import_problem("Liger", "liger_kernel", "liger_kernel.ops.rms_norm")
    )


def _import_problem(what: str, package: str, *modules: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return f"{what} is not installed"
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a package built for another machine raises whatever it likes; we pass it on
            return f"{what} does not import ({type(error).__name__}: {error})"
    return None


def apex_folders() -> list[str]:
    """Folders of the importable package ``apex``; empty without one. Imports nothing."""
    spec = importlib.util.find_spec("apex")  # None also when it is hidden
    return list(spec.submodule_search_locations or ()) if spec else []


def is_nvidia_apex(folders: Sequence[Path | str]) -> bool:
    """Whether these folders of a package ``apex`` are NVIDIA's; PyPI has an unrelated package of that name."""
    return any((Path(f) / part).is_dir() for f in folders for part in ("multi_tensor_apply", "optimizers"))


def wheel_problem(capability: tuple[int, int], arch_list: Sequence[str]) -> str | None:
    """Why a torch build cannot run on a GPU, or None.

    Machine code runs on the same major capability with the same or a newer minor one; PTX on any newer.

    Args:
        arch_list: what `torch.cuda.get_arch_list` gives, e.g. ``["sm_80", "sm_90", "compute_90"]``.
    """
    for arch in arch_list:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", arch)
        if match is None:
            continue
        kind, made_for, exact = match[1], (int(match[2]), int(match[3])), bool(match[4])
        if made_for == capability:
            return None
        if not exact and made_for < capability and (kind == "compute" or made_for[0] == capability[0]):
            return None
    have = ", ".join(arch_list) or "no GPU code"
    return f"this torch has no code for compute capability {capability[0]}.{capability[1]} (it has {have})"


def prepare_megatron() -> None:
    """To be called before megatron.core is imported: settles which optional packages it will find.

    On hardware without fast kernels Transformer Engine and Apex are hidden from this process, as they are where they
    do not import or, as PyPI's ``apex``, are something else. On fast hardware without Apex, `add_product` stands in for
    its module of fused weight gradients, which Megatron's output layer asks for.
    """
    fast = is_fast()
    if not fast or transformer_engine_problem() is not None:
        _hide(_TRANSFORMER_ENGINE)
    if not fast or not is_nvidia_apex(apex_folders()):
        _hide(_APEX)
        if fast:
            name = "fused_weight_gradient_mlp_cuda"
            module = types.ModuleType(name, "Stand-in of megaverl for the module of that name in NVIDIA's apex.")
            module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = _weight_gradient
            sys.modules[name] = module


def _hide(packages: Sequence[str]) -> None:
    """Makes imports of the packages raise ImportError, also of what a failed import left behind."""
    for name in [n for n in sys.modules if n.split(".")[0] in packages]:
        del sys.modules[name]
    for name in packages:
        sys.modules[name] = None  # type: ignore[assignment]  # Python's own mark of what must not be imported


def _weight_gradient(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    add_product(main_grad, grad_output, inputs)


def add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """``into [m, n] += left [t, m]^T @ right [t, n]``, in one matrix product where the hardware's library can.

    ``into`` may be float32 with 16-bit factors; the sum is then never rounded to 16 bits.
    """
    if into.dtype == left.dtype:
        into.addmm_(left.t(), right)
    elif into.is_cuda and _adds_into_float32():
        torch.ops.aten.addmm.dtype_out(into, left.t(), right, into.dtype, out=into)
    elif into.is_cuda and transformer_engine_problem() is None:
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        general_gemm(right, left, out_dtype=into.dtype, layout="NT", out=into, accumulate=True, grad=True)
    else:
        into.add_(wide_product(left.t(), right, into.dtype))


def wide_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """``left [m, k] @ right [k, n]`` in ``dtype``, not rounded to the factors' type on the way where there is a GPU."""
    if left.dtype == dtype:
        return torch.mm(left, right)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return torch.mm(left.to(dtype), right.to(dtype))


@functools.cache
def _adds_into_float32() -> bool:
    """Whether this torch multiplies 16-bit matrices and adds to a float32 one in one call."""
    from megaverl.parallel.device import SHORT

    factor = torch.ones(16, 16, dtype=SHORT, device="cuda")
    target = torch.ones(16, 16, device="cuda")
    try:
        torch.ops.aten.addmm.dtype_out(target, factor, factor, target.dtype, out=target)
    except (RuntimeError, AttributeError):  # older releases lack the call or refuse mixed types
        return False
    return True
