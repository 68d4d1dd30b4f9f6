"""`algorithm.name` selects the right functions."""

import subprocess
import sys

import pytest
import torch

from megaverl.algorithms.losses import Denominators
from megaverl.algorithms.registry import algorithm_for
from megaverl.config.schema import Config
from megaverl.data.batch import SequenceBatch

SCORES, GROUPS, LENGTHS = torch.tensor([1.0, 0.0, 0.0, 1.0]), [0, 0, 0, 0], torch.tensor([1, 2, 2, 1])


def config(actor=None, **algorithm):
    return Config.model_validate({"algorithm": algorithm, "actor": actor or {}})


def test_advantages_by_name():
    by_std = algorithm_for(config(name="grpo")).advantages(SCORES, GROUPS, LENGTHS)
    assert by_std[0].item() == pytest.approx(0.5 / (1 / 3) ** 0.5, rel=1e-4)
    for plain in (config(name="dr_grpo"), config(name="grpo", norm_adv_by_std=False)):
        assert algorithm_for(plain).advantages(SCORES, GROUPS, LENGTHS).tolist() == [0.5, -0.5, -0.5, 0.5]
    for name in ("gspo", "dapo", "cispo"):
        assert torch.equal(algorithm_for(config(name=name)).advantages(SCORES, GROUPS, LENGTHS), by_std)
    others = algorithm_for(config(name="rloo")).advantages(SCORES, GROUPS, LENGTHS)
    torch.testing.assert_close(others, torch.tensor([2.0, -2.0, -2.0, 2.0]) / 3)
    normed = algorithm_for(config(name="reinforce++_baseline")).advantages(SCORES, GROUPS, LENGTHS)
    assert (normed * LENGTHS).sum().item() == pytest.approx(0, abs=1e-6)
    for name in ("reinforce++", "remax", "ppo", "sft"):
        assert algorithm_for(config(name=name)).advantages is None


def test_what_is_whitened_and_what_has_a_greedy_baseline():
    found = {name: algorithm_for(config(name=name)) for name in ("ppo", "reinforce++", "remax", "grpo")}
    assert [name for name, algorithm in found.items() if algorithm.whitens] == ["ppo", "reinforce++"]
    assert [name for name, algorithm in found.items() if algorithm.greedy_baseline] == ["remax"]
    assert not algorithm_for(config(name="ppo", whiten_advantages=False)).whitens


def test_presets_fill_only_what_is_not_given():
    dapo = config(name="dapo")
    assert (dapo.actor.clip_ratio_high, dapo.algorithm.dynamic_sampling) == (0.28, True)
    gspo = config({"clip_ratio_low": 0.1}, name="gspo")
    assert (gspo.actor.policy_loss, gspo.actor.clip_ratio_low, gspo.actor.clip_ratio_high) == ("gspo", 0.1, 4e-4)
    assert config(name="cispo").actor.clip_ratio_low == 1.0
    assert config(name="dr_grpo").actor.loss_aggregation == "seq-mean-token-sum-norm"
    assert config(name="grpo") == Config()


def test_what_passes_are_needed():
    plain = algorithm_for(config(name="grpo"))
    assert not plain.needs_reference
    assert not plain.needs_old_log_probs(single_update=True)
    assert plain.needs_old_log_probs(single_update=False)
    assert algorithm_for(config({"use_kl_loss": True}, name="grpo")).needs_reference
    penalty = algorithm_for(config(name="grpo", kl_in_reward=True))
    assert penalty.needs_reference
    assert penalty.needs_old_log_probs(single_update=True)
    always = algorithm_for(config({"recompute_old_log_probs": "always"}, name="grpo"))
    assert always.needs_old_log_probs(single_update=True)
    sft = algorithm_for(config({"use_kl_loss": True}, name="sft"))
    assert not sft.needs_reference
    assert not sft.needs_old_log_probs(single_update=False)


def test_losses_by_name():
    batch = SequenceBatch.from_lists([[0]], [[0, 0]], response_columns={"advantages": [[1.0, 2.0]]})
    log_probs, denominators = torch.tensor([9.0, -1.0, -3.0]), Denominators(2, 1, 4)
    loss, sums = algorithm_for(config(name="grpo")).loss_fn(denominators)(batch, log_probs, None)
    assert loss.item() == -1.5
    assert "actor/pg_loss" in sums
    assert algorithm_for(config(name="dr_grpo")).loss_fn(denominators)(batch, log_probs, None)[0].item() == -0.75
    loss, sums = algorithm_for(config(name="sft")).loss_fn(denominators)(batch, log_probs, None)
    assert loss.item() == 2.0
    assert "train/loss" in sums


def test_algorithms_and_packing_import_nothing_heavy():
    code = (
        "import sys, megaverl.algorithms.registry, megaverl.algorithms.rewards, megaverl.data.packing;"
        "print([m for m in ('ray', 'vllm', 'megatron', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


def test_ppo_has_a_critic_and_no_groups():
    ppo = algorithm_for(config(name="ppo"))
    assert ppo.needs_critic
    assert ppo.advantages is None
    assert not ppo.supervised
    assert not ppo.needs_old_log_probs(single_update=True)
    assert ppo.needs_old_log_probs(single_update=False)
    assert algorithm_for(config(name="ppo", kl_in_reward=True)).needs_old_log_probs(single_update=True)
    batch = SequenceBatch.from_lists(
        [[0]], [[0, 0]], response_columns={"values": [[0.0, 0.0]], "returns": [[1.0, 3.0]]}
    )
    loss, sums = ppo.critic_loss_fn(Denominators(2, 1, 4))(batch, torch.zeros(3))
    assert loss.item() == 0.5 * (1 + 9) / 2
    assert "critic/vf_loss" in sums
    for name in ("grpo", "dr_grpo", "sft"):
        assert not algorithm_for(config(name=name)).needs_critic
    assert algorithm_for(config(name="sft")).supervised
