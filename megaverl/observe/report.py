"""``report.html``: one file that shows how a run went, its curves drawn in it; nothing is fetched from elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megaverl.errors import Problem, UserError
from megaverl.observe.chart import Line, chart
from megaverl.observe.console import short
from megaverl.observe.metrics_file import read_metrics
from megaverl.observe.status import read_status
from megaverl.observe.timing import PHASES

Rows = Sequence[Mapping[str, float]]

# Title of a chart -> label of a curve -> metric names; the first that a run has is drawn.
CHARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "Reward": {
        "mean": ("critic/rewards/mean", "critic/score/mean"),
        "score, mean": ("critic/score/mean",),
        "score, largest": ("critic/score/max",),
        "score, smallest": ("critic/score/min",),
    },
    "Loss": {"train": ("train/loss",), "validation": ("val/loss",)},
    "KL": {
        "to the reference, in the loss": ("actor/kl_loss",),
        "to the reference, in the reward": ("actor/reward_kl_penalty",),
        "of one update": ("actor/ppo_kl",),
    },
    "Entropy": {"entropy": ("actor/entropy",)},
    "Clip fraction": {
        "upper": ("actor/pg_clipfrac",),
        "lower": ("actor/pg_clipfrac_lower",),
        "values": ("critic/vf_clipfrac",),
    },
    "Response length, tokens": {"mean": ("response_length/mean",), "largest": ("response_length/max",)},
    "Share of responses cut off": {"share": ("response_length/clip_ratio",)},
    "Prompt length, tokens": {"mean": ("prompt_length/mean",), "largest": ("prompt_length/max",)},
    "Gradient norm": {
        "actor": ("actor/grad_norm",),
        "critic": ("critic/grad_norm",),
        "train": ("train/grad_norm",),
    },
    "Critic": {"loss": ("critic/vf_loss",), "explained variance": ("critic/vf_explained_var",)},
    "Learning rate": {"actor": ("actor/lr",), "critic": ("critic/lr",), "train": ("train/lr",)},
    "Throughput, tokens per second and worker": {"throughput": ("perf/throughput",)},
    "Memory of the worst worker, GB": {
        "host": ("perf/cpu_memory_used_gb",),
        "GPU": ("perf/max_memory_allocated_gb",),
    },
    "Bytes moved at a handoff": {"bytes": ("handoff/bytes_moved",)},
}
STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1200px;padding:0 1rem;color:#222;background:#fff}
h1{font-size:1.5rem;margin:0 0 .3rem}h2{font-size:1.1rem;margin:2rem 0 .5rem}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(520px,1fr));gap:1rem}
figure{margin:0;padding:.7rem;border:1px solid #ddd;border-radius:6px}figcaption{font-weight:600}
figure p{margin:.2rem 0 0;font-size:.85rem}figure p span{margin-right:1rem}
figure i{display:inline-block;width:.8em;height:.8em;margin-right:.3em;border-radius:2px}
svg{width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#555}.grid{stroke:#e5e5e5}
table{border-collapse:collapse}td,th{padding:.15rem .8rem .15rem 0;text-align:left;vertical-align:top}
td.number{text-align:right;font-variant-numeric:tabular-nums}
pre{background:#f6f6f6;padding:.8rem;overflow:auto;font-size:.8rem;border-radius:6px}
"""


def report_html(run_dir: Path | str) -> str:
    """The report of the run in a folder.

    Raises:
        UserError: there is no run, or it has logged nothing yet.
    """
    folder = Path(run_dir)
    rows = _rows(folder / "metrics.jsonl")
    title = escape(f"{folder.resolve().name}")
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        _table(_facts(folder, rows)),
        f'<div class="charts">{"".join(_charts(rows))}</div>',
        "<h2>Seconds by phase</h2>",
        _phases(rows),
        *_files(folder),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _rows(path: Path) -> Rows:
    try:
        rows = read_metrics(path)
    except (OSError, ValueError) as error:
        what = "there is no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        fix = "name the folder of a run with the logger `file` (trainer.loggers) that has logged a step"
        raise UserError(Problem(what, where=str(path), fix=fix)) from error
    if not rows:
        raise UserError(Problem("holds no step yet", where=str(path), fix="wait for the first step"))
    return rows


def _facts(folder: Path, rows: Rows) -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = [("folder", str(folder.resolve()))]
    try:
        status = read_status(folder)
        total = f" of {status.total_steps}" if status.total_steps else ""
        facts.append(
            ("state", f"{status.state}, step {status.step}{total}" + (f": {status.error}" if status.error else ""))
        )
        facts.append(("started", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.started))))
    except UserError:
        facts.append(("state", "not known: there is no status.json"))
    facts.append(("steps logged", f"{len(rows)}, the last one {rows[-1]['step']:.0f}"))
    seconds = sum(row.get("timing_s/step", 0.0) for row in rows)
    tokens = sum(row.get("perf/total_num_tokens", 0.0) for row in rows)
    facts.append(("time in steps", f"{seconds:,.1f} s"))
    facts.append(("tokens", f"{tokens:,.0f}"))
    provenance = _json(folder / "provenance.json")
    if provenance:
        facts.append(("layout", str(provenance.get("layout", ""))))
        git = provenance.get("git") or {}
        facts.append(("git", f"{git.get('commit', 'none')}{' with changes' if git.get('dirty') else ''}"))
    return facts


def _charts(rows: Rows) -> Iterator[str]:
    for title, curves in CHARTS.items():
        yield chart(title, list(_lines(rows, curves)))
    validation = sorted({name for row in rows for name in row if name.startswith("val-core/")})
    yield chart("Validation", [Line(name.removeprefix("val-core/"), _points(rows, name)) for name in validation])
    phases = [name for name in _phase_names(rows) if name != "timing_s/step"]
    yield chart("Seconds by phase", [Line(_phase_label(name), _points(rows, name)) for name in phases])


def _lines(rows: Rows, curves: Mapping[str, tuple[str, ...]]) -> Iterator[Line]:
    taken: set[str] = set()
    for label, names in curves.items():
        name = next((name for name in names if any(name in row for row in rows)), None)
        if name is not None and name not in taken:  # without a KL in the reward, score and reward are one curve
            taken.add(name)
            yield Line(label, _points(rows, name))


def _points(rows: Rows, name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in rows if name in row]


def _phase_names(rows: Rows) -> list[str]:
    """``timing_s/*`` of the run, the longest first."""
    names = {name for row in rows for name in row if name.startswith("timing_s/")}
    return sorted(names, key=lambda name: -sum(row.get(name, 0.0) for row in rows))


def _phase_label(name: str) -> str:
    phase = name.removeprefix("timing_s/")
    return PHASES.get(phase, phase.replace("_", " "))


def _phases(rows: Rows) -> str:
    steps = sum(row.get("timing_s/step", 0.0) for row in rows)
    body = []
    for name in _phase_names(rows):
        seconds = [row[name] for row in rows if name in row]
        share = f"{100 * sum(seconds) / steps:.0f} %" if steps else ""
        cells = (f"{sum(seconds):,.1f}", f"{sum(seconds) / len(seconds):.3g}", share)
        numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        body.append(f"<tr><td>{escape(_phase_label(name))}</td>{numbers}</tr>")
    head = "<tr><th>phase</th><th>seconds</th><th>each time</th><th>of the steps</th></tr>"
    return f"<table>{head}{''.join(body)}</table>"


def _files(folder: Path) -> Iterator[str]:
    for title, name in (("Last step", ""), ("Configuration", "config.yaml"), ("Provenance", "provenance.json")):
        if not name:
            row = _rows(folder / "metrics.jsonl")[-1]
            text = "\n".join(f"{key} {short(value, None)}" for key, value in sorted(row.items()))
        else:
            path = folder / name
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text:
            yield f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _table(facts: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    return f"<table>{rows}</table>"


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
