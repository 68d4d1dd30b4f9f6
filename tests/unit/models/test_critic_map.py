"""Which checkpoints a critic starts from, and the config.json that it gets."""

from __future__ import annotations

import json

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from megaverl.errors import UserError
from megaverl.models.critic_map import HEAD_BIAS, HEAD_WEIGHT, critic_map, critic_source, token_classification_config
from megaverl.models.family import load_shape, weight_map

KINDS = {"Qwen2": Qwen2Config, "Qwen3": Qwen3Config, "Llama": LlamaConfig}


def write(folder, family="Qwen2", form="ForCausalLM", **settings):
    config = KINDS[family](
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, **settings,
    ).to_dict()  # fmt: skip
    config["architectures"] = [family + form]
    (folder / "config.json").write_text(json.dumps(config))
    return config


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_critic_has_the_body_and_a_head_of_one_row(tmp_path, family, tied):
    write(tmp_path, family, tie_word_embeddings=tied)
    shape = load_shape(tmp_path)
    table, body = critic_map(shape), set(weight_map(shape).hf_names()) - {"lm_head.weight"}
    assert set(table.hf_names()) == body | {HEAD_WEIGHT, HEAD_BIAS}
    assert (table.hf_shape(HEAD_WEIGHT), table.hf_shape(HEAD_BIAS)) == ((1, 32), (1,))
    for tp in (1, 2):
        for row in table.expand():
            if row.megatron.startswith("value_head"):
                assert row.split == "replicated"
                assert table.local_shape(row, tp) == row.shapes[0]


@pytest.mark.parametrize("family", KINDS)
def test_what_each_kind_of_checkpoint_must_hold(tmp_path, family):
    write(tmp_path, family, tie_word_embeddings=False)
    language = critic_source(tmp_path)
    assert not language.has_head
    assert "lm_head.weight" in language.tensors.hf_names()
    write(tmp_path, family, "ForSequenceClassification", num_labels=1)
    reward = critic_source(tmp_path)
    assert reward.has_head
    assert HEAD_BIAS not in reward.tensors.hf_names()
    write(tmp_path, family, "ForTokenClassification", num_labels=1)
    assert set(critic_source(tmp_path).tensors.hf_names()) == {*reward.tensors.hf_names(), HEAD_BIAS}
    assert language.shape == reward.shape


@pytest.mark.parametrize("labels", [2, 3])
def test_several_labels_are_no_value(tmp_path, labels):
    write(tmp_path, form="ForTokenClassification", num_labels=labels)
    with pytest.raises(UserError, match=f"{labels} labels"):
        critic_source(tmp_path)


def test_the_export_says_what_transformers_needs(tmp_path):
    config = write(tmp_path)
    made = token_classification_config(config, load_shape(tmp_path))
    assert made["architectures"] == ["Qwen2ForTokenClassification"]
    assert made["id2label"] == {"0": "LABEL_0"}
    assert made["classifier_dropout"] == 0.0
    changed = {"architectures", "id2label", "label2id", "classifier_dropout"}
    assert {k: v for k, v in made.items() if k not in changed} == {k: v for k, v in config.items() if k not in changed}
    read = Qwen2Config.from_dict(made)
    assert read.num_labels == 1
    assert read.classifier_dropout == 0.0


def test_a_critics_own_config_comes_back_unchanged(tmp_path):
    config = write(tmp_path, form="ForTokenClassification", num_labels=1, classifier_dropout=0.1)
    assert token_classification_config(config, critic_source(tmp_path).shape) == config


def test_the_family_names_a_config_without_architectures(tmp_path):
    config = write(tmp_path, "Qwen3")
    del config["architectures"]
    made = token_classification_config(config, load_shape(tmp_path))
    assert made["architectures"] == ["Qwen3ForTokenClassification"]
