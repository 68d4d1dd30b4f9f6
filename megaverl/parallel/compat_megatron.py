"""Everything that depends on the version of megatron-core, in one place: import it only from here.

Two things must happen around the import. `jit_fuser` is torch.compile, and Megatron binds it to its activation
functions while it is being imported: eager kernels (CPU, old GPUs, no compiler on the machine) must never reach it, so
this module registers a `megatron.core.jit` whose fuser does nothing before megatron.core loads. `kernels.py` settles
which optional packages Megatron finds. And megatron-core warns
four times that Apex and Transformer Engine are absent and that it takes torch's optimizer, norm and multi-tensor
kernels instead: that is exactly what the eager backend is, chosen by `parallel/device.py`, so those lines are noise.
"""

from __future__ import annotations

import contextlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from megaverl.errors import Problem, UserError
from megaverl.parallel.kernels import prepare_megatron
from megaverl.parallel.megatron_version import version_problem


def _without_compile() -> None:
    """Registers a `megatron.core.jit` that leaves functions as they are."""
    if "megatron.core" in sys.modules:
        if sys.modules.get("megatron.core.jit") is not _jit:
            raise UserError(
                Problem(
                    "megatron.core was imported before megaverl, with its torch.compile decorators active",
                    fix="import megaverl.parallel.compat_megatron first",
                )
            )
        return
    sys.modules["megatron.core.jit"] = _jit


def _identity(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    return function if function is not None else _identity


_jit = types.ModuleType("megatron.core.jit", "Stand-in of megaverl: Megatron's fuser, switched off.")
_jit.jit_fuser = _jit.noop_decorator = _identity
_jit.enable_jit_fuser = _jit.disable_jit_fuser = lambda: None

_problem = version_problem()
if _problem:
    raise UserError(_problem)
_without_compile()
prepare_megatron()


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """Hides the warnings described above, and those about deprecated defaults and imports of Megatron itself."""
    with warnings.catch_warnings():
        for pattern in (
            ".*Apex.*",
            ".*Transformer Engine.*",
            ".*full scope is deprecated.*",
            ".*custom_layers.transformer_engine.*",
            ".*you have no need to set 'core_attn' to recompute.*",  # true for Transformer Engine's attention
        ):
            warnings.filterwarnings("ignore", message=pattern)
        yield


with without_noise():
    import megatron.core
    from megatron.core import optimizer as _optimizer
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import (
        gather_from_sequence_parallel_region,
        model_parallel_cuda_manual_seed,
    )
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

megatron.core.jit = _jit


def transformer_engine_norm() -> type:
    """Megatron's norm made of Transformer Engine's."""
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def model_parallel_groups() -> list[Any]:
    """The process groups that Megatron made and this rank is in; the world is not among them."""
    return [group for group in parallel_state._global_process_group_list or () if group is not None]


@contextlib.contextmanager
def torch_adam() -> Iterator[None]:
    """Makes Megatron build torch's AdamW inside the block, whether or not Transformer Engine or Apex import."""
    before = _optimizer.USING_PYTORCH_OPTIMIZER
    _optimizer.USING_PYTORCH_OPTIMIZER = True
    try:
        yield
    finally:
        _optimizer.USING_PYTORCH_OPTIMIZER = before


def optimizer_part(optimizer: Any, param: Any) -> tuple[Any, int, int] | None:
    """The tensor that ``optimizer`` steps for the model's ``param``, and which elements of it (start, end; flattened).

    With the distributed optimizer a data parallel rank owns a range of a parameter, or nothing of it (None). The tensor
    is the parameter (or a view of it) in float32, and a float32 copy for 16-bit parameters.
    """
    if hasattr(optimizer, "model_param_group_index_map"):
        if param not in optimizer.model_param_group_index_map:
            return None
        group, position = optimizer.model_param_group_index_map[param]
        owned = optimizer._get_model_param_range_map(param)["param"]
        return optimizer.optimizer.param_groups[group]["params"][position], owned.start, owned.end
    held = getattr(param, "main_param", None)
    held = param if held is None else held
    known = any(held is p for group in optimizer.optimizer.param_groups for p in group["params"])
    return (held, 0, param.numel()) if known else None


# While it runs, Megatron calls collectives by names that newer torch calls old, and looks at the .grad of views.
# Both are its own business; the filters are as narrow as they can be.
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is")
warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor", module=r"megatron\.core\.")

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "GPTModel",
    "MegatronOptimizerConfig",
    "ModuleSpec",
    "PackedSeqParams",
    "SelfAttention",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "clip_grad_by_total_norm_fp32",
    "finalize_model_grads",
    "gather_from_sequence_parallel_region",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_gpt_layer_with_transformer_engine_spec",
    "get_megatron_optimizer",
    "get_num_layers_to_build",
    "model_parallel_cuda_manual_seed",
    "model_parallel_groups",
    "optimizer_part",
    "parallel_state",
    "torch_adam",
    "transformer_engine_norm",
    "without_noise",
]
