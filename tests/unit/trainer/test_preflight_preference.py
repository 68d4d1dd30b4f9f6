"""What is wrong with preference training and with a reward model that scores is said before Ray starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaverl.config.load import load_config
from megaverl.data.arithmetic import write_arithmetic
from megaverl.data.tiny import build_tiny_checkpoint
from megaverl.errors import UserError
from megaverl.trainer.preflight import prepare

RECIPES = Path(__file__).parents[3] / "configs" / "yaml"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return build_tiny_checkpoint(tmp_path_factory.mktemp("model") / "start")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_arithmetic(tmp_path_factory.mktemp("rows"), 0, train=32, val=8, sft=32, pairs=64)


@pytest.fixture(scope="module")
def scorer(start, tmp_path_factory):
    """The start checkpoint as a sequence classification with one label."""
    folder = tmp_path_factory.mktemp("scorer") / "model"
    shutil.copytree(start, folder)
    config = json.loads((start / "config.json").read_text())
    config |= {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(start / "model.safetensors")
    tensors["score.weight"] = torch.ones(1, config["hidden_size"])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def config(start, rows, tmp_path):
    def make(recipe, *overrides, train="pairs", val="val_pairs"):
        options = [f"model.path={start}", f"data.train_files=[{rows[train]}]", f"data.val_files=[{rows[val]}]"]
        return load_config(RECIPES / recipe, [*options, f"trainer.run_dir={tmp_path / 'run'}", *overrides])

    return make


def problems_of(config) -> str:
    with pytest.raises(UserError) as caught:
        prepare(config)
    return "\n".join(map(str, caught.value.problems))


@pytest.mark.parametrize("name", ["rm", "dpo", "kto"])
def test_the_recipes_are_taken(config, name):
    prepared = prepare(config(f"{name}_tiny.yaml", train="judged" if name == "kto" else "pairs"))
    assert prepared.supervised
    assert len(prepared.val) == 8
    assert prepared.actor_updates == 40
    assert not any("does not use" in note for note in prepared.notes)


def test_keys_and_rows_of_another_kind_are_named(config):
    text = problems_of(config("kto_tiny.yaml", "data.train_batch_size=1"))
    assert "column 'label' is missing" in text
    assert "there is one prompt" in text
    assert "no form for labels" in problems_of(
        config("dpo_tiny.yaml", "algorithm.preference.loss=ipo", "algorithm.preference.label_smoothing=0.1")
    )
    assert "pair, whose answers stay together" in problems_of(
        config("rm_tiny.yaml", "actor.max_tokens_per_micro_batch=100")
    )
    notes = prepare(config("rm_tiny.yaml", "algorithm.preference.beta=0.3", "rollout.n=4")).notes
    assert any("algorithm.preference.beta" in note and "rollout.n" in note for note in notes)


def test_a_reward_model_goes_on_from_a_reward_model(config, scorer):
    assert prepare(config("rm_tiny.yaml", f"model.path={scorer}")).shape.layers == 2


def test_a_reward_model_scores_rows_without_ground_truth(config, scorer):
    words = [f"reward.model.path={scorer}"]
    prepared = prepare(config("grpo_tiny.yaml", *words, train="pairs", val="val"))
    assert prepared.reward_shape == prepared.shape
    assert prepared.train[0].data_source == "unnamed"


def test_what_cannot_score_is_refused(config, start, scorer, tmp_path):
    rl = {"train": "train", "val": "val"}
    text = problems_of(config("grpo_tiny.yaml", f"reward.model.path={start}", **rl))
    assert "a language model, which scores nothing" in text
    other = tmp_path / "other"
    shutil.copytree(scorer, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "2 tokens of the actor have another id" in problems_of(
        config("grpo_tiny.yaml", f"reward.model.path={other}", **rl)
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).unlink()
    assert "no tokenizer" in problems_of(config("grpo_tiny.yaml", f"reward.model.path={other}", **rl))
