"""Checks before the start that preference training and reward models add; `megaverl.trainer.preflight` calls them."""

from __future__ import annotations

from pathlib import Path

from megaverl.config.derived import row_kind, spool_folder, train_layout
from megaverl.config.schema import Config
from megaverl.data.preference_dataset import PreferenceDataset, load_preferences
from megaverl.data.tokenizer import FILES, Tokenizer, load_tokenizer
from megaverl.errors import Problems, UserError
from megaverl.models.shape import ModelShape


def check_reward_start(path: str, problems: Problems) -> ModelShape | None:
    """The shape of the reward model to train; it starts from a language model or a sequence classification."""
    from megaverl.checkpoint.sequence_classification import check_reward_checkpoint

    return check_reward_checkpoint(path, problems, trained=False)


def check_reward_model(config: Config, actor: ModelShape | None, problems: Problems) -> ModelShape | None:
    """The shape of the body of the reward model that scores, with its checkpoint and the pool's layout checked."""
    from megaverl.checkpoint.sequence_classification import check_reward_checkpoint
    from megaverl.models.rope import check_length
    from megaverl.parallel.checks import check_layout

    path = config.reward.model.path or ""
    shape = check_reward_checkpoint(path, problems, trained=True)
    if shape is None or actor is None:
        return None
    if shape.vocab < actor.vocab:
        problems.add(
            f"the reward model's embedding has {shape.vocab} rows, and the actor may emit any of {actor.vocab} tokens",
            where=f"reward.model.path={path}",
            fix="take a reward model with the actor's vocabulary",
        )
    _check_same_tokens(Path(path), Path(config.model.tokenizer_path or config.model.path), problems)
    try:
        layout = train_layout(config)
    except ValueError:  # check_rules has reported it
        return shape
    check_layout(shape, layout, None, problems, sequence_parallel=config.actor.layout.sequence_parallel)
    longest = config.data.max_prompt_length + config.data.max_response_length
    check_length(shape, longest, "data.max_prompt_length + data.max_response_length", problems)
    return shape


def _check_same_tokens(reward: Path, actor: Path, problems: Problems) -> None:
    """The reward model reads the actor's ids as they are, so its tokenizer must give every token the same id."""
    if not any((reward / name).is_file() for name in FILES):
        problems.add(
            "there is no tokenizer, so nothing says that it reads the actor's tokens",
            where=f"reward.model.path={reward}",
            fix="put the tokenizer's files that it was trained with into its folder",
        )
        return
    try:
        vocabularies = [load_tokenizer(folder).hf.get_vocab() for folder in (reward, actor)]
    except UserError as error:
        problems.extend(error)
        return
    differ = sorted(token for token, number in vocabularies[1].items() if vocabularies[0].get(token) != number)
    if differ:
        problems.add(
            f"{len(differ)} tokens of the actor have another id there, {differ[0]!r} for one",
            where=f"reward.model.path={reward}",
            fix="take a reward model with the actor's tokenizer",
        )


def load_preference_rows(
    config: Config, tokenizer: Tokenizer, shape: ModelShape, problems: Problems
) -> tuple[PreferenceDataset, PreferenceDataset | None]:
    """Training rows of the algorithm's kind; validation rows are always pairs, whose order is what is measured."""
    data, kind = config.data, row_kind(config)
    options = {"vocab": shape.vocab, "spool": spool_folder(config)}
    train = load_preferences(data.train_files, data, tokenizer, problems, kind=kind, **options)
    if not data.val_files:
        return train, None
    val = load_preferences(data.val_files, data, tokenizer, problems, kind="pair", key="data.val_files", **options)
    try:
        dp = train_layout(config).dp
    except ValueError:  # check_rules has reported it
        return train, val
    if 0 < len(val) < dp:
        problems.add(
            f"{len(val)} pairs leave some of the {dp} data parallel ranks without any",
            where="data.val_files",
            fix=f"at least {dp} pairs, or fewer workers",
        )
    return train, val
