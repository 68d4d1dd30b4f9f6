"""Line charts as SVG text: no script, no style sheet, nothing to fetch. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from megaverl.observe.console import short

WIDTH, HEIGHT = 560, 220
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 26
COLORS = ("#1f6f8b", "#d1495b", "#66a182", "#edae49", "#6a4c93", "#3d405b", "#8d6a9f", "#00798c", "#a37c40", "#777777")
MAX_POINTS = 400
"""Points of a line; a longer run shows the mean of so many stretches."""


@dataclass(frozen=True)
class Line:
    """One curve: its name, and (step, value) with values that may be nan or inf."""

    name: str
    points: Sequence[tuple[float, float]]


def chart(title: str, lines: Sequence[Line]) -> str:
    """A figure with the curves that have a finite point; empty text without any."""
    thinned = [Line(line.name, thin([p for p in line.points if math.isfinite(p[1])])) for line in lines]
    drawn = [line for line in thinned if line.points]
    if not drawn:
        return ""
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points]
    x_range, y_range = _widened(min(xs), max(xs)), _widened(min(ys), max(ys))
    body = [_axes(x_range, y_range)]
    body += [_polyline(line, COLORS[i % len(COLORS)], x_range, y_range) for i, line in enumerate(drawn)]
    legend = " ".join(
        f'<span><i style="background:{COLORS[i % len(COLORS)]}"></i>{escape(line.name)} '
        f"<b>{short(line.points[-1][1], None)}</b></span>"
        for i, line in enumerate(drawn)
    )
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(body)}</svg>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{picture}<p>{legend}</p></figure>"


def thin(points: Sequence[tuple[float, float]], most: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most ``most`` points: means of stretches of equal length. The last point stays as it is."""
    if len(points) <= most:
        return list(points)
    kept, count = [], len(points) - 1
    for i in range(most - 1):
        part = points[i * count // (most - 1) : (i + 1) * count // (most - 1)]
        kept.append((sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)))
    return [*kept, points[-1]]


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range of some width: a flat curve lies in the middle."""
    if low == high:
        room = abs(low) * 0.1 or 1.0
        return low - room, high + room
    return low, high


def _place(x: float, y: float, x_range: tuple[float, float], y_range: tuple[float, float]) -> tuple[float, float]:
    across = (x - x_range[0]) / (x_range[1] - x_range[0])
    up = (y - y_range[0]) / (y_range[1] - y_range[0])
    return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def _polyline(line: Line, color: str, x_range: tuple[float, float], y_range: tuple[float, float]) -> str:
    places = [_place(x, y, x_range, y_range) for x, y in line.points]
    if len(places) == 1:
        return f'<circle cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="3" fill="{color}"/>'
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline points="{text}" fill="none" stroke="{color}" stroke-width="1.6" stroke-linejoin="round"/>'


def _axes(x_range: tuple[float, float], y_range: tuple[float, float]) -> str:
    parts = []
    for i in range(5):
        value = y_range[0] + (y_range[1] - y_range[0]) * i / 4
        _, y = _place(x_range[0], value, x_range, y_range)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    for i, anchor in ((0, "start"), (2, "middle"), (4, "end")):
        value = x_range[0] + (x_range[1] - x_range[0]) * i / 4
        x, _ = _place(value, y_range[0], x_range, y_range)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{_number(value)}</text>')
    return "".join(parts)


def _number(value: float) -> str:
    """For an axis: three significant digits."""
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e+0" in text and abs(value) < 1e6 else text
