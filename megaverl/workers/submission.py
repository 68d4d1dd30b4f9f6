"""Submits a run to a Ray cluster as a job: its driver then lives on the cluster and survives this terminal."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaverl.config.schema import Config
from megaverl.errors import Problem, RunError, UserError

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

DONE = {"SUCCEEDED": 0, "STOPPED": 130, "FAILED": 1}
"""Final states of a job and the exit codes of a run that ends so."""


def cluster_address(config: Config) -> str:
    """The cluster of ``cluster.address`` or ``RAY_ADDRESS``.

    Raises:
        UserError: neither names one.
    """
    address = config.cluster.address or os.environ.get("RAY_ADDRESS")
    if not address:
        raise UserError(
            Problem(
                "no cluster is named to submit to",
                where="--submit",
                fix="set RAY_ADDRESS or cluster.address: http://HEAD:8265 (the dashboard), or HEAD:6379 on the cluster",
            )
        )
    return address


def entrypoint(words: Sequence[str], folder: Path) -> str:
    """The shell command of the job: the same words, in the same folder, attached to the cluster that runs the job."""
    command = shlex.join([sys.executable, "-m", "megaverl", "train", *words, "cluster.address=null"])
    return f"cd {shlex.quote(str(folder))} && exec {command}"


def submit(config: Config, words: Sequence[str]) -> str:
    """Submits the run and returns the job's id. Folder, Python and all files must be there on the head node too.

    Raises:
        UserError: no cluster is named or none answers.
    """
    client = _client(cluster_address(config))
    name = re.sub(r"[^\w-]+", "-", config.trainer.experiment)
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return client.submit_job(
        entrypoint=entrypoint(words, Path.cwd()),
        submission_id=f"megaverl-{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}",
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}},
        metadata={"run_dir": str(Path(config.trainer.run_dir).resolve()), "experiment": config.trainer.experiment},
    )


def follow(config: Config, job: str, write: Callable[[str], Any]) -> int:
    """Passes the job's output on until it ends; returns the exit code of its run.

    Raises:
        RunError: the cluster no longer answers.
    """
    client = _client(cluster_address(config))
    try:
        asyncio.run(_tail(client, job, write))
        while (state := str(client.get_job_status(job).value)) not in DONE:
            time.sleep(0.2)  # the output may end a little before the job does
        info = client.get_job_info(job)
    except (ConnectionError, RuntimeError) as error:
        raise RunError(f"job {job}: the cluster no longer answers: {error}") from error
    code = info.driver_exit_code
    return code if code is not None else DONE[state]


async def _tail(client: JobSubmissionClient, job: str, write: Callable[[str], Any]) -> None:
    async for text in client.tail_job_logs(job):
        write(text)


def _client(address: str) -> JobSubmissionClient:
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except AuthenticationError as error:
        raise UserError(
            Problem(
                f"the cluster at {address} wants a token: {str(error).splitlines()[0]}",
                where="--submit",
                fix="set RAY_AUTH_MODE=token, with the cluster's token in ~/.ray/auth_token or RAY_AUTH_TOKEN",
            )
        ) from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            Problem(
                f"no cluster takes jobs at {address}: {error}",
                where="--submit",
                fix="name the dashboard of a running cluster, http://HEAD:8265; `ray start --head` prints it",
            )
        ) from error
