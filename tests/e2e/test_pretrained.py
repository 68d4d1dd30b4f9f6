"""A real pretrained checkpoint through import, generation by the rollout engine and export; transformers judges.

Runs when MEGAVERL_PRETRAINED names a folder (docs/convert.md says how to make a small one).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megaverl.config.schema import RolloutConfig
from megaverl.models.family import load_shape, weight_map
from megaverl.parallel.layout import Layout
from megaverl.rollout.compat_vllm import vllm_refusal
from megaverl.rollout.engine import Sampling
from tests.gloo.launch import run_ranks

FOLDER = os.environ.get("MEGAVERL_PRETRAINED", "")
QUESTIONS = ("What is the capital of France?", "Write two sentences about the sea.", "What is 3 apples plus 4 apples?")
NEW_TOKENS = 32

pytestmark = pytest.mark.skipif(
    not FOLDER, reason="MEGAVERL_PRETRAINED names no pretrained checkpoint (docs/convert.md says how to make one)"
)


def way_of_a_run(rank, world, folder, tokens, stop_ids, out):
    """Import into a trainable Megatron model, generation by vLLM on its parameters, export."""
    from megaverl.checkpoint.hf_export import ModelRanks, export_hf
    from megaverl.checkpoint.hf_import import load_hf
    from megaverl.models.policy import PolicyModel
    from megaverl.parallel.device import choose_device
    from megaverl.parallel.setup import init_distributed, init_model_parallel
    from megaverl.resharding.planner import make_plan
    from megaverl.rollout.factory import make_engine

    device = choose_device("fp32", "eager", "cpu")
    init_distributed(rank, world, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), device)
    layout, shape = Layout(tp=world), load_shape(folder)
    grid = init_model_parallel(layout, seed=0)
    policy, rows = PolicyModel(shape, layout, device, trainable=True), weight_map(shape)
    params = policy.parameters_by_name()
    load_hf(folder, rows, params, tp=world, tp_rank=grid.at.tp)
    params = {name: p.detach() for name, p in params.items()}
    config = RolloutConfig(engine="vllm", cpu_cache_gb=0.25, max_num_seqs=8)
    longest = max(map(len, tokens)) + NEW_TOKENS
    engine, _ = make_engine(folder, shape, make_plan(rows, layout, world), params, layout, config, longest)
    engine.wake()
    engine.serve_version(0)
    greedy = Sampling(1, 0.0, 1.0, -1, NEW_TOKENS, seed=0, stop_ids=stop_ids)
    found = [c.token_ids for c in engine.generate(tokens, range(len(tokens)), greedy)]
    engine.close()
    export_hf(params, rows, out, ModelRanks(world, grid.at.tp, grid.tp), source=folder)
    return found


def greedy_of_transformers(folder, tokens, stop_ids):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    found = []
    for ids in tokens:
        with torch.no_grad():
            out = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                eos_token_id=list(stop_ids),
                pad_token_id=stop_ids[0],
            )
        found.append(out[0, len(ids) :].tolist())
    return found


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_greedy_text_is_transformers_and_the_export_bit_equal(tmp_path, capsys):
    from megaverl.data.tokenizer import load_tokenizer

    folder = Path(FOLDER)
    shape = load_shape(folder)
    refusal = vllm_refusal(shape, "cpu")
    if refusal:
        pytest.skip(refusal)
    tokenizer = load_tokenizer(folder, folder)
    tokens = tokenizer.encode([tokenizer.render([{"role": "user", "content": question}]) for question in QUESTIONS])
    wanted = greedy_of_transformers(folder, tokens, tokenizer.stop_ids)
    texts = [tokenizer.decode(ids) for ids in wanted]
    assert all(text.strip() for text in texts)
    for tp in sorted({1, max(n for n in (1, 2, 3) if shape.kv_heads % n == 0)}):
        out = tmp_path / f"tp{tp}"
        answers = run_ranks(way_of_a_run, tp, folder, tokens, tokenizer.stop_ids, out, timeout=800)
        assert answers == [wanted] * tp, tp
        before, after = tensors_of(folder), tensors_of(out)
        assert before.keys() == after.keys()
        assert all(before[n].dtype == after[n].dtype and torch.equal(before[n], after[n]) for n in before)
        assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    with capsys.disabled():
        print("".join(f"\n  {question} -> {text!r}" for question, text in zip(QUESTIONS, texts, strict=True)))
