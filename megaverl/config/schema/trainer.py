"""Keys of `trainer`: the run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megaverl.config.schema.base import Positive, Section


class TrainerConfig(Section):
    project: str = Field("megaverl", description="Project name for trackers.")
    experiment: str = Field("run", description="Name of this run for trackers.")
    run_dir: str = Field(
        "runs/run", min_length=1, description="Folder of this run: config.yaml, metrics.jsonl, checkpoints."
    )
    total_steps: int | None = Field(None, ge=1, description="Steps in all; total_epochs decides when not set.")
    total_epochs: Positive = Field(1, description="Passes over the training rows.")
    val_before_train: bool = Field(True, description="Validate once before the first step.")
    val_every: int = Field(
        0, ge=0, description="Validate every so many steps and at the end; 0 is only before and at the end."
    )
    val_generations: int = Field(
        8,
        ge=0,
        description="Validation prompts whose responses are kept in generations/step_N.jsonl and shown as a table in wandb and tensorboard; 0 keeps none.",
    )
    critic_warmup: int = Field(
        0, ge=0, description="First steps that train the critic alone and leave the actor as it is (PPO)."
    )
    save_every: int = Field(0, ge=0, description="Save a checkpoint every so many steps and at the end; 0 is never.")
    keep_last: int | None = Field(
        None, ge=1, description="Keep so many of the newest checkpoints and remove older ones; all when not set."
    )
    save_async: bool = Field(
        True,
        description="Copy the state to host memory and write it while training goes on; false writes it before the next step, without a copy.",
    )
    keep_best: int = Field(
        0, ge=0, description="Keep so many of the best checkpoints as well when keep_last removes older ones."
    )
    best_metric: str | None = Field(
        None,
        description="Metric of the step that keep_best compares; the mean of val-core/.../mean@N when not set.",
    )
    best_mode: Literal["max", "min"] = Field("max", description="Whether more or less of best_metric is better.")
    mirror: str | None = Field(
        None,
        description="URL (s3://bucket/folder, or another of fsspec's) that every finished checkpoint is copied to, and that resume=auto fetches a newer one from.",
    )
    max_restarts: int = Field(
        0,
        ge=0,
        description="Times that the workers are started anew after some were lost, on the nodes that are alive, from the newest checkpoint.",
    )
    max_bad_steps: Positive = Field(
        3,
        description="Steps in a row with a loss or gradient that is not finite, each of them skipped, that end the run.",
    )
    resume: str = Field(
        "auto",
        description="auto goes on from the newest whole checkpoint in run_dir if there is one; never starts anew; a path resumes from that checkpoint.",
    )
    seed: int = Field(0, ge=0, description="Seed of shuffling, sampling and initialisation.")
    loggers: list[Literal["console", "file", "wandb", "tensorboard"]] = Field(
        ["console", "file"], description="Where metrics go."
    )
    export_dir: str | None = Field(
        None, description="Folder for a Hugging Face checkpoint of the final weights; none when not set."
    )
    export_check: Literal["none", "vllm"] = Field(
        "none", description="vllm has a fresh vLLM load the final export, and compares what it says with the policy."
    )
    export_shard_gb: float = Field(
        5.0, gt=0, description="Largest weights file of an export, in GB (10^9 bytes); more are begun, with an index."
    )
    export_critic_dir: str | None = Field(
        None, description="Folder for the final critic as a Hugging Face token classification; none when not set."
    )
