"""``megaverl report RUN``: one HTML file that shows how a run went."""

from __future__ import annotations

from pathlib import Path

from megaverl.commands.output import print_json, print_text
from megaverl.files import write_text
from megaverl.observe.report import report_html


def run(run_dir: str, out: str | None, *, as_json: bool) -> int:
    """Writes the report, ``report.html`` in the run directory by default; one that is there is replaced."""
    path = Path(out) if out else Path(run_dir) / "report.html"
    write_text(path, report_html(run_dir))
    if as_json:
        print_json({"report": str(path)})
    else:
        print_text(str(path))
    return 0
