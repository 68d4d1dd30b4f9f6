import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaverl.checkpoint import rank_files
from megaverl.checkpoint.hf_convert import to_hf, to_megatron
from megaverl.checkpoint.hf_import import check_checkpoint, load_hf
from megaverl.checkpoint.train_state import begin_state, commit_state, save_state
from megaverl.cli import main
from megaverl.config.load import load_config, save_config
from megaverl.errors import Problems, RunError, UserError
from megaverl.models.critic_map import critic_map
from megaverl.models.family import load_shape
from megaverl.parallel.layout import Layout, stage_layers
from tests.unit.checkpoint.tiny import change_config, empty_params, make_checkpoint, rewrite, rows_of, tensors_of

LAYERS = 5


def same(a, b):
    want, got = tensors_of(a), tensors_of(b)
    assert want.keys() == got.keys()
    assert all(torch.equal(want[n], got[n]) and want[n].dtype == got[n].dtype for n in want)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (a / name).read_bytes() == (b / name).read_bytes()


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("originals")
    return {tied: make_checkpoint(folder / str(tied), tied=tied, layers=LAYERS) for tied in (True, False)}


# Case 5: an offline converter that never moved its pipeline rank could not divide a tied model.
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (1, 2), (1, 3), (2, 2), (4, 5)])
def test_case_5_to_megatron_and_back_is_bit_equal_in_every_layout(originals, tmp_path, tied, tp, pp):
    made = to_megatron(originals[tied], tmp_path / "megatron", tp=tp, pp=pp)
    assert (made.layout, made.tensors) == (Layout(tp=tp, pp=pp), len(rows_of(originals[tied]).hf_names()))
    assert len(list((tmp_path / "megatron").glob("tp_*_pp_*/model.safetensors"))) == tp * pp
    problems = Problems()
    check_checkpoint(tmp_path / "megatron", problems)  # as model.path of a run
    assert "give the Hugging Face folder that it was made from" in problems.found[0].fix
    shutil.copytree(tmp_path / "megatron", tmp_path / "moved")
    to_hf(tmp_path / "moved", tmp_path / "back")
    same(originals[tied], tmp_path / "back")
    assert sorted(os.listdir(tmp_path)) == ["back", "megatron", "moved"]


def test_a_ranks_file_is_what_a_run_would_load(originals, tmp_path):
    """Names, shapes and values; the last stage of a tied model has a copy of the embedding."""
    to_megatron(originals[True], tmp_path / "out", tp=2, pp=2)
    rows = rows_of(originals[True])
    for rank in range(2):
        whole = empty_params(rows, 2)
        load_hf(originals[True], rows, whole, tp=2, tp_rank=rank)
        for stage, chunks in enumerate(stage_layers(LAYERS, 2)):
            own = ("embedding", *(f"decoder.layers.{i}." for i in chunks[0]), *(("decoder.final",) * stage))
            found = load_file(tmp_path / "out" / f"tp_{rank:02d}_pp_{stage:03d}" / "model.safetensors")
            assert found.keys() == {name for name in whole if name.startswith(own)}
            assert all(torch.equal(found[name], whole[name]) for name in found)
    manifest = json.loads((tmp_path / "out" / "megatron.json").read_text())
    assert manifest["layers_by_stage"] == [chunks[0] for chunks in stage_layers(LAYERS, 2)]
    assert (manifest["tp"], manifest["pp"], manifest["vocab"], manifest["padded_vocab"]) == (2, 2, 100, 128)


def test_mixed_types_come_back_as_they_were(tmp_path):
    source = make_checkpoint(tmp_path / "in", dtype=torch.float16)
    rewrite(source, lambda t: t.update({n: v.float() for n, v in t.items() if "norm" in n or "k_proj" in n}))
    to_megatron(source, tmp_path / "megatron", tp=2)
    to_hf(tmp_path / "megatron", tmp_path / "back")
    same(source, tmp_path / "back")
    assert {str(t.dtype) for t in tensors_of(tmp_path / "back").values()} == {"torch.float16", "torch.float32"}


def test_many_small_mappings_and_files(originals, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_files, "MAPPED_BYTES", 100)
    to_megatron(originals[False], tmp_path / "megatron", tp=2, pp=2)
    to_hf(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=20_000)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 3
    same(originals[False], tmp_path / "back")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 3}, "4 attention heads cannot be divided over tensor parallel size 3"),
        ({"pp": 6}, "5 layers cannot fill 6 pipeline stages"),
    ],
)
def test_an_impossible_division_is_refused(originals, tmp_path, sizes, message):
    with pytest.raises(UserError, match=message):
        to_megatron(originals[True], tmp_path / "out", **sizes)
    assert os.listdir(tmp_path) == []


def test_nothing_is_overwritten_and_a_damaged_source_leaves_nothing(originals, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("")
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        to_megatron(originals[True], out)
    source = shutil.copytree(originals[True], tmp_path / "source")
    rewrite(source, lambda t: t["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(UserError, match=r"model\.norm\.weight: holds NaN"):
        to_megatron(source, tmp_path / "new")
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]


def test_a_damaged_folder_of_ranks_is_refused_by_name(originals, tmp_path):
    to_megatron(originals[True], tmp_path / "megatron", tp=2)
    file = tmp_path / "megatron" / "tp_01_pp_000" / "model.safetensors"
    tensors = load_file(file)
    name = "decoder.layers.3.mlp.linear_fc2.weight"

    def refused(changed, error=UserError):
        save_file(changed, file)
        with pytest.raises(error) as caught:
            to_hf(tmp_path / "megatron", tmp_path / "back")
        assert os.listdir(tmp_path) == ["megatron"]
        return str(caught.value)

    others = {n: t for n, t in tensors.items() if n != name}
    assert "holds other parameters than the first rank's" in refused(others)
    assert f"{name}: has shape [24, 32]" in refused(others | {name: tensors[name].T.contiguous()})
    assert "no row of the weight map names this parameter" in refused(others | {"ghost": tensors[name]})
    spoiled = tensors[name].clone()
    spoiled[0, 0] = float("inf")
    text = refused(others | {name: spoiled}, RunError)
    assert "tensor model.layers.3.mlp.down_proj.weight holds NaN or infinite values" in text
    file.write_bytes(b"x")
    with pytest.raises(UserError, match="cannot be read"):
        to_hf(tmp_path / "megatron", tmp_path / "back")
    file.unlink()
    with pytest.raises(UserError, match="missing"):
        to_hf(tmp_path / "megatron", tmp_path / "back")


def test_a_folder_that_is_neither_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds neither manifest\.json nor megatron\.json"):
        to_hf(tmp_path, tmp_path / "out")
    with pytest.raises(UserError, match="there is no such folder"):
        to_hf(tmp_path / "nowhere", tmp_path / "out")


def save_run(run: Path, source: Path, layout: Layout, *, critic: bool = False) -> Path:
    """A train state of an untrained run, as the workers write it (optimizer state left small)."""
    rows, pieces = rows_of(source), []
    begin_state(run, 7)
    for rank in range(layout.world):
        at, state = layout.coordinates(rank), {}
        for role, table in {"actor": rows, **({"critic": critic_map(load_shape(source))} if critic else {})}.items():
            params = empty_params(table, layout.tp)
            body = {name: p for name, p in params.items() if not name.startswith("value_head")}
            load_hf(source, rows, body, tp=layout.tp, tp_rank=at.tp, whole_model=False)
            for name in params.keys() - body.keys():
                params[name].fill_(0.25)
            held = stage_layers(rows.shape.layers, layout.pp, layout.vpp)[at.pp]
            keep = tuple(f"decoder.layers.{i}." for chunk in held for i in chunk)
            last = at.pp == layout.pp - 1
            keep += ("embedding",) if at.pp == 0 or (last and table.shape.tied) else ()
            keep += ("decoder.final", "output_layer", "value_head") if last else ()
            weights = {name: p for name, p in params.items() if name.startswith(keep)}
            state[role] = {"weights": weights, "training": {"step": 7, "moments": torch.zeros(3)}}
        state["torch_rng"] = torch.get_rng_state()
        pieces += save_state(run, 7, rank, layout.world, state, {"step": 7} if rank == 0 else None)
    trained = ["actor", "critic"] if critic else ["actor"]
    folder = commit_state(run, 7, layout, pieces, {"trained": trained})
    save_config(load_config(None, [f"model.path={source}", f"trainer.run_dir={run}"]), run / "config.yaml")
    return folder


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(tp=2, dp=2), Layout(pp=3), Layout(tp=4, pp=2), Layout(pp=2, vpp=2)],
    ids=str,
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_of_a_run_becomes_the_model_it_started_from(originals, tmp_path, layout, tied):
    checkpoint = save_run(tmp_path / "run", originals[tied], layout)
    made = to_hf(checkpoint, tmp_path / "out")
    assert made.source == originals[tied]
    same(originals[tied], tmp_path / "out")


def test_trained_weights_are_what_comes_out(originals, tmp_path):
    checkpoint = save_run(tmp_path / "run", originals[True], Layout())
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (entry,) = (entry for entry in manifest["files"] if entry["name"].startswith("rank"))
    file = checkpoint / entry["name"]
    state = torch.load(file, weights_only=True)
    state["actor"]["weights"]["decoder.final_layernorm.weight"].fill_(3.0)
    torch.save(state, file)
    with pytest.raises(UserError, match="damaged"):  # its recorded hash is another one
        to_hf(checkpoint, tmp_path / "out")
    run = tmp_path / "again"
    begin_state(run, 1)
    files = save_state(run, 1, 0, 1, state, {"step": 1})
    folder = commit_state(run, 1, Layout(), files, {"trained": ["actor"]})
    with pytest.raises(UserError, match="name the Hugging Face folder that the run started from with --model"):
        to_hf(folder, tmp_path / "out")  # it has no config.yaml
    to_hf(folder, tmp_path / "out", model=originals[True])
    assert bool((tensors_of(tmp_path / "out")["model.norm.weight"] == 3.0).all())


def test_the_critic_of_a_run_becomes_a_token_classification(originals, tmp_path):
    checkpoint = save_run(tmp_path / "run", originals[True], Layout(tp=2), critic=True)
    to_hf(checkpoint, tmp_path / "out", role="critic")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForTokenClassification"]
    got = tensors_of(tmp_path / "out")
    assert got["score.weight"].shape == (1, 32)
    assert bool((got["score.weight"] == 0.25).all())
    assert "lm_head.weight" not in got
    with pytest.raises(UserError, match="the run trained no critic, only actor"):
        to_hf(save_run(tmp_path / "other", originals[True], Layout()), tmp_path / "no", role="critic")


def test_a_model_that_moved_is_named(originals, tmp_path):
    source = shutil.copytree(originals[True], tmp_path / "model")
    checkpoint = save_run(tmp_path / "run", source, Layout())
    source.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"(?s)no longer at .*--model"):
        to_hf(checkpoint, tmp_path / "out")
    to_hf(checkpoint, tmp_path / "out", model=tmp_path / "moved")
    same(tmp_path / "moved", tmp_path / "out")


def test_another_model_than_the_runs_is_refused(originals, tmp_path):
    checkpoint = save_run(tmp_path / "run", originals[True], Layout())
    other = make_checkpoint(tmp_path / "other", layers=2)
    with pytest.raises(UserError, match="no row of the weight map names this parameter"):
        to_hf(checkpoint, tmp_path / "out", model=other)
    with pytest.raises(UserError, match=r"no stage has a parameter for lm_head\.weight"):
        to_hf(checkpoint, tmp_path / "out", model=originals[False])


def run(capsys, *words):
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command(originals, tmp_path, capsys):
    code, out, _ = run(capsys, "convert", "to-megatron", originals[True], tmp_path / "m", "--tp", 2, "--pp", 2)
    assert code == 0
    assert "62 tensors" in out
    assert "to tp 2 x pp 2" in out
    code, out, _ = run(capsys, "convert", "to-hf", tmp_path / "m", tmp_path / "h", "--shard-size", "1MB", "--json")
    assert code == 0
    document = json.loads(out)
    assert (document["tp"], document["pp"], document["tensors"]) == (2, 2, 62)
    same(originals[True], tmp_path / "h")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["to-hf", "nowhere", "out"], "there is no such folder"),
        (["to-hf", "nowhere", "out", "--shard-size", "5"], "'5' is no size"),
        (["to-hf", "nowhere", "out", "--shard-size", "0GB"], "'0GB' is no size"),
        (["to-megatron", "nowhere", "out", "--tp", "0", "--pp", "-1"], "--pp: must be at least 1, got -1"),
        (["to-megatron", "nowhere", "out", "--tp", "x"], "invalid int value: 'x'"),
        (["verify", "nowhere"], "there is no such folder"),
        (["verify"], "the following arguments are required: HF"),
    ],
)
def test_wrong_input_is_exit_code_2(tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "convert", *words)
    assert (code, out) == (2, "")
    assert message in err


def test_a_model_that_is_not_supported_is_exit_code_2(tmp_path, capsys):
    source = make_checkpoint(tmp_path / "in")
    change_config(source, architectures=["Qwen3MoeForCausalLM"])
    code, _, err = run(capsys, "convert", "verify", source)
    assert code == 2
    assert "mixture-of-experts architecture Qwen3MoeForCausalLM" in err
