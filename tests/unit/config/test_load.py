"""Loading: inheritance, overrides, every kind of mistake, and the way back to YAML."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.config.describe import describe
from megaverl.config.load import config_yaml, load_config, save_config
from megaverl.config.schema import Config
from megaverl.errors import UserError
from megaverl.files import WriteError

RECIPES = sorted((Path(__file__).parents[3] / "configs" / "yaml").glob("*.yaml"))


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{next(iter(files))}.yaml"


def problems_of(path: Path | None, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return [str(problem) for problem in caught.value.problems]


def test_no_file_gives_the_defaults():
    assert load_config() == Config()


def test_numbers_in_scientific_notation_are_numbers(tmp_path):
    config = load_config(write(tmp_path, a="actor: {optimizer: {lr: 1e-6, eps: 3E-9}}"), ["actor.kl_loss_coef=2e-4"])
    assert (config.actor.optimizer.lr, config.actor.optimizer.eps, config.actor.kl_loss_coef) == (1e-6, 3e-9, 2e-4)


def test_files_inherit_and_the_nearer_one_wins(tmp_path):
    (tmp_path / "deep").mkdir()
    top = write(tmp_path, top="base: deep/middle.yaml\nrollout: {n: 3}\n")
    write(tmp_path / "deep", middle="base: ../root.yaml\nrollout: {n: 2, top_k: 7}\ndata: {val_files: [v]}\n")
    write(tmp_path, root="rollout: {n: 1, top_k: 5, top_p: 0.5}\ndata: {val_files: [x, y], train_files: [t]}\n")
    config = load_config(top)
    assert (config.rollout.n, config.rollout.top_k, config.rollout.top_p) == (3, 7, 0.5)
    assert config.data.val_files == ["v"], "lists are replaced, not joined"
    assert config.data.train_files == ["t"]


@pytest.mark.parametrize("names", [("a",), ("a", "b"), ("a", "b", "c")])
def test_a_circle_of_bases_is_refused(tmp_path, names):
    ring = dict(zip(names, names[1:] + names[:1], strict=True))
    path = write(tmp_path, **{name: f"base: {ring[name]}.yaml" for name in names})
    (problem,) = problems_of(path)
    assert "circle" in problem
    assert " -> ".join(f"{name}.yaml" for name in (*names, "a")) in problem


def test_a_missing_file_and_a_missing_base_are_named(tmp_path):
    assert "nope.yaml: cannot read the configuration: there is no such file" in problems_of(tmp_path / "nope.yaml")[0]
    (problem,) = problems_of(write(tmp_path, a="rollout: {n: 2}\nbase: gone.yaml\n"))
    assert "gone.yaml" in problem
    assert "a.yaml, line 2" in problem, "says who names the missing file"


def test_a_folder_is_no_configuration(tmp_path):
    assert str(tmp_path) in problems_of(tmp_path)[0]


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("rollout:\n  n: [1\n", 3, "expected"),
        ("rollout:\n  n: 1\n  n: 2\n", 3, "duplicate key n"),
        ("rollout:\n\tn: 1\n", 2, "cannot start any token"),
        ("rollout: {n: 1}\n}\n", 2, "expected"),
    ],
)
def test_wrong_yaml_names_the_line(tmp_path, text, line, word):
    (problem,) = problems_of(write(tmp_path, a=text))
    assert f"a.yaml, line {line}: not valid YAML" in problem
    assert word in problem


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text\n", "3\n"])
def test_yaml_without_keys_is_refused(tmp_path, text):
    assert "a configuration holds keys and values" in problems_of(write(tmp_path, a=text))[0]


def test_empty_files_and_empty_sections_set_nothing(tmp_path):
    assert load_config(write(tmp_path, a="")) == Config()
    assert load_config(write(tmp_path, a="# only a comment\n")) == Config()
    assert load_config(write(tmp_path, a="rollout:\nactor:\n  optimizer:\ndata: {}\n")) == Config()


def test_everything_wrong_is_reported_at_once_with_its_place(tmp_path):
    path = write(
        tmp_path,
        top="base: below.yaml\nrollout:\n  n: 0\nactor:\n  optimizer:\n    lr: fast\n",
        below="rolout:\n  top_p: 1\nalgorithm:\n  name: grpoo\ntrainer: 5\n",
    )
    found = problems_of(path, "data.train_batch_size=true", "lr=1", "rollout", "trainer.loggers=[console,fil]")
    text = "\n".join(found)
    assert len(found) == 9
    for expected in (
        "top.yaml, line 3: rollout.n must be >= 1, got 0",
        "top.yaml, line 6: actor.optimizer.lr must be a number, got 'fast'",
        "below.yaml, line 2: unknown key rolout.top_p",
        "did you mean rollout.top_p",
        "below.yaml, line 4: algorithm.name must be one of grpo | dr_grpo | ppo |",
        "did you mean grpo?",
        "below.yaml, line 5: trainer is a section, got 5",
        "command line, data.train_batch_size=true: data.train_batch_size must be a whole number, got true",
        "command line, lr=1: unknown key lr",
        "did you mean actor.optimizer.lr or critic.optimizer.lr",
        "`rollout` is not of the form key=value",
        "got 'fil'",
        "did you mean file?",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("rolloutn", "rollout.n"),
        ("rollout.temprature", "rollout.temperature"),
        ("actor.optim.lr", "actor.optimizer.lr"),
        ("actor_rollout_ref.actor.optim.lr", "actor.optimizer.lr"),
        ("actor_rollout_ref.actor.clip_ratio_low", "actor.clip_ratio_low"),
        ("data.train_batchsize", "data.train_batch_size"),
        ("trainer.total_epoch", "trainer.total_epochs"),
        ("seed", "trainer.seed"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(unknown, meant):
    (problem,) = problems_of(None, f"{unknown}=1")
    assert f"did you mean {meant}" in problem


def test_a_key_like_none_points_to_the_list():
    assert "megaverl config describe" in problems_of(None, "zzzzqqqq=1")[0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.n=x", "rollout.n must be a whole number, got 'x'"),
        ("rollout.n=1.5", "rollout.n must be a whole number, got 1.5"),
        ("rollout.n='4'", "rollout.n must be a whole number, got '4'"),
        ("rollout.n=null", "rollout.n must be a whole number, got null"),
        ("rollout.n=[1]", "rollout.n must be a whole number"),
        ("rollout.n={a: 1}", "rollout.n holds a value (whole number), not further keys"),
        ("rollout.n.x=1", "rollout.n holds a value (whole number), not further keys"),
        ("rollout.top_p=0", "rollout.top_p must be > 0, <= 1, got 0"),
        ("rollout.top_p=1.01", "rollout.top_p must be > 0, <= 1, got 1.01"),
        ("actor.optimizer.beta1=1", "actor.optimizer.beta1 must be >= 0, < 1, got 1"),
        ("actor.optimizer.lr=.nan", "actor.optimizer.lr must be"),
        ("actor.optimizer.lr=.inf", "actor.optimizer.lr must be a number, got inf"),
        ("actor.use_kl_loss=1", "actor.use_kl_loss must be true or false, got 1"),
        ("actor.use_kl_loss=yes please", "actor.use_kl_loss must be true or false, got 'yes please'"),
        ("model.path=null", "model.path must be text, got null"),
        ("model.path=???", "model.path must be given"),
        ("trainer.run_dir=", "trainer.run_dir must be not empty, got ''"),
        ("data.train_files=[a, 1]", "data.train_files must be a list of text, got 1"),
        ("data.train_files=3", "data.train_files must be a list of text, got 3"),
        ("data.train_files=[a", "the value is not valid YAML"),
        ("rollout=8", "rollout is a section, got 8"),
        ("=8", "is not of the form key=value"),
        ("rollout..n=8", "is not of the form key=value"),
        ("trainer.experiment=${trainer.nothing}", "trainer.experiment cannot be resolved"),
        ("trainer.experiment=${unclosed", "trainer.experiment cannot be resolved"),
        ("rollout.n=1\ndata.seed: 3", "the value"),
    ],
)
def test_a_wrong_override_says_what_is_right(override, message):
    (problem,) = problems_of(None, override)
    assert message in problem


def test_overrides_are_read_as_yaml_and_the_last_one_wins():
    config = load_config(
        None,
        [
            "rollout.n=4",
            "rollout.n=5",
            "rollout.tp=2",
            "rollout.tp=null",
            "actor.use_kl_loss=true",
            "data.train_batch_size=1e3",
            "data.val_files=[a.parquet, b.parquet]",
            "trainer.loggers=[]",
        ],
    )
    assert (config.rollout.n, config.rollout.tp, config.actor.use_kl_loss) == (5, None, True)
    assert config.data.train_batch_size == 1000
    assert config.data.val_files == ["a.parquet", "b.parquet"]
    assert config.trainer.loggers == []


@pytest.mark.parametrize("key", ["rollout.val.n", "rollout.n", "actor.layout.tp", "reward.function.name"])
def test_setting_one_key_leaves_the_defaults_of_its_section(key):
    """`rollout.val` once lost its own temperature when its n was set."""
    changed = {row.key: row.default for row in describe()} | {key: "7" if key.endswith("name") else 7}
    values = load_config(None, [f"{key}=7"]).model_dump()
    for name, expected in changed.items():
        value = values
        for part in name.split("."):
            value = value[part]
        assert value == expected, name


def test_one_text_stands_for_a_list_of_one(tmp_path):
    config = load_config(write(tmp_path, a="data: {val_files: v.parquet}"), ["data.train_files=a.parquet"])
    assert config.data.train_files == ["a.parquet"]
    assert config.data.val_files == ["v.parquet"]


@pytest.mark.parametrize("text", ["001", "1e-6", "true", "a: b", "with # hash", "a=b", "[x", "{x", "s3://b/c", "x,y"])
def test_a_text_key_takes_its_value_as_written(text):
    assert load_config(None, [f"trainer.experiment={text}"]).trainer.experiment == text


def test_a_quoted_text_loses_its_quotes():
    assert load_config(None, ["trainer.experiment='null'"]).trainer.experiment == "null"
    assert load_config(None, ["model.tokenizer_path=null"]).model.tokenizer_path is None


def test_values_may_refer_to_others(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGAVERL_TEST_FOLDER", "/data")
    path = write(tmp_path, a="trainer: {run_dir: 'runs/${trainer.experiment}-${trainer.seed}'}")
    config = load_config(path, ["trainer.experiment=x", "model.path=${oc.env:MEGAVERL_TEST_FOLDER}/m"])
    assert config.trainer.run_dir == "runs/x-0"
    assert config.model.path == "/data/m"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_the_recipes_load_and_come_back_equal(path, tmp_path):
    config = load_config(path)
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_there_are_recipes():
    names = {path.stem for path in RECIPES}
    assert {"base", "grpo_gsm8k", "sft_gsm8k", "grpo_tiny", "sft_tiny"} <= names


TEXT = st.text(alphabet=st.sampled_from("ab1e-.:#'\"\\${}?~[] \n\té中"), max_size=12)


@settings(max_examples=40, deadline=None)
@given(experiment=TEXT, files=st.lists(TEXT, max_size=3), lr=st.floats(0, 1), tokenizer=st.none() | TEXT)
def test_any_config_comes_back_equal(tmp_path_factory, experiment, files, lr, tokenizer):
    config = Config()
    config.trainer.experiment = experiment
    config.data.train_files = files
    config.actor.optimizer.lr = lr
    config.model.tokenizer_path = tokenizer
    path = tmp_path_factory.mktemp("round") / "config.yaml"
    if "???" in (experiment, tokenizer, *files):
        return  # means "must be given" wherever it stands
    save_config(config, path)
    assert load_config(path) == config


def test_saving_replaces_whole_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "new" / "config.yaml"
    save_config(load_config(None, ["trainer.seed=1"]), path)
    save_config(load_config(None, ["trainer.seed=2"]), path)
    assert load_config(path).trainer.seed == 2
    assert [entry.name for entry in path.parent.iterdir()] == ["config.yaml"]


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    save_config(Config(), path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megaverl.files.os.replace", fail)
    with pytest.raises(WriteError, match="the disk is full"):
        save_config(load_config(None, ["trainer.seed=2"]), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]


def test_a_config_pickles():
    config = load_config(None, ["rollout.n=3", "data.train_files=x"])
    assert pickle.loads(pickle.dumps(config)) == config


def test_the_saved_text_names_every_key():
    text = config_yaml(Config())
    assert "lr: 1.0e-06" in text or "lr: 1e-06" in text
    assert "cpu_cache_gb" in text
