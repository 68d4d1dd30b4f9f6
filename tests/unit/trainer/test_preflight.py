"""What is wrong is said before Ray starts, all of it at once."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megaverl.config.load import load_config
from megaverl.data.arithmetic import write_arithmetic
from megaverl.data.tiny import build_tiny_checkpoint
from megaverl.errors import Problem, UserError
from megaverl.trainer.preflight import prepare

RECIPE = Path(__file__).parents[3] / "configs" / "yaml" / "grpo_tiny.yaml"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return build_tiny_checkpoint(tmp_path_factory.mktemp("model") / "start")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_arithmetic(tmp_path_factory.mktemp("rows"), 0, train=32, val=8, sft=32)


@pytest.fixture
def model(start, tmp_path):
    """A copy of the checkpoint that a test may damage."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in start.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


@pytest.fixture
def config(model, rows, tmp_path):
    def make(*overrides):
        options = [
            f"model.path={model}",
            f"data.train_files=[{rows['train']}]",
            f"data.val_files=[{rows['val']}]",
            f"trainer.run_dir={tmp_path / 'run'}",
        ]
        return load_config(RECIPE, [*options, *overrides])

    return make


def problems_of(config) -> list[Problem]:
    with pytest.raises(UserError) as caught:
        prepare(config)
    return list(caught.value.problems)


def jsonl(path: Path, *lines) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


ROW = {
    "data_source": "megaverl/arithmetic",
    "prompt": [{"role": "user", "content": "2+3?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {},
}


def test_good_input_is_prepared(config):
    prepared = prepare(config())
    assert prepared.total_steps == 40
    assert str(prepared.layout) == "tp2-pp1-dp1"
    assert (len(prepared.train), len(prepared.val)) == (32, 8)


def test_all_problems_come_in_one_message(config, model, tmp_path):
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    bad = jsonl(
        tmp_path / "bad.jsonl",
        {**ROW, "prompt": None},
        {**ROW, "prompt": ""},
        {**ROW, "prompt": 7},
        {**ROW, "data_source": "megaverl/arithmetik"},
        {name: value for name, value in ROW.items() if name != "prompt"},
        {**ROW, "prompt": [{"role": "user", "content": "word " * 100}]},
    )
    (tmp_path / "file").write_text("")
    found = problems_of(
        config(
            f"data.train_files=[{bad},{tmp_path / 'nowhere.parquet'}]",
            f"trainer.run_dir={tmp_path / 'file' / 'run'}",
            "actor.layout.tp=3",
            "cluster.workers_per_node=3",
        )
    )
    text = "\n".join(map(str, found))
    for row in range(6):
        assert f"row {row}" in text, f"row {row} is not named:\n{text}"
    for words in (
        "nowhere.parquet",
        "trainer.run_dir",
        "model.layers.1.mlp.up_proj.weight",
        "actor.layout.tp",
        "megaverl/arithmetic",  # the nearest known data source
        "data.max_prompt_length",
    ):
        assert words in text, f"{words} is not named:\n{text}"


def test_custom_scorer_that_is_not_there(config, tmp_path):
    found = problems_of(config(f"reward.function.path={tmp_path / 'no_scorer.py'}"))
    assert [("no_scorer.py" in p.where, "reward.function.path" in p.where) for p in found] == [(True, True)]


def test_tokenizer_without_chat_template(config, model):
    file = model / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["chat_template"]
    file.write_text(json.dumps(settings))
    assert any("chat template" in p.what for p in problems_of(config()))


def test_vocabulary_larger_than_the_embedding(config, tmp_path):
    small = tmp_path / "small"
    build_tiny_checkpoint(small, vocab=1024)
    settings = json.loads((small / "config.json").read_text()) | {"vocab_size": 960}
    (small / "config.json").write_text(json.dumps(settings))
    tensors = load_file(small / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:960].clone()
    save_file(tensors, small / "model.safetensors", {"format": "pt"})
    found = problems_of(config(f"model.path={small}"))
    assert any("960 rows" in p.what and "tokenizer" in p.what for p in found)


def test_wrong_version_is_named(config, monkeypatch):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.1.0" if name == "megatron-core" else real(name))
    found = problems_of(config("rollout.engine=vllm"))
    assert any("0.1.0" in p.what for p in found)


def test_a_rollout_of_another_layout_is_taken_and_one_that_cannot_be_divided_names_the_key(config):
    assert prepare(config("rollout.tp=1")).layout.tp == 2
    found = problems_of(config("cluster.workers_per_node=6", "rollout.tp=3"))
    assert any("rollout.tp" in p.where for p in found)


def test_sequences_beyond_what_dynamic_rope_scaling_supports(config, model):
    file = model / "config.json"
    content = json.loads(file.read_text())
    content.pop("rope_parameters", None)
    content |= {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64}
    file.write_text(json.dumps(content))
    prepare(config("data.max_prompt_length=48", "data.max_response_length=16"))
    (found,) = problems_of(config("data.max_prompt_length=56", "data.max_response_length=16"))
    assert "rope scaling 'dynamic' is supported up to max_position_embeddings = 64" in found.what
    assert found.where == "data.max_prompt_length + data.max_response_length"


def test_export_folder_in_use(config, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    found = problems_of(config(f"trainer.export_dir={tmp_path / 'out'}"))
    assert [p.where for p in found] == [str(tmp_path / "out")]


def test_too_few_rows_for_a_batch(config):
    found = problems_of(config("data.train_batch_size=64"))
    assert any("data.train_batch_size" in p.where for p in found)


def test_command_reports_and_starts_nothing(model, tmp_path):
    """Exit code 2, all problems on standard output as JSON, and no Ray in the process."""
    program = (
        "import sys; from megaverl.cli import main; code = main(sys.argv[1:]); "
        "assert 'ray' not in sys.modules, 'ray was imported'; sys.exit(code)"
    )
    words = [
        "train",
        str(RECIPE),
        f"model.path={model}",
        "data.train_files=nowhere.parquet",
        "actor.layout.tp=3",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
    )
    assert done.returncode == 2, done.stderr
    problems = json.loads(done.stdout)["error"]["problems"]
    assert {"nowhere.parquet", "actor.layout"} <= {
        w for p in problems for w in ("nowhere.parquet", "actor.layout") if w in str(p)
    }


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_engine_and_kernels_are_checked_where_this_machine_is_the_cluster(config, monkeypatch, device):
    """With ``cluster.device=auto`` too; an address leaves the device, and so these, to the workers."""
    monkeypatch.setattr("megaverl.rollout.compat_vllm._missing_cpu_requirements", lambda: ["some-part"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    wrong = ("rollout.engine=vllm", "actor.kernels=flash", "actor.precision=bf16", f"cluster.device={device}")
    found = {p.where: p.what for p in problems_of(config(*wrong))}
    assert "some-part" in found["rollout.engine"]
    assert "no bf16 arithmetic" in found["actor.precision=bf16"]
    assert "compute capability 8.0" in found["actor.kernels=flash"]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    if device == "auto":
        prepare(config(*wrong))


def test_a_check_of_the_export_that_vllm_could_not_do_is_refused(config, monkeypatch, tmp_path):
    monkeypatch.setattr("megaverl.rollout.compat_vllm._missing_cpu_requirements", lambda: ["some-part"])
    options = ["cluster.device=cpu", "rollout.engine=hf", "rollout.tp=1", "actor.layout.tp=1"]
    options += [f"trainer.export_dir={tmp_path / 'out'}", "trainer.export_check=vllm"]
    (found,) = problems_of(config(*options))
    assert (found.where, "some-part" in found.what) == ("trainer.export_check=vllm", True)
    prepare(config(*options[:-1]))


def test_a_resumed_run_names_the_model_that_it_began_with(config, model, start, tmp_path):
    from megaverl.checkpoint.train_state import begin_state, commit_state, save_state
    from megaverl.parallel.layout import Layout
    from megaverl.trainer.resume import models_of

    begin_state(tmp_path / "run", 3)
    files = save_state(tmp_path / "run", 3, 0, 1, {"actor": {}}, {"step": 3})
    details = {"trained": ["actor"], "models": models_of(config(), critic=False)}
    commit_state(tmp_path / "run", 3, Layout(), files, details)
    prepare(config())
    prepare(config(f"model.path={start}"))  # the same files in another place
    other = build_tiny_checkpoint(tmp_path / "other", layers=1)
    (found,) = problems_of(config(f"model.path={other}"))
    assert found.where == f"model.path={other.resolve()}"
    assert f"another model than {model.resolve()}" in found.what
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(content | {"rope_theta": 5000.0}))
    assert any("holds another model than when the run began" in p.what for p in problems_of(config()))
