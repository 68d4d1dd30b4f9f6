import json
import os
import pickle
import shutil

import pytest
import torch

from megaverl.checkpoint import hf_files, hf_import
from megaverl.checkpoint.hf_import import check_checkpoint, load_hf
from megaverl.errors import Problems, UserError
from tests.unit.checkpoint.tiny import (
    change_config,
    empty_params,
    expected_params,
    make_checkpoint,
    rewrite,
    rows_of,
    tensors_of,
)

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="session")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("originals")
    return {tied: make_checkpoint(folder / str(tied), tied=tied) for tied in (True, False)}


@pytest.fixture
def tied(originals, tmp_path):
    return shutil.copytree(originals[True], tmp_path / "tied")


@pytest.fixture
def untied(originals, tmp_path):
    return shutil.copytree(originals[False], tmp_path / "untied")


def problems_of(folder):
    problems = Problems()
    check_checkpoint(folder, problems)
    return [str(p) for p in problems.found]


def load(folder, tp=1, tp_rank=0, dtype=torch.float32):
    rows = rows_of(folder)
    params = empty_params(rows, tp, dtype)
    load_hf(folder, rows, params, tp=tp, tp_rank=tp_rank)
    return params


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("band", [64 * 1024**2, 600])
def test_every_rank_gets_its_share_bit_for_bit(originals, is_tied, tp, band, monkeypatch):
    monkeypatch.setattr(hf_import, "BAND_BYTES", band)  # 600 bytes: two rows of 32 at a time
    folder = originals[is_tied]
    assert problems_of(folder) == []
    for rank in range(tp):
        got = load(folder, tp, rank)
        want = expected_params(tensors_of(folder), tp, rank, tied=is_tied)
        assert got.keys() == want.keys()
        for name in want:
            assert torch.equal(got[name], want[name]), name


def test_sharded_checkpoints_load_alike(originals, tmp_path):
    sharded = make_checkpoint(tmp_path / "sharded", tied=True, shard="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    one, many = load(originals[True]), load(sharded)
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_names_of_transformer_engine_are_filled(tied):
    rows = rows_of(tied)
    params = empty_params(rows, 1)
    te, local = "decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.0.pre_mlp_layernorm.weight"
    params[te] = params.pop(local)
    load_hf(tied, rows, params, tp=1, tp_rank=0)
    assert torch.equal(params[te], tensors_of(tied)["model.layers.0.post_attention_layernorm.weight"])


def test_one_stage_of_a_pipeline_is_filled_alone(tied):
    rows = rows_of(tied)
    stage = {k: v for k, v in empty_params(rows, 1).items() if k.startswith(("decoder.layers.1.", "decoder.final"))}
    load_hf(tied, rows, stage, tp=1, tp_rank=0, whole_model=False)
    want = expected_params(tensors_of(tied), 1, 0, tied=True)
    assert all(torch.equal(value, want[name]) for name, value in stage.items())


def test_a_shorter_type_is_rounded_to_nearest(tied):
    half = load(tied, dtype=torch.float16)
    want = expected_params(tensors_of(tied), 1, 0, tied=True)
    assert all(torch.equal(half[name], want[name].half()) for name in want)


def test_values_that_overflow_the_type_are_refused(tied):
    rewrite(tied, lambda t: t[UP][0].fill_(1e6))
    with pytest.raises(UserError, match=rf"{UP}: holds values that do not fit into torch\.float16"):
        load(tied, dtype=torch.float16)


# Case 2: a name that has no row, or a row that no tensor fills, must not leave random weights behind.
def test_case_2_a_deleted_tensor_is_refused_by_name(tied):
    rewrite(tied, lambda t: t.pop(UP))
    assert problems_of(tied) == [f"{tied}: tensor {UP} is missing\n    -> take a complete checkpoint"]
    with pytest.raises(UserError, match=f"tensor {UP} is missing"):
        load(tied)


def test_case_2_a_renamed_tensor_is_missing_and_unknown(tied):
    rewrite(tied, lambda t: t.update({UP + "2": t.pop(UP)}))
    found = problems_of(tied)
    assert len(found) == 2
    assert f"tensor {UP} is missing" in found[0]
    assert f"tensor {UP}2 belongs to no part of a qwen2 model of 2 layers" in found[1]
    with pytest.raises(UserError, match="belongs to no part"):
        load(tied)


def test_case_2_a_layer_more_than_the_config_says(tied):
    change_config(tied, num_hidden_layers=1, layer_types=["full_attention"])
    assert len(problems_of(tied)) == 12
    with pytest.raises(UserError, match=r"model\.layers\.1\.self_attn\.q_proj\.bias belongs to no part"):
        load(tied)


def test_case_2_a_parameter_without_a_row_and_a_row_without_a_parameter(tied):
    rows = rows_of(tied)
    params = empty_params(rows, 1)
    params["decoder.layers.0.mlp.router.weight"] = params.pop("decoder.layers.0.mlp.linear_fc2.weight")
    with pytest.raises(UserError) as caught:
        load_hf(tied, rows, params, tp=1, tp_rank=0)
    text = str(caught.value)
    assert "decoder.layers.0.mlp.router.weight: no row" in text
    assert "decoder.layers.0.mlp.linear_fc2.weight: the model has no parameter for model.layers.0.mlp.down_proj" in text


def test_a_parameter_of_another_tp_is_refused(tied):
    rows = rows_of(tied)
    with pytest.raises(UserError, match=r"has shape \[128, 32\]; with tensor parallel size 2 it must be \[64, 32\]"):
        load_hf(tied, rows, empty_params(rows, 1), tp=2, tp_rank=0)


def test_a_mis_shaped_tensor_is_refused_by_name(tied):
    rewrite(tied, lambda t: t.update({UP: t[UP].T.contiguous()}))
    (found,) = problems_of(tied)
    assert f"tensor {UP}: has shape [32, 48], config.json makes it [48, 32]" in found
    with pytest.raises(UserError, match="has shape"):
        load(tied)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_are_refused_by_name_on_the_rank_that_holds_them(tied, bad):
    rewrite(tied, lambda t: t[UP][30].fill_(bad))
    assert problems_of(tied) == []  # headers do not show it
    load(tied, tp=2, tp_rank=0)  # row 30 of 48 is on the other rank
    with pytest.raises(UserError, match=f"tensor {UP}: holds NaN or infinite values"):
        load(tied, tp=2, tp_rank=1)


def test_an_integer_tensor_is_refused(tied):
    rewrite(tied, lambda t: t.update({UP: t[UP].to(torch.int8)}))
    (found,) = problems_of(tied)
    assert f"tensor {UP}: has type I8" in found


# Case 1: tied models have no lm_head.weight; a name map that ignores tying scores 0 at step 0.
def test_case_1_an_untied_model_without_head_is_refused(untied):
    rewrite(untied, lambda t: t.pop("lm_head.weight"))
    (found,) = problems_of(untied)
    assert "tensor lm_head.weight is missing" in found
    assert "set tie_word_embeddings to true" in found


def test_case_1_a_tied_model_may_bring_its_embedding_as_head(tied):
    rewrite(tied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert problems_of(tied) == []
    want = expected_params(tensors_of(tied), 1, 0, tied=True)
    got = load(tied)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("rank", [0, 1])
def test_case_1_a_tied_model_with_another_head_is_refused(tied, rank):
    def other_head(t):
        t["lm_head.weight"] = t["model.embed_tokens.weight"].clone()
        t["lm_head.weight"][70 * rank, 3] += 1e-3

    rewrite(tied, other_head)
    with pytest.raises(UserError, match=r"lm_head\.weight: differs from model\.embed_tokens\.weight"):
        load(tied, tp=2, tp_rank=rank)


def test_no_weights_at_all(tied):
    (tied / "model.safetensors").unlink()
    (found,) = problems_of(tied)
    assert "holds neither model.safetensors nor pytorch_model.bin, nor the index" in found
    (tied / "weights.gguf").write_bytes(b"x")
    assert "but weights.gguf" in problems_of(tied)[0]


def test_a_truncated_file_is_named(tied):
    file = tied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    (found,) = problems_of(tied)
    assert found.startswith(f"{file}: cannot be read")
    with pytest.raises(UserError, match="cannot be read"):
        load(tied)


@pytest.fixture
def sharded(tmp_path):
    return make_checkpoint(tmp_path / "sharded", shard="20KB")


def test_a_missing_shard_is_named(sharded):
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    (found,) = problems_of(sharded)
    assert found.startswith(f"{gone}: missing")


def test_an_index_that_contradicts_its_files(sharded):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    file = content["weight_map"].pop(UP)
    content["weight_map"]["model.ghost.weight"] = file
    index.write_text(json.dumps(content))
    found = [problem.partition("\n")[0] for problem in problems_of(sharded)]
    assert found == [
        f"{sharded / file}: tensor model.ghost.weight is not in it, although the index says so",
        f"{sharded / file}: tensor {UP} is in it, but the index does not say so",
    ]


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {"a": "../b.safetensors"}}'])
def test_an_unreadable_index_is_named(sharded, content):
    index = sharded / "model.safetensors.index.json"
    index.write_text(content)
    (found,) = problems_of(sharded)
    assert found.startswith(f"{index}: cannot be read")


def test_two_checkpoints_in_one_folder(sharded, tied):
    shutil.copy(tied / "model.safetensors", sharded)
    (found,) = problems_of(sharded)
    assert "holds both" in found


def test_a_bad_config_is_reported_with_the_rest(tied):
    change_config(tied, architectures=["Qwen2MoeForCausalLM"])
    (found,) = problems_of(tied)
    assert "mixture-of-experts" in found


def as_bin(folder, files=1):
    """Replaces the safetensors of a checkpoint by ``.bin`` files, as older transformers wrote them."""
    tensors = tensors_of(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    if files == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return tensors
    names, placed = sorted(tensors), {}
    for i in range(files):
        file = f"pytorch_model-{i + 1:05d}-of-{files:05d}.bin"
        part = {name: tensors[name] for name in names[i::files]}
        torch.save(part, folder / file)
        placed.update(dict.fromkeys(part, file))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return tensors


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("mapped", [64 * 1024**2, 500])  # 500 bytes: a new mapping at almost every block
def test_bin_files_load_bit_for_bit(untied, files, tp, mapped, monkeypatch):
    monkeypatch.setattr(hf_files, "MAPPED_BYTES", mapped)
    tensors = as_bin(untied, files)
    assert problems_of(untied) == []
    for rank in range(tp):
        got, want = load(untied, tp, rank), expected_params(tensors, tp, rank, tied=False)
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_case_2_a_bin_with_one_tensor_deleted_renamed_transposed_or_nan_is_refused_by_name(untied):
    tensors = as_bin(untied)

    def refused(changed):
        torch.save(changed, untied / "pytorch_model.bin")
        with pytest.raises(UserError) as caught:
            load(untied)
        return str(caught.value)

    others = {name: t for name, t in tensors.items() if name != UP}
    assert f"tensor {UP} is missing" in refused(others)
    text = refused(others | {UP + "x": tensors[UP]})
    assert f"tensor {UP} is missing" in text
    assert f"tensor {UP}x belongs to no part" in text
    assert f"tensor {UP}: has shape [32, 48]" in refused(others | {UP: tensors[UP].T})
    spoiled = tensors[UP].clone()
    spoiled[3, 5] = float("nan")
    assert f"tensor {UP}: holds NaN or infinite values" in refused(others | {UP: spoiled})
    assert f"entry {UP} is no plain tensor" in refused(others | {UP: [1, 2]})
    assert "holds a list instead of tensors by name" in refused([1])


class Runs:
    """Unpickling it would make a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_bin_that_would_run_code_is_refused_and_nothing_runs(untied, tmp_path, zipped):
    tensors, trace = as_bin(untied), tmp_path / "it-ran"
    file = untied / "pytorch_model.bin"
    torch.save({**tensors, "payload": Runs(trace)}, file, _use_new_zipfile_serialization=zipped)
    (found,) = problems_of(untied)
    assert found.startswith(f"{file}: ")
    if zipped:
        assert "running code from a checkpoint is refused" in found
    with pytest.raises(UserError, match=r"pytorch_model\.bin"):
        load(untied)
    assert not trace.exists()
    torch.load(file, weights_only=False)  # the trap works: this is what must never be called
    assert trace.exists()


def test_a_plain_pickle_is_refused_and_nothing_runs(untied, tmp_path):
    as_bin(untied)
    trace = tmp_path / "it-ran"
    (untied / "pytorch_model.bin").write_bytes(pickle.dumps(Runs(trace)))
    assert "pytorch_model.bin: cannot be read" in problems_of(untied)[0]
    assert not trace.exists()


def test_code_in_the_folder_is_never_used(untied, tmp_path):
    trace = tmp_path / "it-ran"
    code = f"import os\nos.mkdir({str(trace)!r})\n"
    for name in ("modeling_own.py", "configuration_own.py", "tokenization_own.py", "__init__.py"):
        (untied / name).write_text(code)
    change_config(
        untied,
        auto_map={
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
            "AutoTokenizer": ["tokenization_own.OwnTokenizer", None],
        },
    )
    assert problems_of(untied) == []
    load(untied)
    assert not trace.exists()


def test_safetensors_are_read_where_both_formats_are(tied):
    torch.save({"other": torch.zeros(1)}, tied / "pytorch_model.bin")
    assert problems_of(tied) == []
    load(tied)


def llama(folder, dtype=torch.float32, **scaling):
    """A Llama checkpoint with the rotary frequencies as tensors, as those of Llama 2 have them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=100, max_position_embeddings=64, **sizes, **scaling)).to(dtype)
    frequencies = model.model.rotary_emb.inv_freq.clone().to(dtype)
    model.save_pretrained(folder)
    names = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(2)]
    rewrite(folder, lambda t: t.update({name: frequencies.clone() for name in names}))
    return names


LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("scaling", [{}, LINEAR], ids=str)
def test_rotary_frequencies_in_the_files_are_checked_and_left_out(tmp_path, half, scaling):
    names = llama(tmp_path, torch.float16 if half else torch.float32, **scaling)
    assert problems_of(tmp_path) == []
    load(tmp_path)
    rewrite(tmp_path, lambda t: t[names[1]].mul_(1.1))
    with pytest.raises(UserError, match=rf"{names[1]}: is not what config\.json"):
        load(tmp_path)


def test_rotary_frequencies_of_another_shape_or_family_are_refused(tmp_path, tied):
    names = llama(tmp_path)
    rewrite(tmp_path, lambda t: t.update({names[0]: torch.zeros(3)}))
    (found,) = problems_of(tmp_path)
    assert f"tensor {names[0]}: has shape [3], config.json makes it [16]" in found
    rewrite(tied, lambda t: t.update({names[0]: torch.zeros(16)}))
    assert f"tensor {names[0]} belongs to no part of a qwen2 model" in problems_of(tied)[0]
