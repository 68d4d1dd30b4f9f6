"""The CPU adapter: Megatron's own random tracker works, and nobody else's torch changes."""

from __future__ import annotations

import pytest
import torch

from megaverl.parallel import cpu_adapter
from megaverl.parallel.layout import Layout
from tests.gloo.launch import RankError, run_ranks
from tests.gloo.policy_support import RAGGED, join, make_batch, make_hf, make_policy


def _torch_state():
    names = [*cpu_adapter.FACTORIES, "cuda", "get_rng_state", "set_rng_state", "compile", "distributed"]
    state = {name: id(getattr(torch, name)) for name in names}
    state |= {f"cuda.{name}": id(value) for name, value in vars(torch.cuda).items() if not name.startswith("__")}
    return state


def _side_by_side(rank, world, folder):
    from transformers import Qwen2ForCausalLM

    assert not cpu_adapter.installed()
    tokens = make_batch([(0, 60)]).tokens.unsqueeze(0)
    before = _torch_state()
    alone = Qwen2ForCausalLM.from_pretrained(folder)(input_ids=tokens).logits
    join(rank, world, Layout())
    policy = make_policy(folder, Layout())
    policy.log_probs(make_batch(RAGGED), temperature=1.0, max_tokens=100, with_entropy=False)
    assert cpu_adapter.installed()
    beside = Qwen2ForCausalLM.from_pretrained(folder)(input_ids=tokens).logits
    return before == _torch_state(), torch.equal(alone, beside)


def test_torch_and_a_hugging_face_model_in_the_same_process_stay_as_they_were(tmp_path):
    make_hf(tmp_path, tied=True)
    assert run_ranks(_side_by_side, 1, str(tmp_path)) == [(True, True)]


def _elsewhere(rank, world):
    join(rank, world, Layout())
    torch.zeros(1, device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_asking_torch_itself_for_cuda_still_fails():
    with pytest.raises(RankError, match=r"CUDA|NVIDIA"):
        run_ranks(_elsewhere, 1)


def _draws(rank, world):
    join(rank, world, Layout(tp=2))
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    outside = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        first = torch.rand(3)
    with get_cuda_rng_tracker().fork():
        second = torch.rand(3)
    untouched = torch.equal(outside, torch.get_rng_state())
    return first.tolist(), second.tolist(), torch.rand(3).tolist(), untouched


def test_tensor_parallel_ranks_draw_apart_inside_the_tracker_and_alike_outside():
    (first_0, second_0, common_0, untouched), (first_1, _, common_1, _) = run_ranks(_draws, 2)
    assert untouched
    assert first_0 != first_1
    assert first_0 != second_0
    assert common_0 == common_1


def _compiled(rank, world):
    join(rank, world, Layout())
    from megatron.core.fusions.fused_bias_swiglu import swiglu

    return hasattr(swiglu, "_torchdynamo_orig_callable"), swiglu(torch.tensor([0.0, 2.0])).item()


def test_megatron_functions_are_not_compiled():
    assert run_ranks(_compiled, 1) == [(False, 0.0)]
