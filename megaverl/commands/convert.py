"""``megaverl convert``: between Hugging Face folders and divided models, and the proof that nothing is lost."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megaverl.commands.output import print_json, print_table, print_text, stdout_to_stderr
from megaverl.errors import Problem, UserError

if TYPE_CHECKING:
    from megaverl.checkpoint.hf_convert import Converted

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def to_hf(checkpoint: str, out: str, *, model: str | None, role: str, shard_size: str | None, as_json: bool) -> int:
    """``convert to-hf CHECKPOINT OUT``."""
    limit = parse_size(shard_size) if shard_size else None
    from megaverl.checkpoint.hf_convert import to_hf as convert

    _report(convert(checkpoint, out, role=role, model=model, max_shard_bytes=limit), "from", as_json)
    return 0


def to_megatron(source: str, out: str, *, tp: int, pp: int, as_json: bool) -> int:
    """``convert to-megatron HF OUT --tp N --pp N``."""
    check_sizes(tp, pp)
    from megaverl.checkpoint.hf_convert import to_megatron as convert

    _report(convert(source, out, tp=tp, pp=pp), "to", as_json)
    return 0


def verify(folder: str, *, tp: int, pp: int, as_json: bool) -> int:
    """``convert verify HF``: a table of checks; exit code 1 when one of them fails."""
    check_sizes(tp, pp)
    from megaverl.checkpoint.hf_verify import verify as run
    from megaverl.parallel.layout import Layout

    with stdout_to_stderr():  # libraries talk
        checks = run(folder, tp=tp, pp=pp)
    good = all(check.ok for check in checks)
    if as_json:
        print_json({"ok": good, "model": folder, "tp": tp, "pp": pp, "checks": [asdict(check) for check in checks]})
    else:
        rows = [(check.name, "ok" if check.ok else "WRONG", check.detail) for check in checks]
        print_table(f"{folder} in layout {Layout(tp=tp, pp=pp)}", ("check", "result", "detail"), rows)
    return 0 if good else 1


def parse_size(text: str) -> int:
    """``500MB`` -> bytes. Raises UserError for anything else than a whole number above 0 with KB, MB or GB."""
    number, unit = text[:-2], text[-2:].upper()
    if unit not in UNITS or not number.isdecimal() or int(number) < 1:
        raise UserError(Problem(f"{text!r} is no size", where="--shard-size", fix="e.g. 5GB or 500MB"))
    return int(number) * UNITS[unit]


def check_sizes(tp: int, pp: int) -> None:
    """Raises UserError unless both are at least 1."""
    wrong = [
        Problem(f"must be at least 1, got {n}", where=f"--{name}", fix=f"give --{name} 1 or more")
        for name, n in (("tp", tp), ("pp", pp))
        if n < 1
    ]
    if wrong:
        raise UserError(wrong)


def _report(made: Converted, preposition: str, as_json: bool) -> None:
    out, layout = Path(made.out).resolve(), made.layout
    if as_json:
        sizes = {"tp": layout.tp, "pp": layout.pp, "tensors": made.tensors, "bytes": made.bytes}
        print_json({"out": str(out), "source": str(made.source), **sizes})
    else:
        divided = f"{preposition} tp {layout.tp} x pp {layout.pp}"
        print_text(f"{out}: {made.tensors} tensors, {made.bytes / 1e6:,.1f} MB, {divided}")
