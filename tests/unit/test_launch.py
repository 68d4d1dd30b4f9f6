"""Every file in launch/: scripts are valid, and say with DRY_RUN=1 what they would run. No GPU, no Ray, no weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megaverl.config.load import load_config

LAUNCH = Path(__file__).parents[2] / "launch"
RUNS = sorted(LAUNCH.glob("run_*.sh"))
SCRIPTS = [*sorted(LAUNCH.glob("*.sh")), LAUNCH / "slurm.sbatch"]


def dry(script: Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
    settings = {**clean, "DRY_RUN": "1", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(["bash", str(script), *words], capture_output=True, text=True, timeout=120, env=settings)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_are_valid_bash(script):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_scripts_that_are_promised_are_there_and_can_be_run():
    assert [script.name for script in RUNS] == [
        "run_p40_0.5b.sh",
        "run_qwen_0.5b.sh",
        "run_qwen_32b.sh",
        "run_qwen_7b.sh",
    ]
    assert all(os.access(script, os.X_OK) for script in (*RUNS, LAUNCH / "ray_cluster.sh"))


@pytest.mark.parametrize("script", RUNS, ids=lambda script: script.name)
def test_dry_run_prints_command_configuration_and_plan(script, tmp_path):
    done = dry(script, "trainer.seed=7", RUN=str(tmp_path / "of this run"), SAMPLES="3")
    assert done.returncode == 0, done.stderr
    comments = [line for line in done.stdout.splitlines() if line.startswith("# ")]
    assert comments[0].startswith("# command: megaverl train ")
    assert any("reshard plan: train tp" in line and " 0 received" in line for line in comments)
    (tmp_path / "config.yaml").write_text(done.stdout)
    config = load_config(tmp_path / "config.yaml")
    assert config.trainer.seed == 7, "words after the script's name come last"
    assert config.trainer.run_dir == str(tmp_path / "of this run")
    assert config.rollout.n == 3
    assert not (tmp_path / "of this run").exists()


def test_the_pascal_script_takes_what_such_a_card_needs(tmp_path):
    (tmp_path / "config.yaml").write_text(dry(LAUNCH / "run_p40_0.5b.sh").stdout)
    config = load_config(tmp_path / "config.yaml")
    assert (config.actor.precision, config.actor.kernels, config.rollout.engine) == ("fp32", "eager", "hf")


def test_a_wrong_key_of_the_caller_is_refused():
    done = dry(LAUNCH / "run_qwen_7b.sh", "rolout.n=4")
    assert done.returncode == 2
    assert "did you mean rollout.n" in done.stderr


def test_the_cluster_starts_head_first_and_stops_it_last():
    hosts = {"HOSTS": "one two three", "PORT": "7000", "GPUS": "4"}
    start = dry(LAUNCH / "ray_cluster.sh", "start", **hosts).stdout.splitlines()
    assert [line.partition(":")[0] for line in start] == ["one", "two", "three"]
    assert "ray start --head --node-ip-address=one --port=7000" in start[0]
    assert all("ray start --address=one:7000 --num-gpus=4" in line for line in start[1:])
    stop = dry(LAUNCH / "ray_cluster.sh", "stop", **hosts).stdout.splitlines()
    assert [line.partition(":")[0] for line in stop] == ["three", "two", "one"]
    assert "ray status --address=one:7000" in dry(LAUNCH / "ray_cluster.sh", "status", **hosts).stdout
    wrong = dry(LAUNCH / "ray_cluster.sh", "begin")
    assert (wrong.returncode, wrong.stdout) == (2, "")


def test_the_cluster_reports_the_host_that_fails(tmp_path):
    """With an ssh that fails for one host, the others are stopped all the same."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n[ "$1" != two ]\n')
    ssh.chmod(0o755)
    done = dry(LAUNCH / "ray_cluster.sh", "stop", DRY_RUN="0", SSH=str(ssh), HOSTS="one two three")
    assert done.returncode == 1
    assert "could not stop Ray on two" in done.stderr
    assert [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()] == ["three", "two", "one"]


def test_slurm_runs_the_script_on_all_nodes_of_the_job(tmp_path):
    done = dry(LAUNCH / "slurm.sbatch", "trainer.seed=9", SLURM_JOB_NUM_NODES="4", CPUS="32")
    assert done.returncode == 0, done.stderr
    assert "srun --nodes=3 --ntasks=3" in done.stdout
    (tmp_path / "config.yaml").write_text(done.stdout)
    config = load_config(tmp_path / "config.yaml")
    assert (config.cluster.nodes, config.trainer.seed) == (4, 9)


def test_kubernetes_starts_a_script_that_is_there_with_as_many_nodes_as_pods():
    job = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())["spec"]
    script = next(word for word in job["entrypoint"].split() if word.endswith(".sh"))
    assert (LAUNCH / Path(script).name).exists()
    workers = job["rayClusterSpec"]["workerGroupSpecs"][0]
    assert f"NODES={workers['replicas']} " in job["entrypoint"]
    gpus = workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert f"GPUS={gpus} " in job["entrypoint"]


def test_the_pinned_ray_is_the_one_of_the_kubernetes_example():
    lock = (LAUNCH.parent / "requirements" / "cpu.lock").read_text()
    version = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())["spec"]["rayClusterSpec"]["rayVersion"]
    assert f"\nray=={version}\n" in lock
