"""Checkpoints copied to other storage and back: fsspec's memory, and a real S3 server where moto is installed."""

from __future__ import annotations

import uuid

import fsspec
import pytest

from megaverl.checkpoint import mirror as mirror_module
from megaverl.checkpoint.mirror import Mirror, fetch_newer
from megaverl.checkpoint.retention import newest_whole
from megaverl.checkpoint.train_state import begin_state, commit_state, save_state, step_dir
from megaverl.errors import RunError, UserError
from megaverl.parallel.layout import Layout
from megaverl.trainer.mirroring import Mirroring


def save(run, *steps):
    for step in steps:
        begin_state(run, step)
        commit_state(run, step, Layout(), save_state(run, step, 0, 1, {"step": step}, {"step": step}))


@pytest.fixture
def s3(monkeypatch):
    """A real server that speaks S3."""
    server_module = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    monkeypatch.setattr(mirror_module, "PAUSE_SECONDS", 0.01)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    server.bucket = f"runs-{uuid.uuid4()}"  # what the servers of a process hold is common to them
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(server.bucket)
    yield server
    server.stop()


@pytest.fixture(params=["memory", "s3"])
def url(request):
    if request.param == "s3":
        return f"s3://{request.getfixturevalue('s3').bucket}/run"
    return f"memory://{uuid.uuid4()}/run"


def test_a_checkpoint_goes_there_and_comes_back_whole(url, tmp_path):
    save(tmp_path / "a", 2, 10)
    mirror = Mirror(url)
    assert mirror.steps() == []
    for step in (2, 10):
        mirror.upload(step_dir(tmp_path / "a", step))
    mirror.upload(step_dir(tmp_path / "a", 10))  # again: nothing to do
    assert mirror.steps() == [2, 10]
    assert fetch_newer(url, tmp_path / "b", None) == step_dir(tmp_path / "b", 10)
    assert newest_whole(tmp_path / "b") == (step_dir(tmp_path / "b", 10), {})
    assert fetch_newer(url, tmp_path / "b", 10) is None
    mirror.remove(10)
    mirror.remove(10)
    assert mirror.steps() == [2]


def test_a_copy_without_manifest_is_not_there(url, tmp_path):
    save(tmp_path, 3)
    mirror = Mirror(url)
    mirror.upload(step_dir(tmp_path, 3))
    mirror._files.rm_file(f"{mirror._root}/step_3/manifest.json")
    assert mirror.steps() == []
    assert fetch_newer(url, tmp_path / "b", None) is None


def test_storage_that_is_down_loses_nothing_and_the_next_checkpoint_is_copied_again(s3, tmp_path):
    save(tmp_path, 1, 2)
    mirroring = Mirroring(f"s3://{s3.bucket}/run")
    s3.stop()
    mirroring.copy(step_dir(tmp_path, 1), [])
    with pytest.raises(RunError, match="tried 4 times"):
        mirroring.finish()
    assert "it lies in" in mirroring.news()
    assert mirroring.news() is None
    assert newest_whole(tmp_path)[0] == step_dir(tmp_path, 2)


def test_a_failing_request_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(mirror_module, "PAUSE_SECONDS", 0.0)
    save(tmp_path, 1)
    mirror, failures = Mirror(f"memory://{uuid.uuid4()}"), [OSError("reset by peer")] * 3
    put = mirror._files.put_file

    def flaky(*args, **options):
        if failures:
            raise failures.pop()
        return put(*args, **options)

    monkeypatch.setattr(mirror._files, "put_file", flaky)
    mirror.upload(step_dir(tmp_path, 1))
    assert not failures
    assert mirror.steps() == [1]


def test_unknown_storage_is_refused():
    with pytest.raises(UserError, match=r"trainer\.mirror=nowhere://x"):
        Mirror("nowhere://x")
