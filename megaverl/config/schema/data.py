"""Keys of `data`: rows, lengths, batches."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megaverl.config.schema.base import Positive, Section


class DataConfig(Section):
    train_files: list[str] = Field([], description="Training rows: parquet or jsonl files.")
    train_weights: list[float] = Field(
        [],
        description="Share of each entry of data.train_files among the prompts, in any unit; entries give what they hold when empty. A small entry goes round again, a large one goes on in the next epoch.",
    )
    val_files: list[str] = Field([], description="Validation rows: parquet or jsonl files; may be empty.")
    prompt_key: str = Field("prompt", description="Column that holds the prompt: chat messages or a string.")
    response_key: str = Field(
        "response", description="Column that holds the answer to learn (supervised training only)."
    )
    train_batch_size: Positive = Field(256, description="Prompts (supervised: rows) per step, over all workers.")
    max_prompt_length: Positive = Field(512, description="Longest prompt in tokens, chat template included.")
    max_response_length: Positive = Field(512, description="Longest response in tokens.")
    truncation: Literal["error", "left", "right", "filter"] = Field(
        "error",
        description="What to do with a prompt over the limit: refuse it, cut its left or right end, or leave the row out (counted and reported).",
    )
    shuffle: bool = Field(True, description="Shuffle the training rows anew in every epoch, from trainer.seed.")
    streaming: bool = Field(
        False,
        description="Keep the tokenized rows in a temporary file in trainer.run_dir instead of memory, for files larger than memory; the numbers are the same.",
    )
    check_workers: int = Field(1, ge=1, description="Processes that check and tokenize rows before the start.")
