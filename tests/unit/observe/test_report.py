"""The report: one file with curves, nothing from elsewhere."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from megaverl.cli import main
from megaverl.errors import UserError
from megaverl.observe.chart import HEIGHT, WIDTH, Line, chart, thin
from megaverl.observe.metrics_file import MetricsFile
from megaverl.observe.report import report_html
from megaverl.observe.status import StatusBoard


@pytest.fixture
def run_dir(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        file.log(
            {
                "critic/rewards/mean": 0.1 * step, "critic/score/mean": 0.1 * step, "actor/kl_loss": 0.01 * step,
                "actor/entropy": 1 / step, "actor/pg_clipfrac": math.nan if step == 2 else 0.0,
                "response_length/mean": 10.0 + step, "perf/throughput": 1000.0, "perf/cpu_memory_used_gb": 1.5,
                "timing_s/step": 2.0, "timing_s/gen": 0.5,
                "val-core/a<b>/reward/mean@1": 0.5, "perf/total_num_tokens": 100,
            },
            step,
        )  # fmt: skip
    file.close()
    with StatusBoard(tmp_path) as board:
        board.step(5, 5)
        board.finish()
    (tmp_path / "config.yaml").write_text("model:\n  path: <b>m</b>\n")
    (tmp_path / "provenance.json").write_text(
        json.dumps({"layout": "tp2-pp1-dp1", "git": {"commit": "abc", "dirty": True}})
    )
    return tmp_path


class _Figures(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.titles, self._in_title, self.urls = [], False, []

    def handle_starttag(self, tag, attributes):
        self._in_title = tag == "figcaption"
        self.urls += [value for name, value in attributes if name in ("src", "href", "xlink:href", "data", "action")]
        assert tag not in ("script", "link", "img", "iframe"), tag

    def handle_data(self, data):
        if self._in_title:
            self.titles.append(data)
            self._in_title = False


def test_the_report_has_a_curve_of_everything_and_needs_nothing_from_elsewhere(run_dir):
    page = report_html(run_dir)
    figures = _Figures()
    figures.feed(page)
    assert figures.urls == []
    assert not re.search(r"https?://|url\(|@import", page)
    assert {"Reward", "KL", "Entropy", "Clip fraction", "Response length, tokens", "Validation"} <= set(figures.titles)
    assert {"Seconds by phase", "Throughput, tokens per second and worker"} <= set(figures.titles)
    assert "Memory of the worst worker, GB" in figures.titles
    assert "Loss" not in figures.titles, "there is no such number"
    for text in ("finished, step 5 of 5", "tp2-pp1-dp1", "abc with changes", "10.0 s", "&lt;b&gt;m&lt;/b&gt;"):
        assert text in page
    assert "a<b>" not in page, "names of the user's are escaped"


def test_the_pictures_are_valid_and_inside_their_frame(run_dir):
    pictures = re.findall(r"<svg.*?</svg>", report_html(run_dir))
    assert len(pictures) >= 8
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        for line in root.iter("polyline"):
            for x, y in (map(float, point.split(",")) for point in line.get("points").split()):
                assert 0 <= x <= WIDTH
                assert 0 <= y <= HEIGHT


def test_a_chart_leaves_out_what_is_not_finite_and_a_flat_line_has_its_place():
    picture = chart("t", [Line("a", [(1, math.nan), (2, 3.0), (3, 3.0)]), Line("b", [(1, math.inf)])])
    assert picture.count("<polyline") == 1
    assert "nan" not in picture
    assert chart("t", [Line("a", [(1, math.nan)])]) == ""
    assert "<circle" in chart("t", [Line("a", [(1, 2.0)])])


def test_long_curves_are_thinned_to_means_and_keep_their_end():
    points = [(float(i), float(i)) for i in range(10_000)]
    found = thin(points, 100)
    assert len(found) == 100
    assert found[-1] == points[-1]
    assert found[0][1] == pytest.approx(50, rel=0.02)
    assert [x for x, _ in found] == sorted(x for x, _ in found)
    assert thin(points[:50], 100) == points[:50]


def test_the_command_writes_one_file_and_replaces_it(run_dir, capsys, tmp_path):
    assert main(["report", str(run_dir)]) == 0
    assert capsys.readouterr().out.strip() == str(run_dir / "report.html")
    first = (run_dir / "report.html").read_text()
    assert main(["report", str(run_dir), "--out", str(tmp_path / "other.html"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(tmp_path / "other.html")}
    assert (tmp_path / "other.html").read_text() == first


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        report_html(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="holds no step yet"):
        report_html(tmp_path)
