"""Binding: hands a generation model its parameters, training parameters where the plan aliases them, and checks them.

Works on any torch module whose parameters the plan names (vLLM's model, through the loader hook of
`megaverl.rollout.compat_vllm`). Bind before warm-up and CUDA-graph capture: captured graphs hold addresses, and a
storage swapped in later is ignored in silence. Bind after Megatron's DDP has moved the parameters into its buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megaverl.errors import RunError
from megaverl.resharding.plan import Entry, RankPlan


@dataclass(frozen=True)
class BindingReport:
    """What `check_binding` found.

    Attributes:
        parameters: rollout parameters that are the tensors they were bound to.
        bytes_bound: their size.
        bytes_added: parameter storage that the rollout model holds besides; 0 when all is bound.
    """

    parameters: int
    bytes_bound: int
    bytes_added: int


def own_parameters(plan: RankPlan, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The rank's training parameters by the plan's names: ``alternatives`` are found, shapes and sizes are checked.

    Raises:
        RunError: the plan and the training parameters do not cover each other, or differ in shape or size.
    """
    found, wrong, used = {}, [], set()
    for entry in plan.entries:
        name = next((n for n in (entry.megatron, *entry.alternatives) if n in params), None)
        if name is not None and name not in used:
            used.add(name)
            found[entry.megatron] = params[name].detach()
            wrong += _entry_problems(entry, params[name], plan.element_bytes)
        elif name is None and entry.source_rank is None:
            wrong.append(f"{entry.megatron}: the training model has no such parameter")
    wrong += [f"{name}: no row of the plan names this training parameter" for name in params if name not in used]
    _raise(wrong, "the reshard plan does not fit the training model")
    return found


def rollout_tensors(
    plan: RankPlan,
    params: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    made: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The tensor behind each rollout parameter: vLLM's name -> tensor.

    An aliased one is the training parameter itself. All others have storage of their own, zeros until the first handoff
    writes them.

    Args:
        plan: this rank's part of the plan.
        params: the rank's training parameters.
        dtype: the rollout's number format; the training parameters' when not given.
        made: storage that the generation model has made, by vLLM's names; what is missing is allocated here.

    Raises:
        RunError: as `own_parameters`, or the plan and ``dtype`` or ``made`` do not agree.
    """
    own = own_parameters(plan, params)
    like = next(iter(own.values()))
    dtype, made = dtype or like.dtype, made or {}
    wrong, found = [], {}
    if dtype.itemsize != plan.rollout_element_bytes:
        wrong.append(f"{dtype} has {dtype.itemsize} bytes per element, the plan says {plan.rollout_element_bytes}")
    for entry in plan.entries:
        if entry.vllm in found:
            continue
        if entry.kind == "alias":
            found[entry.vllm] = own[entry.megatron]
        elif entry.vllm in made:
            found[entry.vllm] = made[entry.vllm].detach().zero_()
            if tuple(found[entry.vllm].shape) != entry.shape:
                wrong.append(f"{entry.vllm}: shape {tuple(found[entry.vllm].shape)}, the plan says {entry.shape}")
        else:
            found[entry.vllm] = like.new_zeros(entry.shape, dtype=dtype)
    _raise(wrong, "the reshard plan does not fit the rollout model")
    return found


def bind(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Makes each parameter of ``model`` the tensor of the same name (`rollout_tensors`); no bytes are copied.

    The Parameter objects stay (vLLM hangs attributes on them), only what they point to changes.

    Raises:
        RunError: names, shapes, dtypes or devices do not agree; nothing was changed.
    """
    own = dict(model.named_parameters())
    wrong = _name_problems(own, tensors)
    for name in own.keys() & tensors.keys():
        wrong += _differences(name, own[name], tensors[name], ("shape", "dtype", "device"))
    _raise(wrong, "the rollout model cannot take its parameters")
    for name, parameter in own.items():
        parameter.data = tensors[name].detach()


def check_binding(model: nn.Module, tensors: Mapping[str, Tensor], packed: Iterable[str] = ()) -> BindingReport:
    """Checks that every parameter of ``model`` still is the tensor that it was bound to: pointer, shape, dtype, stride.

    Args:
        model: the generation model.
        tensors: its names -> tensors (`rollout_tensors`).
        packed: layers that keep another copy of their weight outside their parameters (the engine's own finding).

    Raises:
        RunError: any parameter is not; names each and says why.
    """
    own = dict(model.named_parameters())
    wrong = _name_problems(own, tensors)
    for name in own.keys() & tensors.keys():
        wrong += _differences(name, own[name], tensors[name], ("data_ptr", "shape", "dtype", "stride"))
    wrong += [f"{layer}: vLLM packed this layer's weight into a copy of its own" for layer in packed]
    _raise(wrong, "the rollout model does not use the parameters that it was given")
    return BindingReport(
        parameters=len(own),
        bytes_bound=sum(p.numel() * p.element_size() for p in own.values()),
        bytes_added=_foreign_bytes(own.values(), tensors.values()),
    )


def _foreign_bytes(parameters: Iterable[Tensor], tensors: Iterable[Tensor]) -> int:
    ours = {t.untyped_storage().data_ptr() for t in tensors}
    theirs = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
    return sum(size for pointer, size in theirs.items() if pointer not in ours)


def _entry_problems(entry: Entry, tensor: Tensor, planned: int) -> list[str]:
    if tuple(tensor.shape) != entry.source_shape:
        return [f"{entry.megatron}: shape {tuple(tensor.shape)}, the plan says {entry.source_shape}"]
    size = tensor.element_size()
    if size != planned:
        return [f"{entry.megatron}: {size} bytes per element ({tensor.dtype}), the plan says {planned}"]
    return []


def _name_problems(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> list[str]:
    wrong = [f"{name}: the plan does not name this parameter of vLLM" for name in own if name not in tensors]
    return wrong + [f"{name}: vLLM's model has no such parameter" for name in tensors if name not in own]


def _differences(name: str, ours: Tensor, theirs: Tensor, what: tuple[str, ...]) -> list[str]:
    found = []
    for attribute in what:
        a, b = getattr(ours, attribute), getattr(theirs, attribute)
        a, b = (a(), b()) if callable(a) else (a, b)
        if a != b:
            a, b = (tuple(v) if isinstance(v, torch.Size) else v for v in (a, b))
            found.append(f"{name}: {attribute} is {a}, the bound tensor's is {b}")
    return found


def _raise(wrong: list[str], headline: str) -> None:
    if wrong:
        raise RunError("\n  ".join([f"{headline}:", *sorted(wrong)]))
