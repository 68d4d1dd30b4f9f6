"""The choice of hardware, number format and kernels, made once per worker.

The only module of megaverl that names a 16-bit number format.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch

from megaverl.errors import Problems

Precision = Literal["auto", "fp32", "bf16"]
Kernels = Literal["auto", "te", "flash", "eager"]
Kind = Literal["auto", "cuda", "cpu"]

FAST_CAPABILITY = (8, 0)
"""Compute capability from which bf16 arithmetic and flash attention exist (Ampere)."""


@dataclass(frozen=True)
class Device:
    """What a worker computes on, and how.

    Attributes:
        kind: ``cpu`` or ``cuda``.
        dtype: number format of the weights.
        backend: ``te`` (Transformer Engine), ``flash`` (torch flash attention, Triton) or ``eager`` (plain torch).
        reason: why this backend and number format, in one sentence.
    """

    kind: Literal["cpu", "cuda"]
    dtype: torch.dtype
    backend: Literal["te", "flash", "eager"]
    reason: str

    @property
    def torch_device(self) -> torch.device:
        """The device of new tensors: the current GPU, or the CPU."""
        return torch.device("cpu") if self.kind == "cpu" else torch.device("cuda", torch.cuda.current_device())

    @property
    def collective_backend(self) -> str:
        """Backend of torch.distributed: gloo for CPU tensors, NCCL for GPU tensors."""
        return "gloo" if self.kind == "cpu" else "cpu:gloo,cuda:nccl"


@dataclass(frozen=True)
class Hardware:
    """What the choice depends on; tests pass other machines than their own.

    Attributes:
        capability: compute capability of the GPU, or None without one.
        transformer_engine: whether Transformer Engine is installed.
    """

    capability: tuple[int, int] | None
    transformer_engine: bool

    @classmethod
    def here(cls) -> Hardware:
        """This machine's hardware and packages."""
        return cls(
            capability=torch.cuda.get_device_capability() if torch.cuda.is_available() else None,
            transformer_engine=importlib.util.find_spec("transformer_engine") is not None,
        )


def choose_device(
    precision: Precision = "auto", kernels: Kernels = "auto", device: Kind = "auto", hardware: Hardware | None = None
) -> Device:
    """Picks hardware, number format and kernel backend from what the user asked for and what there is.

    Raises:
        UserError: a wish that the hardware or the installed packages cannot meet; all of them at once.
    """
    hardware = hardware or Hardware.here()
    problems = Problems()
    kind = _kind(device, hardware, problems)
    backend, why = _backend(kernels, kind, hardware, problems)
    dtype = _dtype(precision, kind, hardware, problems)
    problems.raise_if_any()
    return Device(kind=kind, dtype=dtype, backend=backend, reason=why)


def _kind(device: Kind, hardware: Hardware, problems: Problems) -> Literal["cpu", "cuda"]:
    if device == "cuda" and hardware.capability is None:
        problems.add("no GPU is visible to torch", where="cluster.device=cuda", fix="use cluster.device=cpu or auto")
        return "cpu"
    if device == "auto":
        return "cuda" if hardware.capability else "cpu"
    return device


def _fast(kind: str, hardware: Hardware) -> bool:
    return kind == "cuda" and hardware.capability is not None and hardware.capability >= FAST_CAPABILITY


def _what(kind: str, hardware: Hardware) -> str:
    if kind == "cpu" or hardware.capability is None:
        return "a CPU"
    return "a GPU of compute capability {}.{}".format(*hardware.capability)


def _backend(kernels: Kernels, kind: str, hardware: Hardware, problems: Problems) -> tuple[Literal["eager"], str]:
    where, fix = f"actor.kernels={kernels}", "use actor.kernels=eager or auto"
    if kernels in ("te", "flash"):
        if not _fast(kind, hardware):
            problems.add(
                f"needs compute capability 8.0 or newer; this is {_what(kind, hardware)}", where=where, fix=fix
            )
        elif kernels == "te" and not hardware.transformer_engine:
            problems.add("Transformer Engine is not installed", where=where, fix="pip install megaverl[te], or " + fix)
        else:
            problems.add("this backend is not implemented yet", where=where, fix=fix)
    if kernels == "eager":
        return "eager", f"asked for by {where}"
    if _fast(kind, hardware):
        return "eager", f"{_what(kind, hardware)} could run faster kernels, but only eager is implemented yet"
    return "eager", f"{_what(kind, hardware)} has neither flash attention nor Transformer Engine"


def _dtype(precision: Precision, kind: str, hardware: Hardware, problems: Problems) -> torch.dtype:
    if precision == "fp32":
        return torch.float32
    if _fast(kind, hardware):
        return torch.bfloat16
    if precision == "bf16":
        problems.add(
            f"{_what(kind, hardware)} has no bf16 arithmetic",
            where="actor.precision=bf16",
            fix="use actor.precision=fp32 or auto",
        )
    return torch.float32
