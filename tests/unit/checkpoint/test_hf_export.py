import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megaverl.checkpoint import hf_writer
from megaverl.checkpoint.hf_export import ModelRanks, check_export_dir, export_hf
from megaverl.checkpoint.hf_import import load_hf
from megaverl.checkpoint.shard_writer import ShardedWriter, TensorSpec, plan_shards
from megaverl.errors import Problems, RunError, UserError
from tests.unit.checkpoint.tiny import change_config, empty_params, make_checkpoint, rewrite, rows_of, tensors_of


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("source") / "model", tied=True)


def imported(source, dtype=torch.float32):
    rows = rows_of(source)
    params = empty_params(rows, 1, dtype)
    load_hf(source, rows, params, tp=1, tp_rank=0)
    return params, rows


def export(source, out, params=None, **more):
    loaded, rows = imported(source)
    export_hf(params or loaded, rows, out, ModelRanks(), source=source, **more)


def same_tensors(a, b):
    a, b = tensors_of(a), tensors_of(b)
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("band", [64 * 1024**2, 600])
def test_an_untrained_import_comes_out_bit_equal(tmp_path, tied, dtype, band, monkeypatch):
    monkeypatch.setattr(hf_writer, "BAND_BYTES", band)  # 600 bytes: two rows of 32 at a time
    source = make_checkpoint(tmp_path / "in", tied=tied, dtype=dtype)
    export(source, tmp_path / "deep" / "out")  # through float32 parameters
    out = tmp_path / "deep" / "out"
    assert same_tensors(source, out)
    assert sorted(os.listdir(out)) == sorted(os.listdir(source))
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert os.listdir(out.parent) == ["out"]


def test_several_shards_have_an_index_that_transformers_reads(source, tmp_path):
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    export(source, out, max_shard_bytes=20_000)
    files = sorted(p.name for p in out.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    tensors = tensors_of(source)
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tensors.values())
    assert index["metadata"]["total_parameters"] == sum(t.numel() for t in tensors.values())
    for name, file in index["weight_map"].items():
        with safe_open(out / file, framework="pt") as f:
            assert torch.equal(f.get_tensor(name), tensors[name])
    ids = torch.arange(9)[None]
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(source)(ids).logits
        got = AutoModelForCausalLM.from_pretrained(out)(ids).logits
    assert torch.equal(got, want)


def test_changed_parameters_are_what_is_written(source, tmp_path):
    params, _ = imported(source)
    params["decoder.layers.0.mlp.linear_fc1.weight"][50] = 5.0  # row 2 of up: gate has 48
    export(source, tmp_path / "out", params)
    got, before = tensors_of(tmp_path / "out"), tensors_of(source)
    changed = [name for name in before if not torch.equal(got[name], before[name])]
    assert changed == ["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(got[changed[0]][2], torch.full((32,), 5.0))


def test_another_type_is_said_in_the_config(source, tmp_path):
    out = tmp_path / "out"
    export(source, out, dtype=torch.float16)
    tensors = tensors_of(source)
    assert all(torch.equal(t, tensors[name].half()) for name, t in tensors_of(out).items())
    before, after = (json.loads((d / "config.json").read_text()) for d in (source, out))
    assert after.pop("dtype") == "float16"
    assert before.pop("dtype") == "float32"
    assert after == before
    export(source, tmp_path / "same", dtype=torch.float32)
    assert (tmp_path / "same" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_the_old_key_of_the_type_is_kept(tmp_path):
    source = make_checkpoint(tmp_path / "in")
    config = json.loads((source / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    (source / "config.json").write_text(json.dumps(config))
    export(source, tmp_path / "out", dtype=torch.float16)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config | {"torch_dtype": "float16"}


def test_a_tied_models_own_copy_of_the_head_is_left_out(tmp_path):
    source = make_checkpoint(tmp_path / "in")
    rewrite(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    export(source, tmp_path / "out")
    assert set(tensors_of(source)) - set(tensors_of(tmp_path / "out")) == {"lm_head.weight"}


def test_the_tokenizer_may_come_from_another_folder(source, tmp_path):
    other = tmp_path / "tokenizer"
    other.mkdir()
    (other / "tokenizer.json").write_text("other")
    export(source, tmp_path / "out", tokenizer=other)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "other"
    assert not (tmp_path / "out" / "tokenizer_config.json").exists()


def test_nothing_is_overwritten(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    export(source, out)  # an empty folder is fine
    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        export(source, out)
    assert {p.name: p.stat().st_mtime_ns for p in out.iterdir()} == before
    file = tmp_path / "file"
    file.write_text("mine")
    problems = Problems()
    check_export_dir(file, problems)
    check_export_dir(tmp_path / "new", problems)
    assert [p.where for p in problems.found] == [str(file)]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_non_finite_parameters_are_not_exported(source, tmp_path, value):
    params, _ = imported(source)
    params["decoder.final_layernorm.weight"][3] = value
    with pytest.raises(RunError, match=r"tensor model\.norm\.weight holds NaN or infinite values"):
        export(source, tmp_path / "out", params)
    assert os.listdir(tmp_path) == []


def test_an_overflow_of_the_asked_type_is_not_exported(source, tmp_path):
    params, _ = imported(source)
    params["decoder.final_layernorm.weight"][3] = 1e6
    with pytest.raises(RunError, match=r"model\.norm\.weight holds NaN or infinite values in torch\.float16"):
        export(source, tmp_path / "out", params, dtype=torch.float16)


def test_a_missing_parameter_is_refused(source, tmp_path):
    params, _ = imported(source)
    del params["decoder.layers.1.self_attention.linear_qkv.bias"]
    with pytest.raises(UserError, match=r"no parameter for model\.layers\.1\.self_attn\.q_proj\.bias"):
        export(source, tmp_path / "out", params)


def test_a_source_that_is_gone_is_refused_by_name(tmp_path):
    source = make_checkpoint(tmp_path / "in")
    params, rows = imported(source)
    (source / "config.json").unlink()
    (source / "model.safetensors").unlink()
    with pytest.raises(UserError) as caught:
        export_hf(params, rows, tmp_path / "out", ModelRanks(), source=source)
    assert len(caught.value.problems) == 2
    assert not (tmp_path / "out").exists()


def test_an_unwritable_place_is_refused(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="not a folder that can be written to"):
        export(source, tmp_path / "file" / "out")


def test_a_full_disk_is_a_failed_run(source, tmp_path):
    """The kernel refuses to let the file grow, as it does on a full disk."""
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(RunError, match="could not be written"):
            export(source, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not (tmp_path / "out").exists()


def test_config_of_another_model_keeps_the_source(tmp_path):
    source = make_checkpoint(tmp_path / "in")
    change_config(source, my_own_key={"a": [1, "ü"]})
    export(source, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_shards_are_filled_in_order_and_a_large_tensor_stands_alone():
    specs = [TensorSpec(str(i), "F32", (n,)) for i, n in enumerate([1, 1, 1, 9, 1])]
    assert [[s.name for s in shard] for shard in plan_shards(specs, 8)] == [["0", "1"], ["2"], ["3"], ["4"]]


def test_mixed_types_are_aligned_and_may_come_in_any_order(tmp_path):
    specs = [TensorSpec("h", "F16", (3,)), TensorSpec("f", "F32", (2, 2)), TensorSpec("d", "F64", (1,))]
    values = {
        "h": torch.tensor([1.0, 2.0, 3.0]).half(),
        "f": torch.arange(4.0).view(2, 2).T,  # not contiguous
        "d": torch.tensor([1 / 3], dtype=torch.float64),
    }
    writer = ShardedWriter(tmp_path, specs, 10**6)
    for name in ("d", "h", "f"):
        writer.write(name, values[name].split(2))
    writer.finish()
    got = tensors_of(tmp_path)
    assert all(torch.equal(got[name], value) and got[name].dtype == value.dtype for name, value in values.items())


def test_the_writer_refuses_what_was_not_announced(tmp_path):
    writer = ShardedWriter(tmp_path, [TensorSpec("a", "F32", (2,)), TensorSpec("b", "F32", (2,))], 10**6)
    for blocks in ([torch.zeros(3)], [torch.zeros(2).half()], [torch.zeros(2, 1)], [torch.zeros(1)] * 3):
        with pytest.raises(ValueError, match="is no part of the announced"):
            writer.write("a", blocks)
    with pytest.raises(ValueError, match="1 rows are not all"):
        writer.write("a", [torch.zeros(1)])
    writer.write("a", [torch.zeros(1), torch.zeros(1)])
    with pytest.raises(ValueError, match="written twice"):
        writer.write("a", [torch.zeros(2)])
    with pytest.raises(ValueError, match="never written: b"):
        writer.finish()
    writer.abort()


SHARED_MODEL = Path(__file__).parents[3].parent / "shared" / "assets" / "tiny-qwen2-arith"


@pytest.mark.skipif(not SHARED_MODEL.is_dir(), reason="needs the shared assets beside the repository")
def test_a_trained_checkpoint_with_its_tokenizer_comes_out_the_same(tmp_path):
    export(SHARED_MODEL, tmp_path / "out")
    assert same_tensors(SHARED_MODEL, tmp_path / "out")
    others = {p.name for p in SHARED_MODEL.iterdir()} - {"model.safetensors"}
    assert others == {p.name for p in (tmp_path / "out").iterdir()} - {"model.safetensors"}
    assert all((tmp_path / "out" / name).read_bytes() == (SHARED_MODEL / name).read_bytes() for name in others)
