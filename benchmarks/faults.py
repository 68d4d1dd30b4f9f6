"""What happens to a run when something breaks: workers killed and stopped in every phase, nodes, driver, disk, storage.

Each case breaks one thing in step 2 of the tiny GRPO run in TP 2, which saves every step and may restart once. Asked of
each: how long until the driver says what broke, whether the message names it, and whether the metrics of all steps are
at the end those of an undisturbed run, bit for bit. Cases with nodes need root (`benchmarks/nodes.py`), the one with a
full disk needs to mount a small tmpfs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: names in this folder would hide installed packages (kernels)
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import nodes
from benchmarks.common import ROOT, TINY, Result, Table, main, scratch, tiny_inputs
from megaverl.checkpoint.mirror import Mirror
from megaverl.checkpoint.retention import newest_whole
from megaverl.config.load import load_config
from megaverl.errors import MegaverlError
from megaverl.observe.console import Console
from megaverl.trainer.trainer import Trainer
from megaverl.workers.group import Asked, WorkerGroup

STEPS, BREAK_AT = 3, 2
BOUND = 30.0
PHASES = {
    "generate": "rollout",
    "score": "reward",
    "old_log_probs": "log-prob",
    "reference_log_probs": "reference",
    "update_actor": "update",
    "to_rollout": "handoff",
    "save_state": "save",
}
OPTIONS = [
    "data.val_files=[]", "trainer.export_dir=null", "trainer.val_before_train=false", "data.train_batch_size=8",
    f"trainer.total_steps={STEPS}", "trainer.save_every=1", "actor.recompute_old_log_probs=always",
    "trainer.max_restarts=1", "trainer.loggers=[file]",
]  # fmt: skip


@dataclass
class Outcome:
    """How a case ended.

    Attributes:
        seconds: from the fault to the message.
        named: the message says who or what, where and in which phase.
        same: the metrics of all steps are those of the undisturbed run.
    """

    case: str
    seconds: float
    named: bool
    same: bool
    message: str

    @property
    def ok(self) -> bool:
        return self.named and self.same and self.seconds <= BOUND

    def row(self) -> Sequence[Any]:
        return (self.case, f"{self.seconds:.1f}", "yes" if self.named else "NO", "yes" if self.same else "NO")


class Ear(Console):
    """A console that keeps what it was told, and when."""

    def __init__(self) -> None:
        super().__init__(stream=sys.stderr)
        self.heard: list[tuple[float, str]] = []

    def warn(self, text: str) -> None:
        self.heard.append((time.monotonic(), text))
        super().warn(text)


# -- workers ------------------------------------------------------------------------------------------------------


@contextmanager
def broken(method: str, harm: Callable[[WorkerGroup], None]) -> Iterator[list[float]]:
    """Calls ``harm`` once, just after the phase ``method`` of step `BREAK_AT` has been sent to the workers.

    Yields a list that gets the moment.
    """
    ask, counts, moments = WorkerGroup.ask_by_rank, {"calls": 0}, []

    def asking(group: WorkerGroup, name: str, arguments: Callable[[int], Sequence[Any]]) -> Asked:
        asked = ask(group, name, arguments)
        counts["calls"] += name == method
        # The weights are handed over before the first step as well.
        if name == method and counts["calls"] == BREAK_AT + (method == "to_rollout"):
            moments.append(time.monotonic())
            harm(group)
        return asked

    WorkerGroup.ask_by_rank = asking  # type: ignore[method-assign]
    try:
        yield moments
    finally:
        WorkerGroup.ask_by_rank = ask  # type: ignore[method-assign]


def kill(rank: int) -> Callable[[WorkerGroup], None]:
    """kill -9, while the phase is certain to be open: the process is stopped first, for a moment."""

    def harm(group: WorkerGroup) -> None:
        pid = group._places[rank].pid
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()

    return harm


def stop(rank: int) -> Callable[[WorkerGroup], None]:
    """SIGSTOP: the process is there and does nothing."""
    return lambda group: os.kill(group._places[rank].pid, signal.SIGSTOP)


def worker_case(words: Sequence[str], folder: Path, method: str, rank: int, how: str, right: list[Any]) -> Outcome:
    """One worker of two is killed or stopped in a phase; the run restarts and must end as if nothing had been."""
    ear, harm = Ear(), (kill if how == "kill -9" else stop)(rank)
    run_dir = folder / f"{how.replace(' ', '')}-{method}-{rank}"
    config = load_config(TINY, [*words, *OPTIONS, "actor.layout.tp=2", f"trainer.run_dir={run_dir}"])
    with broken(method, harm) as moments:
        try:
            with Trainer(config, ear) as trainer:
                trainer.train()
        except MegaverlError as error:
            ear.warn(str(error))
    said = [(at, text) for at, text in ear.heard if "rank" in text]
    at, text = said[0] if said else (float("inf"), "")
    named = f"rank {rank} (node " in text and method in text and "pid " in text and "actor" in text and "rank_" in text
    named = named and ("died in phase" in text if how == "kill -9" else "its process is stopped" in text)
    case = f"{how} of rank {rank} in {PHASES[method]}"
    return Outcome(case, at - moments[0], named, nodes.rows_of(run_dir) == right, text)


# -- the driver, nodes, disk --------------------------------------------------------------------------------------


def command(words: Sequence[str], run_dir: Path) -> list[str]:
    own = [*words, *OPTIONS, f"trainer.run_dir={run_dir}"]
    return [sys.executable, "-m", "megaverl", "train", str(TINY), *own]


def steps_done(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def until(condition: Callable[[], bool], what: str, seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not happen within {seconds:g} s")
        time.sleep(0.05)


def worker_pids(run_dir: Path) -> list[int]:
    """Processes that write a log of the run."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if any(str(run_dir / "logs") in os.readlink(f"/proc/{process.pid}/fd/{n}") for n in (1, 2)):
                found.append(process.pid)
        except OSError:
            continue
    return found


def driver_case(words: Sequence[str], folder: Path, right: list[Any]) -> Outcome:
    """The driver is killed after the first step: its workers end too, and the same command goes on."""
    run_dir = folder / "driver"
    line = command([*words, "actor.layout.tp=2"], run_dir)
    first = subprocess.Popen(line, cwd=ROOT, env=nodes.environment(), stderr=subprocess.DEVNULL)
    until(lambda: steps_done(run_dir) >= 1, "the first step")
    first.kill()
    first.wait()
    began = time.monotonic()
    until(lambda: not worker_pids(run_dir), "the end of the workers")
    seconds = time.monotonic() - began
    again = subprocess.run(line, cwd=ROOT, env=nodes.environment(), capture_output=True, text=True, check=False)
    named = again.returncode == 0 and "goes on after step" in again.stdout
    return Outcome("kill -9 of the driver", seconds, named, nodes.rows_of(run_dir) == right, again.stdout[-400:])


def stop_case(words: Sequence[str], folder: Path, right: list[Any]) -> Outcome:
    """SIGTERM after the first step: the run saves and ends with 143, and the same command goes on."""
    run_dir = folder / "sigterm"
    line = command([*words, "actor.layout.tp=2"], run_dir)
    first = subprocess.Popen(line, cwd=ROOT, env=nodes.environment(), stderr=subprocess.PIPE, text=True)
    until(lambda: steps_done(run_dir) >= 1, "the first step")
    began = time.monotonic()
    first.terminate()
    said = first.communicate()[1]
    seconds = time.monotonic() - began
    again = subprocess.run(line, cwd=ROOT, env=nodes.environment(), capture_output=True, text=True, check=False)
    named = first.returncode == 143 and "SIGTERM stopped the run after step" in said and again.returncode == 0
    return Outcome("SIGTERM to the driver", seconds, named, nodes.rows_of(run_dir) == right, said[-400:])


def disk_case(words: Sequence[str], folder: Path, right: list[Any]) -> Outcome:
    """The disk is full at the second save; with more space the same command goes on from the first."""
    run_dir = folder / "disk"
    checkpoints = run_dir / "checkpoints"
    checkpoints.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(checkpoints)], check=True)
    try:
        line = command([*words, "actor.layout.tp=2"], run_dir)
        one = checkpoint_bytes(words, folder)
        subprocess.run(["mount", "-o", f"remount,size={int(one * 1.5)}", str(checkpoints)], check=True)
        began = time.monotonic()
        done = subprocess.run(line, cwd=ROOT, env=nodes.environment(), capture_output=True, text=True, check=False)
        seconds = time.monotonic() - began
        whole = sorted(p.name for p in checkpoints.iterdir())
        subprocess.run(["mount", "-o", "remount,size=64m", str(checkpoints)], check=True)
        again = subprocess.run(line, cwd=ROOT, env=nodes.environment(), capture_output=True, text=True, check=False)
        same = nodes.rows_of(run_dir) == right and again.returncode == 0
    finally:
        subprocess.run(["umount", str(checkpoints)], check=True)
    named = done.returncode == 1 and "No space left on device" in done.stderr and "step_1, and untouched" in done.stderr
    return Outcome("disk full during a save", seconds, named and whole == ["step_1"], same, done.stderr[-600:])


def storage_case(words: Sequence[str], folder: Path, right: list[Any]) -> Outcome:
    """The S3 server goes away after the first step: training ends all the same, and says what is not there.

    Once it is back, the same command brings the last checkpoint there.
    """
    import fsspec
    from moto.server import ThreadedMotoServer

    run_dir = folder / "storage"
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    own = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1",
    }  # fmt: skip
    os.environ.update(own)
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("runs")
    line = command([*words, "actor.layout.tp=2", "trainer.mirror=s3://runs/one", "trainer.keep_last=1"], run_dir)
    settings = {"cwd": ROOT, "env": nodes.environment(), "text": True}
    first = subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.PIPE, **settings)
    until(lambda: steps_done(run_dir) >= 1, "the first step")
    server.stop()
    began = time.monotonic()
    out, said = first.communicate()
    seconds = time.monotonic() - began
    whole = newest_whole(run_dir)[0]
    again_server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    again_server.start()
    again = subprocess.run(line, capture_output=True, check=False, **settings)
    there = Mirror("s3://runs/one").steps()
    again_server.stop()
    named = first.returncode == 1 and "s3://runs/one, tried 4 times" in said and again.returncode == 0
    kept = whole is not None and whole.name == f"step_{STEPS}" and there[-1:] == [STEPS]
    text = f"{out[-300:]}{said[-600:]}{again.stderr[-300:]}{there}"
    return Outcome("S3 server down", seconds, named and kept, nodes.rows_of(run_dir) == right, text)


def checkpoint_bytes(words: Sequence[str], folder: Path) -> int:
    """Bytes of one checkpoint, of the undisturbed run."""
    return sum(file.stat().st_size for file in (folder / "right" / "checkpoints" / "step_1").iterdir())


def raylet_case(words: Sequence[str], folder: Path, right: list[Any], spare: bool) -> Outcome:
    """A node's raylet is killed in DP 2 over two nodes; a third node takes over, or one node goes on alone."""
    run_dir = folder / f"raylet{spare}"
    more = ["cluster.nodes=2", "cluster.workers_per_node=1", "actor.layout.tp=1", "trainer.loggers=[console,file]"]
    with nodes.ray_nodes((1, 1, 1) if spare else (1, 1)) as cluster:
        line = [*command([*words, *more], run_dir), f"cluster.address={cluster[0].address}:{nodes.PORT}", more[-1]]
        running = subprocess.Popen(
            cluster[0].command(line), cwd=ROOT, env=nodes.environment(), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        until(lambda: steps_done(run_dir) >= 1, "the first step")
        busy = next(node for node in cluster[1:] if holds_worker(node, run_dir))
        began, seconds, said = time.monotonic(), float("inf"), []
        for pid in busy.pids_of("raylet"):
            os.kill(pid, signal.SIGKILL)
        assert running.stdout is not None
        for text in running.stdout:
            said.append(text)
            if "rank " in text and seconds == float("inf"):
                seconds = time.monotonic() - began
        code = running.wait()
    message = "".join(said)
    named = code == 0 and f"node {busy.address}" in message and "restart 1 of 1" in message
    rows = nodes.rows_of(run_dir)
    gap = nodes.largest_gap(rows, right)
    case = "raylet of a node killed, a spare node" if spare else "raylet of a node killed, one node left (DP 1)"
    return Outcome(
        case,
        seconds,
        named,
        gap == 0 if spare else [r.keys() for r in rows] == [r.keys() for r in right],
        message[-1500:],
    )


def holds_worker(node: nodes.Node, run_dir: Path) -> bool:
    return bool(set(node.pids()) & set(worker_pids(run_dir)))


# -- all ----------------------------------------------------------------------------------------------------------


def cases(words: Sequence[str], folder: Path, ranks: Sequence[int]) -> Iterator[Outcome]:
    config = [*words, *OPTIONS, "actor.layout.tp=2"]
    with Trainer(load_config(TINY, [*config, f"trainer.run_dir={folder / 'right'}"]), Ear()) as trainer:
        trainer.train()
    right = nodes.rows_of(folder / "right")
    for method in PHASES:
        for rank in ranks:
            yield worker_case(words, folder, method, rank, "kill -9", right)
    for method in ("generate", "update_actor"):
        yield worker_case(words, folder, method, 1, "SIGSTOP", right)
    yield driver_case(words, folder, right)
    yield stop_case(words, folder, right)
    if os.geteuid() == 0:
        yield disk_case(words, folder, right)
    if all(importlib.util.find_spec(name) for name in ("moto", "s3fs")):
        yield storage_case(words, folder, right)
    if nodes.why_not() is None:
        with Trainer(
            load_config(TINY, [*words, *OPTIONS, "actor.layout.tp=1", f"trainer.run_dir={folder / 'right_dp'}"]), Ear()
        ) as trainer:
            trainer.train()
        for spare in (True, False):
            yield raylet_case(words, folder, nodes.rows_of(folder / "right_dp"), spare)


def measure(arguments: argparse.Namespace) -> Result:
    found = []
    with scratch() as folder:
        for outcome in cases([*tiny_inputs(folder), *arguments.override], folder, arguments.ranks):
            found.append(outcome)
            print(json.dumps(outcome.row()), file=sys.stderr, flush=True)
            if not outcome.ok:
                print(outcome.message, file=sys.stderr, flush=True)
    columns = ("fault in step 2 of 3", "s to the message", "names it", "end as undisturbed")
    table = Table("Faults in the tiny GRPO run", columns, [o.row() for o in found])
    bad = [o.case for o in found if not o.ok]
    lines = [f"not as it should be: {', '.join(bad)}" if bad else "every case ended as it should"]
    numbers = {"cases": [{"case": o.case, "seconds": o.seconds, "named": o.named, "same": o.same} for o in found]}
    return Result(numbers, [table], lines, ok=not bad)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--ranks", type=int, nargs="+", default=[0, 1], help="whom to kill in each phase (0 1)")
    made.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="a key of the configuration")
    return made


if __name__ == "__main__":
    sys.exit(main(parser(), measure))
