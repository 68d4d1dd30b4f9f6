"""Tests that need a GPU: marked, and skipped with the reason where there is none."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no GPU is visible to torch"))


@pytest.fixture(scope="session")
def world():
    """One rank of a world of one, with Megatron's groups; for the whole session, as a worker has it."""
    from megaverl.parallel.device import choose_device
    from megaverl.parallel.layout import Layout
    from megaverl.parallel.setup import init_distributed, init_model_parallel, teardown
    from tests.gpu.support import free_port

    init_distributed(0, 1, "127.0.0.1", free_port(), choose_device(kernels="eager"))
    init_model_parallel(Layout(), seed=0)
    yield
    teardown()
