"""Preparation of rows whose columns have other names: which column is which, and texts with an instruction."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaverl.data.files import Record, read_all, shorten
from megaverl.data.preference import SHOWN, PreferencePair, check_preference
from megaverl.data.prepare import PrepareReport
from megaverl.data.schema import Row, RowChecker, RowRules, describe_kind
from megaverl.data.write import new_folder, write_rows, write_table
from megaverl.errors import Problem, Problems, UserError


@dataclass(frozen=True)
class ColumnMap:
    """Which columns of the given files hold what; dots reach into nested columns (``reward_model.ground_truth``).

    Attributes:
        prompt: the prompt: chat messages, or a text that becomes one message of the user.
        ground_truth: the right answer; None makes rows for supervised training.
        boxed: the right answer is what the last ``\\boxed{..}`` of the column holds, as in solutions of MATH.
        response: the answer to learn; None makes rows without one.
        data_source: a name that every row gets; rows with a ground truth need it or ``data_source_column``.
        data_source_column: the column that holds each row's own name, in place of ``data_source``.
        ability: label that every row gets.
        instruction: text put after each prompt that is a text.
        plain: texts stay strings and go to the model as they are, without the chat template.
    """

    prompt: str = "prompt"
    ground_truth: str | None = None
    response: str | None = None
    data_source: str = ""
    data_source_column: str | None = None
    ability: str = ""
    instruction: str = ""
    plain: bool = False
    boxed: bool = False


def prepare_rows(
    files: Sequence[str | Path], out: str | Path, columns: ColumnMap, *, overwrite: bool = False
) -> PrepareReport:
    """Writes one parquet file in the row schema from jsonl, parquet or Arrow files and folders.

    Columns that the map does not name go to ``extra_info``, so that nothing is lost.

    Raises:
        UserError: a file cannot be read, rows lack a column or are not what the schema asks for (the first 20
            problems and their count), or ``out`` exists.
    """
    problems = Problems()
    checker = RowChecker(_rules(columns))
    rows = []
    for number, record in enumerate(read_all(files, problems)):
        row = _mapped(record, number, columns, checker, problems)
        if row is not None:
            rows.append(row)
    return _written(out, rows, problems, [str(f) for f in files], overwrite)


def prepare_pairs(
    files: Sequence[str | Path], out: str | Path, names: Mapping[str, str], *, overwrite: bool = False
) -> PrepareReport:
    """Writes one parquet file of preference pairs ``prompt, chosen, rejected``.

    ``chosen`` and ``rejected`` may be whole conversations: what both begin with is then the prompt. A file that has
    a prompt column as well must agree with it.

    Args:
        names: ``prompt``, ``chosen`` and ``rejected`` -> the column that holds it.

    Raises:
        UserError: as `prepare_rows`.
    """
    problems = Problems()
    pairs: list[PreferencePair] = []
    for record in read_all(files, problems):
        values = {key: record.values[name] for key, name in names.items() if name in record.values}
        pair, found = check_preference(split_conversations(values), record.where, "pair")
        problems.found += found
        if pair is not None:
            pairs.append(pair)
    if problems.found:
        raise UserError(shorten(problems.found, limit=SHOWN, what=", ".join(map(str, files))))
    target = _target(out, overwrite)
    rows = [{"prompt": p.prompt, "chosen": p.chosen, "rejected": p.rejected} for p in pairs]
    return PrepareReport({"rows": write_table(target, rows)}, {"rows": len(rows)})


def split_conversations(values: Mapping[str, Any]) -> dict[str, Any]:
    """The row with the messages that chosen and rejected share as its prompt, where both are conversations.

    A prompt that is a text must be the conversation's only message of the user; a prompt that is messages must equal
    what is shared. Where it does not, the row stays as it is, and the check of the row names what is wrong.
    """
    row = dict(values)
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if not (isinstance(chosen, list) and isinstance(rejected, list) and len(chosen) > 1 and len(rejected) > 1):
        return row
    if chosen[:-1] != rejected[:-1]:
        return row
    shared, given = chosen[:-1], row.get("prompt")
    if isinstance(given, str):
        users = [m.get("content") for m in shared if isinstance(m, Mapping) and m.get("role") == "user"]
        if users != [given]:
            return row
    elif given is not None and given != shared:
        return row
    return {**row, "prompt": shared, "chosen": chosen[-1:], "rejected": rejected[-1:]}


def last_boxed(text: str) -> str | None:
    """What the last ``\\boxed{..}`` or ``\\fbox{..}`` of a solution holds, braces matched; None without one."""
    opened = list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))
    if not opened:
        return None
    start, depth = opened[-1].end(), 1
    for at in range(start, len(text)):
        if text[at] in "{}" and text[at - 1] != "\\":
            depth += 1 if text[at] == "{" else -1
        if not depth:
            return text[start:at].strip() or None
    return None


def _rules(columns: ColumnMap) -> RowRules:
    """Ground truths are checked where the rows' data source has a scorer; any other name is for a custom one."""
    if columns.ground_truth is None:
        return RowRules(response_key="response")
    from megaverl.rewards.registry import Registry

    checks = Registry()
    return RowRules(sources=checks if columns.data_source in checks else None)


def _mapped(record: Record, number: int, columns: ColumnMap, checker: RowChecker, problems: Problems) -> Row | None:
    """One row in the schema, or None after its problems were added."""
    missing: list[Problem] = []
    prompt = _column(record, columns.prompt, "--prompt", missing)
    truth = _column(record, columns.ground_truth, "--answer", missing)
    response = _column(record, columns.response, "--response", missing)
    source = _column(record, columns.data_source_column, "--source-column", missing) or columns.data_source
    if columns.boxed and isinstance(truth, str):
        solution, truth = truth, last_boxed(truth)
        if truth is None:
            what = f"no \\boxed{{..}} with an answer in {solution[-40:]!r}"
            missing.append(
                Problem(what, f"{record.where}, key {columns.ground_truth}", "leave the row out, or --boxed")
            )
    if missing:
        problems.found += missing
        return None
    if isinstance(prompt, str) and prompt.strip():
        text = f"{prompt.strip()} {columns.instruction}".strip() if columns.instruction else prompt
        prompt = text if columns.plain else [{"role": "user", "content": text}]
    values: dict[str, Any] = {"prompt": prompt, "data_source": source, "ability": columns.ability}
    if columns.ground_truth is not None:
        values["reward_model"] = {"style": "rule", "ground_truth": truth}
    if columns.response is not None:
        values["response"] = response
    used = {c and c.split(".")[0] for c in (columns.prompt, columns.ground_truth, columns.response)}
    rest = {k: v for k, v in record.values.items() if k not in used and v is not None}
    row, found = checker.check({**values, "extra_info": {**rest, "index": number}}, record.where)
    problems.found += found
    if row is not None and columns.response is not None and row.response is None:
        if not isinstance(response, str) or not response.strip():
            what = f"the response must be a text, this is {describe_kind(response)}"
            problems.add(what, where=f"{record.where}, key {columns.response}", fix="Fill it or remove the row.")
            return None
        return Row(row.data_source, row.prompt, row.ability, row.ground_truth, row.extra_info, response, row.style)
    return row


def _column(record: Record, name: str | None, option: str, missing: list[Problem]) -> Any:
    """The value in a column; dots reach into nested ones. A column that is not there goes to ``missing``."""
    if name is None:
        return None
    if name in record.values:
        return record.values[name]
    value: Any = record.values
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            fix = f"{option} names it; the row has {', '.join(sorted(record.values)) or 'no columns'}."
            missing.append(Problem(f"column {name!r} is missing", f"{record.where}, key {name}", fix))
            return None
        value = value[part]
    return value


def _target(out: str | Path, overwrite: bool) -> Path:
    target = Path(out)
    if target.suffix != ".parquet":
        raise UserError(
            Problem(
                f"the file must end in .parquet, this is {target.name}", "--out", fix=f"name it {target.stem}.parquet"
            )
        )
    return new_folder(target.parent, [target.name], overwrite=overwrite) / target.name


def _written(
    out: str | Path, rows: Sequence[Row], problems: Problems, files: Sequence[str], overwrite: bool
) -> PrepareReport:
    if problems.found:
        raise UserError(shorten(problems.found, limit=SHOWN, what=", ".join(files)))
    target = _target(out, overwrite)
    return PrepareReport({"rows": write_rows(target, rows)}, {"rows": len(rows)})
