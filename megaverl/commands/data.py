"""``megaverl data``: prepare and check rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megaverl.commands.output import print_json, print_text
from megaverl.config.derived import needs_reward_model, row_kind
from megaverl.config.fields import all_fields
from megaverl.config.load import load_config
from megaverl.errors import Problems, UserError

if TYPE_CHECKING:
    from megaverl.config.schema import Config
    from megaverl.data.mapping import ColumnMap
    from megaverl.data.report import DataReport
    from megaverl.data.tokenizer import Tokenizer


def gsm8k(source: str, out: str, *, overwrite: bool, as_json: bool) -> int:
    """``data gsm8k FOLDER --out FOLDER``."""
    from megaverl.data.prepare import prepare_gsm8k

    report = prepare_gsm8k(source, out, overwrite=overwrite)
    _print(report, as_json)
    return 0


def rows(files: Sequence[str], out: str, columns: ColumnMap, *, overwrite: bool, as_json: bool) -> int:
    """``data rows FILE ... --out FILE``."""
    from megaverl.data.mapping import prepare_rows

    _print(prepare_rows(files, out, columns, overwrite=overwrite), as_json)
    return 0


def preference(files: Sequence[str], out: str, names: dict[str, str], *, overwrite: bool, as_json: bool) -> int:
    """``data preference FILE ... --out FILE``."""
    from megaverl.data.mapping import prepare_pairs

    _print(prepare_pairs(files, out, names, overwrite=overwrite), as_json)
    return 0


def arithmetic(out: str, seed: int, *, overwrite: bool, as_json: bool) -> int:
    """``data arithmetic --out FOLDER``."""
    from megaverl.data.arithmetic import write_arithmetic

    paths = {name: str(path) for name, path in write_arithmetic(out, seed, overwrite=overwrite).items()}
    if as_json:
        print_json({"paths": paths})
    else:
        print_text("\n".join(paths.values()))
    return 0


def check(
    words: Sequence[str], *, config_path: str | None, tokenizer: str | None, kind: str | None, as_json: bool
) -> int:
    """``data check [FILE ...] [key=value ...]``: the named files, or those of the configuration."""
    overrides = [word for word in words if _is_override(word)]
    config = load_config(config_path, overrides)
    files = [word for word in words if word not in overrides]
    kind = kind or row_kind(config)
    named = {"data.train_files": files} if files else _files_of(config, kind)
    loaded = _tokenizer(config, tokenizer, named)
    reports = _check_all(named, config, loaded, kind)
    if as_json:
        print_json([report.to_dict() for report in reports])
    else:
        print_text("\n".join(line for report in reports for line in report.lines()))
    return 0


class BadRows(UserError):
    """Rows that a run would refuse: what the check is there to find, so the command failed at nothing (exit code 1)."""

    exit_code = 1


def _check_all(named: dict[str, list[str]], config: Config, tokenizer: Tokenizer, kind: str) -> list[DataReport]:
    """Reports of all groups of files; their problems together.

    Raises:
        BadRows: rows are not as a run needs them.
        UserError: a path leads nowhere.
    """
    from megaverl.data.files import resolve_files
    from megaverl.data.prepare import check_data
    from megaverl.models.critic_map import critic_source
    from megaverl.rewards.registry import Registry

    options: dict[str, Any] = {
        "kind": kind,
        "custom_reward": config.reward.function.path is not None,
        "registry": Registry.of(config.reward),
        "reward_model": needs_reward_model(config),
    }
    if config.model.path:
        options["vocab"] = critic_source(config.model.path).shape.vocab  # rm may start from a classification
    problems, reports = Problems(), []
    for key, files in named.items():
        resolve_files(files, problems, key=key)
    problems.raise_if_any()
    for key, files in named.items():
        if kind == "kto" and key == "data.val_files":
            options["kind"] = "pair"
        try:
            reports.append(check_data(files, config.data, tokenizer, key=key, **options))
        except UserError as error:
            problems.extend(error)
    if problems.found:
        raise BadRows(problems.found)
    return reports


def _files_of(config: Config, kind: str) -> dict[str, list[str]]:
    named = {"data.train_files": config.data.train_files}
    if kind != "sft":
        named["data.val_files"] = config.data.val_files
    return {key: files for key, files in named.items() if files}


def _tokenizer(config: Config, folder: str | None, named: dict[str, list[str]]) -> Tokenizer:
    """The tokenizer to check with; refuses with all that is not given."""
    problems = Problems()
    if not named:
        problems.add("no files to check", where="command line", fix="name files, or a --config with data.train_files")
    folder = folder or config.model.tokenizer_path or config.model.path
    if not folder:
        problems.add("no tokenizer to count tokens with", where="command line", fix="--tokenizer FOLDER")
    problems.raise_if_any()
    from megaverl.data.tokenizer import load_tokenizer

    return load_tokenizer(folder, config.model.path or None)


def _is_override(word: str) -> bool:
    """Whether a word sets a key; a file name may have = in it as well (``split=train/part.parquet``)."""
    key, equals, _ = word.partition("=")
    sections = {name.split(".", 1)[0] for name in all_fields()}
    return bool(equals) and "." in key and key.split(".", 1)[0] in sections and "/" not in key


def _print(report: Any, as_json: bool) -> None:
    if as_json:
        print_json(report.to_dict())
    else:
        print_text("\n".join(report.lines()))
