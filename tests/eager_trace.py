"""One update with the eager backend under torch's profiler; prints as JSON what ran. Run in a process of its own.

    python -m tests.eager_trace

`tests/unit/parallel/test_eager_trace.py` runs it on the CPU, `tests/gpu/test_eager_trace.py` on a GPU that plays an
older one. What torch.compile made raises when it runs, so compiled code cannot go unnoticed.
"""

from __future__ import annotations

import json
import socket
import sys

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def refuse(function=None, **_):
    """Stands in for torch.compile: Megatron may decorate with it, but what it decorates must not run."""
    if function is None:
        return refuse

    def compiled(*_, **__):
        raise AssertionError(f"{function} would have been compiled")

    return compiled


class Formats(TorchDispatchMode):
    """Collects the number formats of everything that is computed."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.seen.update(str(leaf.dtype) for leaf in tree_leaves((args, out)) if isinstance(leaf, torch.Tensor))
        return out


def main() -> None:
    torch.compile = refuse
    torch.set_num_threads(1)

    from megaverl.config.schema import OptimizerConfig
    from megaverl.data.batch import SequenceBatch
    from megaverl.models.policy import PolicyModel
    from megaverl.models.shape import ModelShape
    from megaverl.parallel.device import choose_device
    from megaverl.parallel.layout import Layout
    from megaverl.parallel.setup import init_distributed, init_model_parallel, teardown

    device = choose_device()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    init_distributed(0, 1, "127.0.0.1", port, device)
    init_model_parallel(Layout(), seed=0)
    shape = ModelShape(
        family="qwen3",
        layers=2,
        hidden=256,
        heads=4,
        kv_heads=2,
        head_dim=64,
        intermediate=512,
        vocab=211,
        max_positions=512,
        norm_eps=1e-6,
        rope_theta=1e6,
        tied=True,
        qkv_bias=False,
        qk_norm=True,
    )
    policy = PolicyModel(shape, Layout(), device, trainable=True)
    policy.prepare_training(OptimizerConfig(), total_updates=4)
    batch = SequenceBatch.from_lists([[1, 2, 3], [4, 5], [7] * 40], [[5, 6], [7, 8, 9], [8] * 30])

    def loss(batch, log_probs, entropy):
        return -log_probs.sum() - 0.1 * entropy.sum(), {}

    def step():
        policy.log_probs(batch, temperature=1.0, max_tokens=80, with_entropy=True)
        policy.update(batch, [[0, 1], [2]], loss, temperature=0.9, entropy_grad=True)

    step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.kind == "cuda" else [])]
    with Formats() as formats, profile(activities=activities) as trace:
        step()
    events = trace.events()
    on_gpu = torch.autograd.DeviceType.CUDA
    print(
        json.dumps(
            {
                "device": [device.kind, str(device.dtype), device.backend],
                "operators": sorted({e.name for e in events if e.device_type != on_gpu}),
                "kernels": sorted({e.name for e in events if e.device_type == on_gpu}),
                "formats": sorted(formats.seen),
                "modules": sorted(name for name, module in sys.modules.items() if module is not None),
            }
        )
    )
    teardown()


if __name__ == "__main__":
    main()
