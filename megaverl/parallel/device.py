"""The choice of hardware, number format and kernels, made once per worker.

The only module of megaverl that names a 16-bit number format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from megaverl.errors import Problems
from megaverl.parallel import kernels as facts
from megaverl.parallel.kernels import FAST_CAPABILITY

Precision = Literal["auto", "fp32", "bf16"]
Kernels = Literal["auto", "te", "flash", "eager"]
Kind = Literal["auto", "cuda", "cpu"]
Backend = Literal["te", "flash", "eager"]

SHORT = torch.bfloat16
"""The 16-bit format of weights and activations on hardware that has it. fp16 is never used: its range is too small
for training without loss scaling."""

INSTALL = {
    "te": "pip install megaverl[te]",
    "flash": "pip install megaverl[gpu] (Liger and Triton)",
}


@dataclass(frozen=True)
class Device:
    """What a worker computes on, and how.

    Attributes:
        kind: ``cpu`` or ``cuda``.
        dtype: number format of the weights.
        backend: ``te`` (Transformer Engine), ``flash`` (torch flash attention, Triton) or ``eager`` (plain torch).
        reason: why this backend and number format, in one sentence.
        faster: what a faster backend would need; empty when there is none.
    """

    kind: Literal["cpu", "cuda"]
    dtype: torch.dtype
    backend: Backend
    reason: str
    faster: str = ""

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
        capability: compute capability of the GPU (real, or what MEGAVERL_CAPABILITY says), or None without one.
        gpu: a GPU is visible to torch.
        missing: ``te`` and ``flash``, if their packages cannot be used, and why.
        wheel: why the installed torch cannot run on this GPU; empty when it can.
    """

    capability: tuple[int, int] | None
    gpu: bool = True
    missing: Mapping[str, str] = field(default_factory=dict)
    wheel: str = ""

    @classmethod
    def here(cls) -> Hardware:
        """This machine's hardware and packages; imports the packages of fast kernels where they could be used."""
        capability, gpu = facts.capability(), torch.cuda.is_available()
        missing = {}
        if facts.is_fast():
            # flash first: a Transformer Engine that fails to import may leave a cuDNN behind that breaks others.
            found = {"flash": facts.flash_problem(), "te": facts.transformer_engine_problem()}
            missing = {backend: why for backend, why in found.items() if why}
        wheel = None
        if gpu:  # the real card, whatever MEGAVERL_CAPABILITY says
            wheel = facts.wheel_problem(torch.cuda.get_device_capability(), torch.cuda.get_arch_list())
        return cls(capability, gpu, missing, wheel or "")

    @property
    def fast(self) -> bool:
        """The GPU has bf16 arithmetic and flash attention."""
        return self.gpu and self.capability is not None and self.capability >= FAST_CAPABILITY


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
    dtype = _dtype(precision, kind, hardware, problems)
    backend, why = _backend(kernels, kind, dtype, hardware, problems)
    problems.raise_if_any()
    return Device(kind, dtype, backend, why, _faster(backend, kind, dtype, hardware))


def rollout_dtype(precision: Precision, device: Device, hardware: Hardware | None = None) -> torch.dtype:
    """The number format that ``rollout.precision`` means where training has ``device``.

    Raises:
        UserError: a format that the hardware has no arithmetic for.
    """
    if precision == "auto":
        return device.dtype
    problems, hardware = Problems(), hardware or Hardware.here()
    dtype = _dtype(precision, device.kind, hardware, problems, "rollout.precision")
    problems.raise_if_any()
    return dtype


def _kind(device: Kind, hardware: Hardware, problems: Problems) -> Literal["cpu", "cuda"]:
    usable = hardware.gpu and hardware.capability is not None
    if device == "cuda" and not usable:
        problems.add("no GPU is visible to torch", where="cluster.device=cuda", fix="use cluster.device=cpu or auto")
        return "cpu"
    kind = device if device != "auto" else "cuda" if usable else "cpu"
    if kind == "cuda" and hardware.wheel:
        problems.add(
            hardware.wheel,
            where=f"cluster.device={device}",
            fix=f"install another build of torch ({facts.OLD_GPU_WHEELS}), or use cluster.device=cpu",
        )
    return kind


def _fast(kind: str, hardware: Hardware) -> bool:
    return kind == "cuda" and hardware.fast


def _what(kind: str, hardware: Hardware) -> str:
    if kind == "cpu" or hardware.capability is None:
        return "a CPU"
    return "a GPU of compute capability {}.{}".format(*hardware.capability)


def _backend(
    kernels: Kernels, kind: str, dtype: torch.dtype, hardware: Hardware, problems: Problems
) -> tuple[Backend, str]:
    """The backend, and why; a wish that cannot be met is a problem."""
    obstacles = {backend: _obstacle(backend, kind, dtype, hardware) for backend in ("te", "flash")}
    if kernels == "eager":
        return "eager", "asked for by actor.kernels=eager"
    if kernels != "auto":
        for what, fix in obstacles[kernels]:
            problems.add(what, where=f"actor.kernels={kernels}", fix=fix)
        return kernels, f"asked for by actor.kernels={kernels}"
    what = _what(kind, hardware)
    if not obstacles["te"]:
        return "te", f"{what}, and Transformer Engine imports"
    if not obstacles["flash"]:
        return "flash", f"{what}, and {obstacles['te'][0][0]}"
    if _fast(kind, hardware):
        return "eager", f"{what}, but {obstacles['flash'][0][0]}"
    return "eager", f"{what} has neither flash attention nor Transformer Engine"


def _obstacle(backend: Backend, kind: str, dtype: torch.dtype, hardware: Hardware) -> list[tuple[str, str]]:
    """What keeps a fast backend from being used, each with what to do."""
    if not _fast(kind, hardware):
        return [
            (
                f"needs compute capability 8.0 or newer; this is {_what(kind, hardware)}",
                "use actor.kernels=eager or auto",
            )
        ]
    found = []
    if dtype != SHORT:
        found.append(("its attention kernels take bf16, not fp32", "use actor.precision=bf16, or actor.kernels=eager"))
    if backend in hardware.missing:
        found.append((hardware.missing[backend], f"{INSTALL[backend]}, or use actor.kernels=eager or auto"))
    return found


def _faster(backend: Backend, kind: str, dtype: torch.dtype, hardware: Hardware) -> str:
    """What would have to be there for the next faster backend."""
    if backend == "te":
        return ""
    if not _fast(kind, hardware):
        return "a GPU of compute capability 8.0 or newer (Ampere, Ada, Hopper, Blackwell)"
    if dtype != SHORT:
        return "actor.precision=bf16"
    better = [other for other in ("te", "flash")[: 1 if backend == "flash" else 2] if other not in hardware.missing]
    if better:
        return f"actor.kernels={better[0]} or auto"
    wanted = "te" if backend == "flash" else "flash"
    return f"{INSTALL[wanted]}: {hardware.missing[wanted]}"


def _dtype(
    precision: Precision, kind: str, hardware: Hardware, problems: Problems, key: str = "actor.precision"
) -> torch.dtype:
    if precision == "fp32":
        return torch.float32
    if _fast(kind, hardware):
        return SHORT
    if precision == "bf16":
        problems.add(
            f"{_what(kind, hardware)} has no bf16 arithmetic",
            where=f"{key}=bf16",
            fix=f"use {key}=fp32 or auto",
        )
    return torch.float32
