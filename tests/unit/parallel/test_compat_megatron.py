import importlib.metadata
import subprocess
import sys

import pytest

from megaverl.parallel import megatron_version


def test_the_installed_version_is_one_that_was_tested():
    assert importlib.metadata.version("megatron-core") in megatron_version.SUPPORTED
    assert megatron_version.version_problem() is None


@pytest.mark.parametrize("version", ["0.15.0", "0.20.0", "1.0"])
def test_other_versions_are_named_with_the_ones_that_work(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    problem = megatron_version.version_problem()
    assert version in problem.what
    assert all(tested in problem.fix for tested in megatron_version.SUPPORTED)


def test_a_missing_package_is_named(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert "not installed" in megatron_version.version_problem().what


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_the_import_is_silent():
    done = run("import megaverl.parallel.compat_megatron")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_megatron_imported_before_is_refused():
    done = run("import megatron.core; import megaverl.parallel.compat_megatron")
    assert done.returncode != 0
    assert "import megaverl.parallel.compat_megatron first" in done.stderr
