"""The command: exit codes, errors, JSON, and that light commands stay light."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import megaverl
from megaverl.cli import main
from megaverl.commands.doctor import classify_apex
from megaverl.config.load import load_config
from megaverl.errors import RunError

HEAVY = ("torch", "ray", "vllm", "megatron", "transformers", "pyarrow", "numpy")
RECIPES = Path(__file__).parents[2] / "configs" / "yaml"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def python(*words: str, **options) -> subprocess.CompletedProcess:
    options = {"capture_output": True, "text": True, "timeout": 120, "check": False, "env": ENVIRONMENT} | options
    return subprocess.run([sys.executable, *words], **options)


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys, *words: str):
    """The one document on standard output."""
    code, out, _ = run(capsys, *words, "--json")
    return code, json.loads(out)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["train", "--help"],
        ["config", "describe"],
        ["config", "show", str(RECIPES / "grpo_gsm8k.yaml")],
        ["train", str(RECIPES / "grpo_gsm8k.yaml"), "--dry-run", "model.path=m"],
        ["train", str(RECIPES / "grpo_gsm8k.yaml"), "rolout.n=3"],
        ["train", "nope.yaml", "--json"],
        ["data", "check"],
        ["plan", "reshard", "--model", "m", "--train", "x", "--rollout", "y"],
    ],
    ids=" ".join,
)
def test_light_commands_load_nothing_heavy(words):
    code = (
        "import sys\nfrom megaverl.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    assert python("-c", code, *words).stderr.splitlines()[-1] == "[]"


def test_help_comes_at_once():
    """In seconds of one core, so that a busy machine does not fail it."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert python("-m", "megaverl", "--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.5


def test_the_public_api_is_there_and_light():
    code = (
        "import sys, megaverl\nprint(megaverl.load_config().rollout.n, megaverl.__version__, dir(megaverl))\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    first, second = python("-c", code).stdout.splitlines()
    assert first.startswith(f"8 {megaverl.__version__} ")
    assert "'Trainer'" in first
    assert second == "[]"
    with pytest.raises(AttributeError, match="nothing_like_it"):
        megaverl.nothing_like_it  # noqa: B018


def test_the_version_is_that_of_the_package():
    project = (RECIPES.parents[1] / "pyproject.toml").read_text()
    assert f'version = "{megaverl.__version__}"' in project


def test_train_help_lists_every_key(capsys):
    with pytest.raises(SystemExit) as done:
        main(["train", "--help"])
    out = capsys.readouterr().out
    assert done.value.code == 0
    assert "  rollout.n=8\n      Samples per prompt (the group size of GRPO). (whole number, >= 1)" in out
    assert "actor.optimizer.lr=1e-06" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["train"], "the following arguments are required: CONFIG"),
        (["train", "nope.yaml"], "nope.yaml: cannot read the configuration: there is no such file"),
        (["train", "rollout.n=8"], "the first word must be the configuration file, got rollout.n=8"),
        (["train", str(RECIPES / "base.yaml"), "rolout.n=8"], "did you mean rollout.n"),
        (["train", str(RECIPES / "base.yaml"), "--dry-run"], "no model is named"),
        (["train", str(RECIPES / "base.yaml"), "--dry"], "unknown argument --dry"),
        (["train", str(RECIPES / "base.yaml"), "--foo=3"], "unknown argument --foo=3"),
        (["config", "describe", "rollout.m"], "did you mean rollout.n"),
        (["data", "check"], "no files to check"),
        (["data", "gsm8k", "nowhere", "--out", "x"], "nowhere: no such folder"),
        (["plan", "reshard", "--model", "m", "--train", "tp=0", "--rollout", "tp=1"], "whole number of at least 1"),
        (["plan", "reshard", "--model", "m", "--train", "tp=1,tp=1", "--rollout", "tp=1"], "given twice"),
        (["plan", "reshard", "--model", "m", "--train", "tp=1", "--rollout", "tp=1"], "m: there is no such folder"),
        (["demo", "--layout", "pp2"], "invalid choice: 'pp2'"),
    ],
)
def test_wrong_input_is_exit_code_2_with_a_message_and_no_traceback(capsys, words, message):
    code, out, err = run(capsys, *words)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err
    code, document = run_json(capsys, *words)
    assert code == 2
    assert document["error"]["exit_code"] == 2
    assert any(
        message in f"{problem['where']}: {problem['what']} {problem['fix']}"
        for problem in document["error"]["problems"]
    )


def test_all_problems_are_in_the_json(capsys):
    _, document = run_json(capsys, "train", str(RECIPES / "base.yaml"), "rollout.n=0", "rolout.n=1", "seed=1")
    assert [problem["where"] for problem in document["error"]["problems"]] == [
        "command line, rolout.n=1",
        "command line, seed=1",
        "command line, rollout.n=0",
    ]


def test_a_failed_run_is_exit_code_1(capsys, monkeypatch):
    def fail(*_, **__):
        raise RunError("rank 1 died in gen")

    monkeypatch.setattr("megaverl.commands.config.show_fields", fail)
    assert run(capsys, "config", "describe") == (1, "", "error: rank 1 died in gen\n")
    code, document = run_json(capsys, "config", "describe")
    assert code == 1
    assert document == {"error": {"exit_code": 1, "problems": [{"what": "rank 1 died in gen", "where": "", "fix": ""}]}}


def test_ctrl_c_is_one_line(capsys, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("megaverl.commands.config.show_fields", stop)
    code, out, err = run(capsys, "config", "describe")
    assert (code, out) == (130, "")
    assert "Traceback" not in err
    assert err.startswith("stopped with Ctrl-C")
    assert err.count("\n") == 1


def test_an_unexpected_error_shows_its_traceback_and_is_exit_code_1():
    code = (
        "import sys, megaverl.commands.config as c\nfrom megaverl.cli import main\n"
        "def fail(*a, **k): raise ZeroDivisionError('a bug')\nc.show_fields = fail\n"
        "sys.exit(main(['config', 'describe']))"
    )
    done = python("-c", code)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError: a bug" in done.stderr


def test_a_reader_that_leaves_early_is_no_error():
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m megaverl config describe | head -1; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] in ("0", "141")


def test_a_closed_pipe_ends_quietly():
    read, write = os.pipe()
    os.close(read)
    done = python("-m", "megaverl", "config", "describe", capture_output=False, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("module", [["megaverl", "train"], ["megaverl.train"]])
def test_python_m_is_the_same_command(module):
    done = python("-m", *module, str(RECIPES / "grpo_tiny.yaml"), "--dry-run", "model.path=m", "trainer.seed=3")
    assert done.returncode == 0
    assert "seed: 3" in done.stdout
    assert python("-m", *module, "nope.yaml").returncode == 2


def test_dry_run_prints_a_configuration_that_loads_again(capsys, tmp_path):
    recipe = str(RECIPES / "grpo_tiny.yaml")
    words = ["rollout.n=3", "model.path=m", "trainer.seed=7", "actor.use_kl_loss=false"]
    code, out, err = run(capsys, "train", recipe, "--dry-run", *words)
    assert code == 0
    (tmp_path / "config.yaml").write_text(out)
    assert load_config(tmp_path / "config.yaml") == load_config(recipe, words)
    assert "note: no KL to the reference model" in err
    code, document = run_json(capsys, "train", recipe, "--dry-run", "model.path=m")
    assert document["config"] == load_config(recipe, ["model.path=m"]).model_dump()
    assert document["plan"] is None, "the sizes of a model named m are not known"


@pytest.mark.parametrize("name", ["sft", "dpo", "rm"])
def test_dry_run_has_no_reshard_plan_where_nothing_is_generated(capsys, name):
    words = ["model.path=models/Qwen2.5-0.5B", f"algorithm.name={name}", "rollout.tp=null"]
    code, document = run_json(capsys, "train", str(RECIPES / "grpo_gsm8k.yaml"), "--dry-run", *words)
    assert (code, document["plan"], document["layout"]) == (0, None, "tp1-pp1-dp8")


def test_dry_run_plans_from_the_sizes_of_a_published_model_alone(capsys):
    words = ["model.path=models/Qwen2.5-7B-Instruct", "actor.layout.tp=2", "cluster.nodes=2"]
    code, document = run_json(capsys, "train", str(RECIPES / "grpo_gsm8k.yaml"), "--dry-run", *words)
    assert code == 0
    assert document["layout"] == "tp2-pp1-dp8"
    # parameters of the model as its card has them, the 2 KV heads of each rank once per replica, norms once per rank
    assert 7_615_616_512 * 2 * 8 <= document["plan"]["bytes_aliased"] <= 7_616_700_000 * 2 * 8
    assert document["plan"]["bytes_received"] == document["plan"]["bytes_copied"] == 0
    code, _, err = run(capsys, "train", str(RECIPES / "grpo_gsm8k.yaml"), "--dry-run", words[0], "actor.layout.tp=8")
    assert (code, "28 attention heads cannot be divided over 8 ranks" in err) == (2, True)


def test_config_show_is_the_resolved_configuration(capsys):
    code, document = run_json(capsys, "config", "show", str(RECIPES / "grpo_gsm8k.yaml"), "rollout.n=2")
    assert code == 0
    assert document == load_config(RECIPES / "grpo_gsm8k.yaml", ["rollout.n=2"]).model_dump()
    assert document["trainer"]["run_dir"] == "runs/grpo_gsm8k"


def test_config_describe(capsys):
    code, out, _ = run(capsys, "config", "describe", "actor.optimizer")
    assert code == 0
    assert out.startswith("actor.optimizer: The actor's optimizer.\n")
    assert all(line.isprintable() for line in out.splitlines())
    row = next(line for line in out.splitlines() if "actor.optimizer.beta1" in line)
    for part in ("number", "0.9", ">= 0, < 1", "AdamW's decay rate of the first moment."):
        assert part in row, "in a pipe each key is one line"
    assert run(capsys, "config", "describe", "rollout.n")[1].splitlines() == [
        "rollout.n",
        "  Samples per prompt (the group size of GRPO).",
        "  type     whole number",
        "  default  8",
        "  bounds   >= 1",
    ]
    _, document = run_json(capsys, "config", "describe", "rollout.tp")
    assert document == [
        {
            "key": "rollout.tp",
            "type": "whole number or null",
            "default": None,
            "bounds": ">= 1",
            "sentence": "Tensor parallel size of the rollout; the actor's when not set.",
        }
    ]


@pytest.fixture
def gsm8k(tmp_path):
    folder = tmp_path / "published"
    folder.mkdir()
    for split, count in (("train", 3), ("test", 2)):
        rows = [{"question": f"What is {i}+1?", "answer": f"{i}+1={i + 1}\n#### {i + 1}"} for i in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_data_gsm8k(capsys, gsm8k, tmp_path):
    out = tmp_path / "out"
    code, document = run_json(capsys, "data", "gsm8k", str(gsm8k), "--out", str(out))
    assert code == 0
    assert document["rows"] == {"train": 3, "test": 2}
    assert (out / "train.parquet").exists()
    code, _, err = run(capsys, "data", "gsm8k", str(gsm8k), "--out", str(out))
    assert code == 2
    assert "train.parquet" in err
    code, text, _ = run(capsys, "data", "gsm8k", str(gsm8k), "--out", str(out), "--overwrite")
    assert code == 0
    assert "3 rows" in text


def test_data_check_with_a_real_tokenizer(capsys, gsm8k, tmp_path):
    tokenizer = Path(__file__).parents[3] / "shared" / "assets" / "qwen2.5-tokenizer"
    if not tokenizer.exists():
        pytest.skip("needs shared/assets/qwen2.5-tokenizer")
    out = tmp_path / "out"
    assert run(capsys, "data", "gsm8k", str(gsm8k), "--out", str(out))[0] == 0
    words = ["data", "check", str(out / "train.parquet"), "--tokenizer", str(tokenizer)]
    code, document = run_json(capsys, *words)
    assert code == 0
    assert [(report["rows"], report["kept"]) for report in document] == [(3, 3)]
    _, text, _ = run(capsys, *words)
    assert "prompt tokens up to" in text
    code, _, err = run(capsys, *words, "data.max_prompt_length=2")
    assert code == 1
    assert "train.parquet" in err
    assert run(capsys, *words, str(tmp_path / "nowhere.parquet"))[0] == 2
    (tmp_path / "run.yaml").write_text(f"data: {{train_files: {out}/train.parquet, val_files: {out}/test.parquet}}")
    words = ["data", "check", "--config", str(tmp_path / "run.yaml"), "--tokenizer", str(tokenizer)]
    code, document = run_json(capsys, *words)
    assert [report["kept"] for report in document] == [3, 2]


def test_plan_reshard(capsys, tmp_path):
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    rest = {"intermediate_size": 256, "vocab_size": 1024, "max_position_embeddings": 128, "rms_norm_eps": 1e-6}
    kind = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1e4, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps({**kind, **sizes, **rest, "tie_word_embeddings": True}))
    words = ["plan", "reshard", "--model", str(tmp_path), "--train", "tp=2,dp=2", "--rollout", "tp=2"]
    code, document = run_json(capsys, *words)
    assert code == 0
    layer = 128 * (128 + 2 * 64) + 256 + 128 * 128 + 3 * 128 * 256 + 2 * 128
    parameters = 1024 * 128 + 2 * layer + 128
    split = parameters - (2 * 2 * 128 + 128)  # all but the norms, which every rank has whole
    assert document["totals"]["bytes_aliased"] == 4 * (2 * split + 4 * (parameters - split))
    assert document["totals"]["bytes_received"] == document["totals"]["bytes_copied"] == 0
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1, 2, 3]
    _, text, _ = run(capsys, *words)
    assert f"{document['totals']['bytes_aliased']:,}" in text
    code, document = run_json(capsys, *words[:-1], "tp=1")
    totals = document["totals"]
    assert code == 0
    assert totals["bytes_received"] == totals["bytes_received_bound"] == 4 * 4 * (split // 2)
    assert totals["bytes_aliased"] == 4 * 4 * (parameters - split)
    assert totals["bytes_copied"] == totals["bytes_received"]
    assert totals["peak_extra_bytes"] == 4 * split
    assert document["hybridflow_bytes_received_per_rank"] == 4 * parameters // 2
    for column in ("bytes_aliased", "bytes_copied", "bytes_received"):
        assert sum(rank[column] for rank in document["ranks"]) == totals[column]
        assert sum(row[column] for row in document["classes"]) == totals[column]
    _, text, _ = run(capsys, *words[:-1], "tp=1")
    assert "decoder.layers.{i}.mlp.linear_fc1.weight" in text
    assert f"{4 * parameters // 2:,}" in text
    code, document = run_json(capsys, *words[:-1], "tp=8")
    assert code == 2
    assert "rollout.tp" in json.dumps(document)


def test_doctor_reports_versions_device_and_kernels():
    done = python("-m", "megaverl", "doctor", "--json")
    document = json.loads(done.stdout)
    findings = {finding["what"]: finding for finding in document["findings"]}
    assert {"python", "torch", "megatron-core", "vllm", "ray", "transformers", "apex", "cores"} <= set(findings)
    assert findings["torch"]["found"] == __import__("importlib.metadata").metadata.version("torch")
    assert findings["kernels"]["note"]
    assert done.returncode == (0 if document["ok"] else 1)
    assert document["ok"] == all(finding["state"] != "wrong" for finding in document["findings"])


def test_doctor_tells_the_unrelated_apex_from_nvidias(tmp_path):
    """On PyPI, ``apex`` is a web toolkit."""
    assert classify_apex([], built=False, installed=False).state == "optional"
    (tmp_path / "pypi" / "apex").mkdir(parents=True)
    unrelated = classify_apex([tmp_path / "pypi" / "apex"], built=False, installed=True)
    assert unrelated.state == "wrong"
    assert "pip uninstall apex" in unrelated.note
    (tmp_path / "nvidia" / "apex" / "optimizers").mkdir(parents=True)
    for built, state in ((False, "optional"), (True, "ok")):
        assert classify_apex([tmp_path / "nvidia" / "apex"], built=built, installed=True).state == state


def test_json_output_is_not_mixed_with_what_others_print():
    code = (
        "import os, sys\nfrom megaverl.commands.output import print_json, stdout_to_stderr\n"
        "print('before', file=sys.stderr)\n"
        "with stdout_to_stderr():\n    print('python')\n    os.system('echo child')\n    os.write(1, b'native\\n')\n"
        "print_json({'a': 1})"
    )
    done = python("-c", code)
    assert json.loads(done.stdout) == {"a": 1}
    assert {"before", "python", "child", "native"} <= set(done.stderr.split())


def test_submit_needs_a_cluster_and_a_configuration_that_can_run(capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    recipe = str(RECIPES / "grpo_tiny.yaml")
    code, _, err = run(capsys, "train", recipe, "model.path=m", "--submit")
    assert (code, "no cluster is named to submit to" in err) == (2, True)
    code, _, err = run(capsys, "train", recipe, "--submit", "cluster.address=http://127.0.0.1:9")
    assert (code, "no model is named" in err) == (2, True)
    code, _, err = run(capsys, "train", recipe, "model.path=m", "--submit", "cluster.address=http://127.0.0.1:9")
    assert (code, "no cluster takes jobs at http://127.0.0.1:9" in err) == (2, True)
