"""Lets megatron-core run on a CPU over gloo, without touching torch for anybody else.

megatron-core asks for CUDA by name in about 120 places. Each of its modules reaches torch through one global, `torch`;
`install` puts a stand-in there that answers "cuda" with the CPU. torch itself, and so a Hugging Face model or vLLM in
the same process, stays as it is. What the stand-in cannot reach is done beside it:

* the tracker of random states (`tensor_parallel.random`) reads and writes the CUDA generator and warns when the CPU
  generator moves: the two functions it uses and its `fork` get versions for the CPU generator;
* a few functions compare `tensor.type()` with 'torch.cuda.FloatTensor' or call `tensor.cuda()`, methods of real
  tensors: the constants and names in those functions' own code objects are replaced.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

CPU = torch.device("cpu")
FACTORIES = ("arange", "empty", "empty_like", "full", "full_like", "ones", "ones_like", "rand", "randn", "tensor")
FACTORIES += ("zeros", "zeros_like", "as_tensor", "linspace", "eye", "randint", "randperm")

# (module, function or class.method): real tensors are asked for their type or moved with .cuda() in there.
TYPE_CHECKS = (
    ("megatron.core.optimizer.clip_grads", "clip_grad_by_total_norm_fp32"),
    ("megatron.core.optimizer.optimizer", "Float16OptimizerWithFloat16Params.__init__"),
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer._build_model_and_main_param_groups"),
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer.__init__"),
)
MOVES = (
    ("megatron.core.models.common.language_module.language_module", "LanguageModule.setup_embeddings_and_output_layer"),
)


def install() -> None:
    """Adapts every loaded module of megatron.core; may be called again after more of them were imported."""
    from megaverl.parallel import compat_megatron  # noqa: F401  (imports megatron.core the way we need it)

    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core.") and vars(module).get("torch") is torch:
            module.torch = _cpu_torch()
    random = sys.modules["megatron.core.tensor_parallel.random"]
    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state
    random.CudaRNGStatesTracker.fork = _fork
    for module_name, path in TYPE_CHECKS:
        _replace(module_name, path, constants={f"torch.cuda.{t}": f"torch.{t}" for t in _TENSOR_TYPES})
    for module_name, path in MOVES:
        _replace(module_name, path, names={"cuda": "cpu"})


def installed() -> bool:
    """Whether `install` ran in this process."""
    random = sys.modules.get("megatron.core.tensor_parallel.random")
    return random is not None and random._get_cuda_rng_state is _get_rng_state


_TENSOR_TYPES = ("FloatTensor", "HalfTensor", "BFloat16Tensor")


@functools.cache
def _cpu_torch() -> types.ModuleType:
    """A module with all of torch's names, whose factories and `cuda` mean the CPU."""
    stand_in = _copy_of(torch)
    for name in FACTORIES:
        setattr(stand_in, name, _on_cpu(getattr(torch, name)))
    cuda = _copy_of(torch.cuda)
    cuda.current_device = lambda: CPU
    cuda.is_available = lambda: False
    cuda.device_count = lambda: 0
    cuda.synchronize = cuda.empty_cache = lambda *_, **__: None
    cuda.manual_seed = cuda.manual_seed_all = torch.manual_seed
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.Stream = torch.cpu.Stream
    cuda.current_stream = cuda.default_stream = torch.cpu.current_stream
    cuda.stream = lambda *_: contextlib.nullcontext()
    stand_in.cuda = cuda
    return stand_in


def _copy_of(module: types.ModuleType) -> types.ModuleType:
    copy = types.ModuleType(module.__name__)
    vars(copy).update(vars(module))
    copy.__getattr__ = lambda name: getattr(module, name)  # torch loads some submodules on first use
    return copy


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


@contextlib.contextmanager
def _fork(tracker: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """Draws from the named random state inside the block; the generator goes on as before after it."""
    outside = torch.get_rng_state()
    torch.set_rng_state(tracker.states_[name])
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        torch.set_rng_state(outside)


def _replace(
    module_name: str, path: str, *, constants: dict[str, str] | None = None, names: dict[str, str] | None = None
) -> None:
    """Swaps string constants and attribute names in the code of one megatron.core function."""
    target: Any = sys.modules[module_name]
    for part in path.split("."):
        target = vars(target)[part]
    function = getattr(target, "__func__", target)
    function = getattr(function, "__wrapped__", function)  # under torch.no_grad
    constants, names = constants or {}, names or {}
    code = function.__code__
    function.__code__ = code.replace(
        co_consts=tuple(_swap(c, constants) for c in code.co_consts),
        co_names=tuple(names.get(n, n) for n in code.co_names),
    )


def _swap(constant: Any, table: dict[str, str]) -> Any:
    if isinstance(constant, str):
        return table.get(constant, constant)
    if isinstance(constant, tuple):
        return tuple(_swap(c, table) for c in constant)
    return constant
