"""Keys of `reward`: how responses are scored."""

from __future__ import annotations

from pydantic import Field

from megaverl.config.schema.base import Positive, Section


class RewardFunctionConfig(Section):
    path: str | None = Field(
        None, description="Python file with a custom scorer; the registry by data_source when not set."
    )
    name: str = Field("compute_score", description="Name of the scorer in that file.")
    arguments: list[str] = Field(
        [], description="Further arguments of the scorer, as name=value; the value is read as YAML (scale=2.0)."
    )
    batch: bool = Field(
        False,
        description="The scorer judges many responses at once: lists data_sources, solution_strs, ground_truths, extra_infos in, a list of scores out.",
    )


class RewardModelConfig(Section):
    path: str | None = Field(
        None,
        description="Folder of a reward model that scores the responses in place of scorers: a sequence classification with one label and the actor's tokens, such as algorithm.name=rm exports.",
    )
    offload: bool = Field(
        True, description="Keep the reward model in host memory between its uses on a GPU; nothing to do on a CPU."
    )
    max_tokens_per_micro_batch: int | None = Field(
        None, ge=1, description="Tokens a worker puts through the reward model at once; the actor's when not set."
    )


class RewardConfig(Section):
    model: RewardModelConfig = Field(default_factory=RewardModelConfig, description="A reward model as the scorer.")
    function: RewardFunctionConfig = Field(default_factory=RewardFunctionConfig, description="Custom scorer.")
    sources: list[str] = Field(
        [],
        description="Rules SOURCE=SCORER or SOURCE=SCORER*WEIGHT+SCORER before the built-in table; SOURCE may hold *; scorers are gsm8k, gsm8k_flexible, math, exact_match, format, length_penalty.",
    )
    format_pattern: str = Field(
        r"<think>.*</think>.*",
        description="Regular expression that the whole response must match for the scorer format.",
    )
    length_limit: Positive = Field(4096, description="Characters from which on the scorer length_penalty gives -1.")
    length_buffer: Positive = Field(
        1024,
        description="The last characters before reward.length_limit, over which length_penalty falls from 0 to -1.",
    )
    workers: Positive = Field(
        2, description="Processes of each worker that run a custom scorer or math; the other built-in ones need none."
    )
    timeout: float = Field(
        30.0,
        gt=0,
        description="Seconds that a custom scorer or math has for one response; then it scores 0 and counts in reward/timeouts.",
    )
    overlong_buffer: int = Field(
        0,
        ge=0,
        description="Last tokens before data.max_response_length in which a response is penalised for its length (DAPO, arXiv 2503.14476, equation 13); 0 is off.",
    )
    overlong_penalty: float = Field(
        1.0, ge=0, description="Penalty at the length limit; it grows from 0 over the buffer's tokens."
    )
