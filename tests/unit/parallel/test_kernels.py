import importlib
import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from megaverl.parallel import kernels

CU126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize(
    ("capability", "archs", "runs"),
    [
        ((6, 1), CU126, True),
        ((6, 1), CU130, False),
        ((7, 0), CU130, False),
        ((7, 5), CU130, True),
        ((8, 9), CU130, True),  # code for 8.6 runs on 8.9
        ((9, 0), CU126, True),
        ((10, 3), CU126, False),
        ((12, 0), [*CU126, "compute_90"], True),  # PTX is compiled for what is newer
        ((8, 6), ["sm_90", "compute_90"], False),
        ((9, 0), ["sm_90a"], True),
        ((9, 1), ["sm_90a"], False),  # the letter ties code to one chip
        ((8, 0), [], False),
    ],
)
def test_which_torch_builds_run_on_a_card(capability, archs, runs):
    found = kernels.wheel_problem(capability, archs)
    assert (found is None) == runs
    if not runs:
        assert "{}.{}".format(*capability) in found


def test_a_missing_package_and_a_broken_one_are_told_apart(monkeypatch, tmp_path):
    assert kernels._import_problem("Nothing", "no_such_package") == "Nothing is not installed"
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text("raise OSError('libcudnn.so.9: undefined symbol')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = kernels._import_problem("It", "broken_package", "broken_package")
    assert "does not import" in found
    assert "libcudnn.so.9" in found


def test_apex_of_nvidia_is_known_by_its_folders(tmp_path):
    (tmp_path / "web").mkdir()
    assert not kernels.is_nvidia_apex([tmp_path / "web"])
    (tmp_path / "apex" / "multi_tensor_apply").mkdir(parents=True)
    assert kernels.is_nvidia_apex([tmp_path / "apex"])


def fake_packages(folder, *names):
    for name in names:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise AssertionError('{name} was imported')\n")


def test_megatron_never_sees_fast_packages_on_slow_hardware(tmp_path):
    """Megatron takes Transformer Engine and Apex wherever they import, PyPI's unrelated apex included."""
    fake_packages(tmp_path, "transformer_engine", "apex", "amp_C")
    code = (
        "import json, sys; from megaverl.parallel import compat_megatron as m; import megatron.core.optimizer as o; "
        "print(json.dumps([o.USING_PYTORCH_OPTIMIZER, sys.modules['transformer_engine'], sys.modules['apex']]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "MEGAVERL_CAPABILITY": "6.1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == [True, None, None]


def test_a_half_imported_package_is_hidden_whole(tmp_path, monkeypatch):
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("half")
    try:
        kernels._hide(["half"])
        with pytest.raises(ImportError):
            importlib.import_module("half")
        assert importlib.util.find_spec("half") is None
    finally:
        sys.modules.pop("half", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_are_added_in_the_wide_format(dtype):
    g = torch.Generator().manual_seed(0)
    left, right = torch.randn(7, 3, generator=g), torch.randn(7, 5, generator=g)
    into = torch.ones(3, 5, dtype=dtype)
    kernels.add_product(into, left, right)
    torch.testing.assert_close(into, 1 + left.to(dtype).T @ right.to(dtype))
    wide = kernels.wide_product(left.T, right, dtype)
    assert wide.dtype == dtype
    torch.testing.assert_close(wide, left.T.to(dtype) @ right.to(dtype))
