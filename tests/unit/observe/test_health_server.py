"""The endpoint, over real sockets on this machine."""

from __future__ import annotations

import json
import math
import time
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from megaverl.errors import UserError
from megaverl.observe.health_server import HealthServer, is_healthy, prometheus_text
from megaverl.observe.status import Status


def get(server: HealthServer, path: str) -> tuple[int, str, str]:
    try:
        with urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def test_healthz_says_where_the_run_stands():
    status = Status(state="running", step=4, total_steps=9, phase="generating", progress=time.time() - 2)
    with HealthServer(lambda: status, "127.0.0.1", 0, limit=60) as server:
        code, kind, text = get(server, "/healthz")
        found = json.loads(text)
        assert (code, kind) == (200, "application/json")
        assert (found["status"], found["step"], found["phase"]) == ("running", 4, "generating")
        assert 2 <= found["seconds_since_progress"] < 60
        status.progress -= 100
        assert get(server, "/healthz")[0] == 503, "nothing has moved for longer than a phase may take"
        status.state = "finished"
        assert get(server, "/healthz")[0] == 200
        status.state, status.error = "failed", "rank 3 died"
        code, _, text = get(server, "/healthz")
        assert (code, json.loads(text)["error"]) == (503, "rank 3 died")
        assert get(server, "/other")[0] == 404


def test_the_endpoint_ends_with_its_context_and_a_taken_port_is_refused():
    with HealthServer(Status, "127.0.0.1", 0, limit=60) as server:
        with pytest.raises(UserError, match="cannot listen on"):
            HealthServer(Status, "127.0.0.1", server.port, limit=60)
        port = server.port
    with pytest.raises(OSError):  # noqa: PT011 - refused or reset, by the system
        urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2)


def test_metrics_are_what_prometheus_reads():
    parser = pytest.importorskip("prometheus_client.parser")
    metrics = {"actor/pg_loss": -0.25, "val-core/a/reward/mean@1": 0.5, "actor/grad_norm": math.inf, "x": math.nan}
    text = prometheus_text(Status(state="running", step=3, total_steps=7, phase='a "phase"\\', metrics=metrics))
    found = {s.name: s for family in parser.text_string_to_metric_families(text) for s in family.samples}
    assert found["megaverl_actor_pg_loss"].value == -0.25
    assert found["megaverl_val_core_a_reward_mean_at_1"].value == 0.5
    assert found["megaverl_actor_grad_norm"].value == math.inf
    assert math.isnan(found["megaverl_x"].value)
    assert (found["megaverl_step"].value, found["megaverl_total_steps"].value, found["megaverl_up"].value) == (3, 7, 1)
    assert found["megaverl_phase"].labels == {"phase": 'a "phase"\\', "state": "running"}


@pytest.mark.parametrize(
    ("state", "idle", "healthy"),
    [
        ("running", 5, True),
        ("running", 50, False),
        ("starting", 50, False),
        ("stopped", 50, True),
        ("failed", 0, False),
    ],
)
def test_health(state, idle, healthy):
    assert is_healthy(Status(state=state, progress=time.time() - idle), limit=20) == healthy
