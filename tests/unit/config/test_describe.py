"""Descriptions: every key has a type, a default and a sentence."""

from __future__ import annotations

import pytest

from megaverl.config.describe import describe, section_sentence
from megaverl.config.fields import all_fields, all_sections
from megaverl.config.schema import Config
from megaverl.errors import UserError


def leaves(values: dict, prefix: str = "") -> dict:
    flat = {}
    for name, value in values.items():
        flat.update(leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value})
    return flat


def test_all_keys_are_described_with_their_real_defaults():
    assert {row.key: row.default for row in describe()} == leaves(Config().model_dump())


def test_every_key_and_section_has_a_sentence():
    for row in describe():
        assert row.sentence.endswith((".", ")")), row.key
        assert row.type
    for key, sentence in all_sections().items():
        assert sentence.endswith("."), key


@pytest.mark.parametrize(
    ("key", "kind", "default", "bounds"),
    [
        ("rollout.n", "whole number", "8", ">= 1"),
        ("rollout.val.temperature", "number", "0", ">= 0"),
        ("rollout.top_p", "number", "1", "> 0, <= 1"),
        ("rollout.tp", "whole number or null", "null", ">= 1"),
        ("actor.clip_ratio_c", "number or null", "3", "> 1"),
        ("actor.optimizer.lr", "number", "1e-06", ">= 0"),
        ("actor.use_kl_loss", "true or false", "false", ""),
        ("data.truncation", "error | left | right | filter", "error", ""),
        ("data.train_files", "list of text", "[]", ""),
        ("trainer.loggers", "list of console | file | wandb | tensorboard", "[console, file]", ""),
        ("model.path", "text", '""', ""),
        ("trainer.run_dir", "text", "runs/run", "not empty"),
    ],
)
def test_one_field(key, kind, default, bounds):
    (row,) = describe(key)
    assert (row.key, row.type, row.default_text, row.bounds) == (key, kind, default, bounds)


def test_a_section_gives_its_fields_in_the_order_of_the_schema():
    keys = [row.key for row in describe("rollout.val")]
    names = ("n", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids")
    assert keys == [f"rollout.val.{name}" for name in names]
    assert [row.key for row in describe("actor")][:2] == ["actor.layout.tp", "actor.layout.pp"]
    assert section_sentence("rollout") == "Generation."
    assert section_sentence("rollout.n") == ""


def test_a_section_is_no_prefix_of_a_name():
    assert "reward.function.path" in all_fields()
    with pytest.raises(UserError):
        describe("rollout.v")


def test_an_unknown_key_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"did you mean actor\.optimizer\.lr"):
        describe("optimizer.lr")
