"""Two nodes on one machine: network namespaces with addresses of their own, one Ray node in each.

Run as a script it trains the tiny GRPO recipe with TP 2 inside and DP 2 across the nodes, then in the same layout on
one node, and compares every metric that the clock does not decide. Needs root, and ``ip`` of iproute2.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a file: names in this folder would hide installed packages (kernels)
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.common import ROOT, TINY, Result, Table, main, scratch, tiny_inputs
from megaverl.observe.metrics import repeatable

PORT = 6379
START_SECONDS = 60.0
LIMIT = 1e-3
"""Largest relative difference of a metric: sums between nodes are made in another order."""
NUMBERS = itertools.count()


@dataclass(frozen=True)
class Node:
    """One namespace, joined to the others by a bridge."""

    namespace: str
    address: str

    def command(self, words: Sequence[str]) -> list[str]:
        """``words``, to be run in the namespace."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def pids(self) -> list[int]:
        """Processes in the namespace."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        return [int(word) for word in found.stdout.split()]

    def pids_of(self, word: str) -> list[int]:
        """Processes in the namespace whose executable or title is ``word``, e.g. ``raylet``."""
        import psutil

        found = []
        for pid in self.pids():
            with suppress(psutil.NoSuchProcess):
                words = psutil.Process(pid).cmdline()
                if words and Path(words[0].split()[0]).name == word:
                    found.append(pid)
        return found

    def kill(self) -> None:
        """Ends all of the node's processes at once, as a power cut would."""
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


def why_not() -> str | None:
    """Why namespaces cannot be made here; None when they can."""
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    name = f"mv{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"network namespaces are not permitted: {done.stderr.strip()}"
    link = subprocess.run(["ip", "link", "add", name, "type", "bridge"], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], check=False)
    if link.returncode:
        return f"virtual links are not permitted: {link.stderr.strip()}"
    subprocess.run(["ip", "link", "del", name], check=False)
    return None


@contextmanager
def namespaces(count: int = 2) -> Iterator[list[Node]]:
    """``count`` namespaces that reach each other and nothing else; their processes end with the block."""
    number = next(NUMBERS)  # names of interfaces are free again only some time after their namespace is gone
    tag = f"{os.getpid() % 100000}{number}"
    subnet = f"10.{200 + number % 50}.{os.getpid() % 250}"
    bridge = f"mvb{tag}"
    nodes = [Node(f"mvn{tag}-{i}", f"{subnet}.{i + 1}") for i in range(count)]
    with ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("link", "set", bridge, "up")
        for i, node in enumerate(nodes):
            _ip("netns", "add", node.namespace)
            stack.callback(_ip, "netns", "del", node.namespace)
            outside, inside = f"mvo{tag}-{i}", f"mvi{tag}-{i}"
            _ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", node.namespace)
            _ip("link", "set", outside, "master", bridge, "up")
            _ip("-n", node.namespace, "link", "set", "lo", "up")
            _ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", inside)
            _ip("-n", node.namespace, "link", "set", inside, "up")
            stack.callback(node.kill)
        yield nodes


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def ray_nodes(cpus: Sequence[int] = (2, 2)) -> Iterator[list[Node]]:
    """A Ray cluster with one node per entry, each in its own namespace with so many CPUs; the first is the head."""
    with namespaces(len(cpus)) as nodes, tempfile.TemporaryDirectory(prefix="mvr", dir="/tmp") as folder:
        for i, (node, count) in enumerate(zip(nodes, cpus, strict=True)):
            start_ray(node, nodes[0], count, Path(folder), first=i == 0)
        yield nodes
        for node in nodes:
            node.kill()  # before the folder that their sockets are in


def start_ray(node: Node, head: Node, cpus: int, folder: Path, *, first: bool) -> None:
    """Starts Ray on ``node``, as the head or joining it; waits until the head knows the node."""
    # Relative paths of the driver mean nothing here: a cluster's nodes run in some other folder.
    place = folder / node.namespace
    place.mkdir(exist_ok=True)
    how = (
        ["--head", f"--port={PORT}", f"--temp-dir={folder}", "--include-dashboard=false"]
        if first
        else [f"--address={head.address}:{PORT}"]
    )
    words = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *how, f"--node-ip-address={node.address}",
        f"--num-cpus={cpus}", "--num-gpus=0", "--disable-usage-stats",
        f"--object-store-memory={256 << 20}",
    ]  # fmt: skip
    with (place / "ray.log").open("w") as log:
        subprocess.Popen(node.command(words), stdout=log, stderr=log, env=environment(), cwd=place)
    deadline = time.monotonic() + START_SECONDS
    while not node.pids_of("raylet") or "Ray runtime started" not in (place / "ray.log").read_text():
        if time.monotonic() > deadline:
            raise RuntimeError(f"Ray did not start on {node.namespace}:\n{(place / 'ray.log').read_text()}")
        time.sleep(0.2)


def environment() -> dict[str, str]:
    """This process's, without what would lead to another Ray; megaverl is found from any folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return kept | own | {"RAY_AUTH_MODE": "disabled"}  # nobody else is in these networks


def train_on(nodes: Sequence[Node], words: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
    """``megaverl train`` with ``words`` on the first node, attached to the cluster."""
    command = [sys.executable, "-m", "megaverl", "train", *words, f"cluster.address={nodes[0].address}:{PORT}"]
    settings = {"capture_output": True, "text": True, "env": environment(), "timeout": 600, **options}
    return subprocess.run(nodes[0].command(command), check=False, **settings)  # type: ignore[call-overload]


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    """The metrics of a run, without what the clock and the machine decide."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [repeatable(row) for row in rows]


def largest_gap(one: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> float:
    """The largest relative difference of any metric; infinite when steps or names differ."""
    if [row.keys() for row in one] != [row.keys() for row in other]:
        return math.inf
    pairs = [(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a]
    return max((abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in pairs if a != b), default=0.0)


def measure(arguments: argparse.Namespace) -> Result:
    with scratch() as folder:
        words = [
            str(TINY), *tiny_inputs(folder), "data.val_files=[]", "trainer.export_dir=null", "actor.layout.tp=2",
            f"trainer.total_steps={arguments.steps}", *arguments.override,
        ]  # fmt: skip
        runs = {"two nodes": ([2, 2], 2, 2), "one node": ([4], 1, 4)}
        found, rows = {}, []
        for name, (cpus, nodes, workers) in runs.items():
            run_dir = folder / name.replace(" ", "_")
            shape = [f"cluster.nodes={nodes}", f"cluster.workers_per_node={workers}", f"trainer.run_dir={run_dir}"]
            with ray_nodes(cpus) as started:
                began = time.monotonic()
                done = train_on(started, [*words, *shape])
                seconds = time.monotonic() - began
            if done.returncode:
                raise RuntimeError(f"the run on {name} failed:\n{done.stdout}{done.stderr}")
            found[name] = rows_of(run_dir)
            rows.append((name, f"{len(found[name])}", f"{found[name][-1]['critic/score/mean']:.6f}", f"{seconds:.0f}"))
    gap = largest_gap(found["two nodes"], found["one node"])
    title = "GRPO in TP 2 x DP 2: two nodes in network namespaces, and one"
    table = Table(title, ("cluster", "steps", "score at the end", "seconds with start"), rows)
    return Result(
        {"largest_gap": gap}, [table], [f"largest relative difference of any metric: {gap:g}"], ok=gap <= LIMIT
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--steps", type=int, default=3, help="steps to run (3)")
    made.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="a key of the configuration")
    return made


if __name__ == "__main__":
    if (reason := why_not()) is not None:
        sys.exit(f"benchmarks/nodes.py: {reason}")
    sys.exit(main(parser(), measure))
