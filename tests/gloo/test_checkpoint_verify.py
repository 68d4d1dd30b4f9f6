"""`megaverl convert verify`: real processes, real transformers."""

from __future__ import annotations

import json
import os

import pytest
import torch

from megaverl.checkpoint import hf_verify
from megaverl.checkpoint.hf_verify import random_prompts, verify
from megaverl.checkpoint.local_ranks import run_local
from megaverl.cli import main
from megaverl.errors import RunError, UserError
from megaverl.models.family import load_shape
from tests.gloo.family_support import LLAMA3, Tiny, make_tiny
from tests.unit.checkpoint.tiny import rewrite

MODELS = {
    "qwen2": (Tiny("qwen2", 12, 2, True), 4, 1),
    "qwen3": (Tiny("qwen3", 16, 8, False), 2, 2),
    "llama": (Tiny("llama", 16, 8, True, more={"rope_parameters": LLAMA3}), 1, 3),
}


@pytest.mark.parametrize("name", MODELS)
def test_case_1_a_sound_checkpoint_passes_all_checks(tmp_path, name, capfd):
    tiny, tp, pp = MODELS[name]
    make_tiny(tmp_path / "model", tiny)
    if tiny.tied:  # brought along by some checkpoints; not exported
        rewrite(tmp_path / "model", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    code = main(["convert", "verify", str(tmp_path / "model"), "--tp", str(tp), "--pp", str(pp), "--json"])
    found = json.loads(capfd.readouterr().out)
    assert code == 0
    assert found["ok"]
    assert [check["ok"] for check in found["checks"]] == [True] * 5
    assert (found["tp"], found["pp"]) == (tp, pp)
    assert os.listdir(tmp_path) == ["model"]


def test_another_model_in_transformers_fails_and_is_exit_code_1(tmp_path, monkeypatch, capsys):
    """As if the conversion were wrong: transformers reads a model that differs in one layer's norm."""
    make_tiny(tmp_path / "model", Tiny("qwen2", 14, 2, True))
    make_tiny(tmp_path / "other", Tiny("qwen2", 14, 2, True))
    rewrite(tmp_path / "other", lambda t: t["model.layers.1.input_layernorm.weight"].mul_(1.01))
    scores = hf_verify._transformers_scores
    monkeypatch.setattr(hf_verify, "_transformers_scores", lambda _, batch: scores(tmp_path / "other", batch))
    assert main(["convert", "verify", str(tmp_path / "model")]) == 1
    out = capsys.readouterr().out
    assert [word for word in out.split() if word in ("ok", "WRONG")] == ["ok", "WRONG", "WRONG", "ok", "ok"]


def test_a_round_trip_that_changes_something_names_it(tmp_path):
    make_tiny(tmp_path / "a", Tiny("qwen2", 14, 2, False))
    make_tiny(tmp_path / "b", Tiny("qwen2", 14, 2, False))
    wanted = hf_verify.read_headers(tmp_path / "a", hf_verify.Problems())
    assert hf_verify._same_tensors(wanted, tmp_path / "b").ok
    up = "model.layers.0.mlp.up_proj.weight"

    def change(t):
        t[up][3, 4] = -t[up][3, 4]
        t["model.norm.weight"] = t["model.norm.weight"].half()
        t["ghost"] = t.pop("lm_head.weight")

    rewrite(tmp_path / "b", change)
    check = hf_verify._same_tensors(wanted, tmp_path / "b")
    assert not check.ok
    for text in (
        f"{up} has other values",
        "lm_head.weight was lost",
        "ghost is new",
        "model.norm.weight was F32 [112] and is F16 [112]",
    ):
        assert text in check.detail


def test_minus_zero_is_another_value(tmp_path):
    for name, zero in (("a", 0.0), ("b", -0.0)):
        make_tiny(tmp_path / name, Tiny("qwen2", 14, 2, True))
        rewrite(tmp_path / name, lambda t, zero=zero: t["model.norm.weight"].fill_(zero))
    wanted = hf_verify.read_headers(tmp_path / "a", hf_verify.Problems())
    assert "model.norm.weight has other values" in hf_verify._same_tensors(wanted, tmp_path / "b").detail


def test_an_impossible_layout_and_a_damaged_checkpoint_are_the_users(tmp_path):
    make_tiny(tmp_path / "model", Tiny("qwen2", 14, 2, True))
    with pytest.raises(UserError, match="14 attention heads cannot be divided over 4 ranks"):
        verify(tmp_path / "model", tp=4)
    rewrite(tmp_path / "model", lambda t: t["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(UserError, match=r"model\.norm\.weight: holds NaN"):  # found in another process
        verify(tmp_path / "model")


def test_prompts_are_the_same_for_the_same_seed_and_score_all_but_the_first_token(tmp_path):
    make_tiny(tmp_path, Tiny("qwen2", 14, 2, True))
    shape = load_shape(tmp_path)
    one, two = random_prompts(shape, 20, 0), random_prompts(shape, 20, 0)
    assert torch.equal(one.tokens, two.tokens)
    assert int(one.response_mask.sum()) == one.tokens.numel() - 20
    assert not torch.equal(one.tokens, random_prompts(shape, 20, 1).tokens)


def _fails(rank):
    if rank == 1:
        raise ValueError("of rank 1")
    return rank


def _dies(rank):
    if rank == 1:
        os._exit(7)
    return rank


@pytest.mark.parametrize(("fn", "message"), [(_fails, "of rank 1"), (_dies, r"processes died: rank 1 \(exit code 7\)")])
def test_a_rank_that_fails_or_dies_ends_the_command(fn, message):
    with pytest.raises(RunError, match=message):
        run_local(fn, 2, timeout_s=100)
