"""What is wrong with a critic is said before Ray starts, with all other problems."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaverl.config.load import load_config
from megaverl.data.arithmetic import write_arithmetic
from megaverl.data.tiny import build_tiny_checkpoint
from megaverl.errors import UserError
from megaverl.trainer.preflight import prepare

RECIPE = Path(__file__).parents[3] / "configs" / "yaml" / "ppo_tiny.yaml"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return build_tiny_checkpoint(tmp_path_factory.mktemp("model") / "start")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_arithmetic(tmp_path_factory.mktemp("rows"), 0, train=32, val=8, sft=32)


@pytest.fixture
def config(start, rows, tmp_path):
    def make(*overrides):
        options = [
            f"model.path={start}",
            f"data.train_files=[{rows['train']}]",
            f"data.val_files=[{rows['val']}]",
            f"trainer.run_dir={tmp_path / 'run'}",
        ]
        return load_config(RECIPE, [*options, *overrides])

    return make


def write_critic(start: Path, folder: Path, *, change=lambda tensors: None, **settings) -> Path:
    """The start checkpoint as a token classification, with ``settings`` in its config.json."""
    folder.mkdir()
    config = json.loads((start / "config.json").read_text())
    config |= {"architectures": ["Qwen2ForTokenClassification"], "id2label": {"0": "value"}, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(start / "model.safetensors")
    tensors["score.weight"], tensors["score.bias"] = torch.ones(1, config["hidden_size"]), torch.ones(1)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def problems_of(config) -> str:
    with pytest.raises(UserError) as caught:
        prepare(config)
    return "\n".join(map(str, caught.value.problems))


def test_updates_are_counted_by_role(config):
    prepared = prepare(config("critic.mini_batch_size=4", "critic.epochs=3", "actor.mini_batch_size=8"))
    assert prepared.critic == prepared.shape
    assert prepared.critic_updates == 40 * 3 * 4
    assert prepared.actor_updates == (40 - 2) * 2


def test_other_algorithms_have_no_critic(config):
    assert prepare(config("algorithm.name=grpo")).critic is None


def test_a_good_critic_is_taken(config, start, tmp_path):
    path = write_critic(start, tmp_path / "critic")
    assert prepare(config(f"critic.path={path}")).critic.hidden == 128


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        (lambda t: t.pop("score.weight"), {}, "tensor score.weight is missing"),
        (lambda t: t.pop("model.norm.weight"), {}, "tensor model.norm.weight is missing"),
        (lambda t: None, {"id2label": {"0": "bad", "1": "good"}}, "a classification with 2 labels"),
        (
            lambda t: None,
            {"architectures": ["BertForTokenClassification"]},
            "architecture BertForCausalLM is not known",
        ),
    ],
)
def test_a_critic_that_does_not_fit_is_named_with_the_other_problems(config, start, tmp_path, change, settings, words):
    path = write_critic(start, tmp_path / "critic", change=change, **settings)
    text = problems_of(config(f"critic.path={path}", "trainer.export_dir=" + str(start)))
    assert words in text
    assert str(path) in text
    assert "overwrite" in text  # the other problem


def test_a_critic_of_fewer_tokens_than_the_actor_is_refused(config, start, tmp_path):
    cut = lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"][:960].clone()})  # noqa: E731
    path = write_critic(start, tmp_path / "critic", change=cut, vocab_size=960)
    assert "the critic's embedding has 960 rows" in problems_of(config(f"critic.path={path}"))


def test_a_critic_that_the_layout_cannot_divide_is_refused(config, start, tmp_path):
    path = write_critic(start, tmp_path / "critic", num_attention_heads=1, num_key_value_heads=1, head_dim=32)
    assert "attention heads" in problems_of(config(f"critic.path={path}"))
