"""Ray keeps a token in the user's home; a user without one gets a token for the run alone."""

from pathlib import Path

import pytest

from megaverl.workers.cluster import _home_takes_token


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)


def test_a_home_that_can_be_written_or_has_a_token_is_rays_place(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _home_takes_token()
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("x")
    assert _home_takes_token()


def test_a_home_that_is_not_there_or_not_known_is_none(monkeypatch):
    monkeypatch.setenv("HOME", "/proc/nowhere")
    assert not _home_takes_token()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
    assert _home_takes_token()
    monkeypatch.delenv("RAY_AUTH_TOKEN")

    def unknown():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    assert not _home_takes_token()
