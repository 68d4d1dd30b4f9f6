"""Which versions of megatron-core megaverl works with. Imports nothing of it, so that a start-up check is cheap."""

from __future__ import annotations

import importlib.metadata

from packaging.version import Version

from megaverl.errors import Problem

SUPPORTED = {"0.16.1": "CPython 3.11", "0.19.2": "CPython 3.12"}
"""Versions that the test suite ran with, and where."""
OLDEST, NEWEST = Version("0.16.1"), Version("0.19.99")


def version_problem() -> Problem | None:
    """What is wrong with the installed megatron-core, or None. Reads package metadata only, imports nothing."""
    tested = ", ".join(f"{v} ({where})" for v, where in SUPPORTED.items())
    try:
        installed = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return Problem("megatron-core is not installed", fix=f"pip install megatron-core; tested versions: {tested}")
    if OLDEST <= Version(installed) <= NEWEST:
        return None
    return Problem(
        f"megatron-core {installed} is outside the supported range {OLDEST} to 0.19",
        fix=f"install one of the tested versions: {tested}",
    )
