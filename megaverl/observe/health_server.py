"""The driver's HTTP endpoint: ``/healthz`` says where the run stands, ``/metrics`` its last numbers for Prometheus."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from megaverl.errors import Problem, UserError
from megaverl.observe.status import Status

HEALTHY = ("starting", "running", "finished", "stopped")


class HealthServer:
    """Answers from threads of its own, so that a run that hangs still says that it does. Use as a context.

    ``/healthz`` answers 200, or 503 once the run has failed or nothing has moved for ``limit`` seconds.

    Args:
        port: 0 takes a free one; `port` then says which.
        limit: seconds without progress that a phase may take.

    Raises:
        UserError: the address is taken or is not this machine's.
    """

    def __init__(self, status: Callable[[], Status], host: str, port: int, limit: float) -> None:
        handler = type("Handler", (_Handler,), {"status": staticmethod(status), "limit": limit})
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except OSError as error:
            raise UserError(
                Problem(
                    f"cannot listen on {host}:{port}: {error.strerror or error}",
                    where="observe.health_host, observe.health_port",
                    fix="observe.health_port=0 takes a free port",
                )
            ) from error
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="megaverl-health", daemon=True)

    def __enter__(self) -> HealthServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    status: Callable[[], Status]
    limit: float

    def do_GET(self) -> None:
        status = self.status()
        if self.path == "/healthz":
            healthy = is_healthy(status, self.limit)
            self._answer(200 if healthy else 503, "application/json", health_text(status))
        elif self.path == "/metrics":
            self._answer(200, "text/plain; version=0.0.4; charset=utf-8", prometheus_text(status))
        else:
            self._answer(404, "text/plain; charset=utf-8", "there are /healthz and /metrics\n")

    def _answer(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are no news of the run."""


def is_healthy(status: Status, limit: float) -> bool:
    """Whether the run goes on, or has ended well; ``limit`` in seconds without progress."""
    going = status.state in ("starting", "running")
    return status.state in HEALTHY and not (going and time.time() - status.progress > limit)


def health_text(status: Status) -> str:
    """The JSON of ``/healthz``."""
    document = status.document()
    names = ("state", "step", "total_steps", "phase", "seconds_since_progress", "run_dir", "host", "pid", "error")
    return (
        json.dumps({"status": document["state"], **{name: document[name] for name in names if name != "state"}}) + "\n"
    )


def prometheus_text(status: Status) -> str:
    """All numbers of the last step, ``actor/pg_loss`` as ``megaverl_actor_pg_loss``, in Prometheus' text format."""
    lines = [
        *_gauge("megaverl_up", "1 while the run goes on.", float(status.state in ("starting", "running"))),
        *_gauge("megaverl_step", "The step in progress.", status.step),
        *_gauge("megaverl_seconds_since_progress", "Seconds since a phase began.", time.time() - status.progress),
        "# HELP megaverl_phase What goes on.",
        "# TYPE megaverl_phase gauge",
        f'megaverl_phase{{phase="{_label(status.phase)}",state="{status.state}"}} 1',
    ]
    if status.total_steps is not None:
        lines += _gauge("megaverl_total_steps", "Steps of the whole run.", status.total_steps)
    names: set[str] = set()
    for name, value in status.metrics.items():
        metric = "megaverl_" + re.sub(r"\W", "_", name.replace("@", "_at_"), flags=re.ASCII)
        if metric not in names:  # two names that differ in signs alone: the first stands
            names.add(metric)
            lines += _gauge(metric, name, value)
    return "\n".join(lines) + "\n"


def _gauge(name: str, help_text: str, value: float) -> list[str]:
    text = {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN" if value != value else repr(float(value)))
    escaped = help_text.replace("\\", "\\\\").replace("\n", "\\n")
    return [f"# HELP {name} {escaped}", f"# TYPE {name} gauge", f"{name} {text}"]


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
