import pytest
import torch
from torch import nn

from megaverl.errors import RunError
from megaverl.models.family import weight_map
from megaverl.parallel.layout import Layout
from megaverl.resharding.binding import bind, check_binding, rollout_tensors
from megaverl.resharding.planner import make_plan
from tests.unit.resharding.test_plan import TINY

TABLE = weight_map(TINY)
PLAN = make_plan(TABLE, Layout(), 1).ranks[0]


def training():
    return {row.megatron: nn.Parameter(torch.rand(TABLE.local_shape(row, 1))) for row in TABLE.expand()}


def rollout_model():
    """A module with vLLM's parameter names and shapes."""
    root = nn.Module()
    for entry in PLAN.entries:
        *path, leaf = entry.vllm.split(".")
        module = root
        for name in path:
            if not hasattr(module, name):
                module.add_module(name, nn.Module())
            module = getattr(module, name)
        module.register_parameter(leaf, nn.Parameter(torch.zeros(entry.shape), requires_grad=False))
    return root


def test_what_is_not_aliased_gets_storage_of_its_own():
    plan = make_plan(TABLE, Layout(tp=2), 1).ranks[1]
    params = {row.megatron: nn.Parameter(torch.rand(TABLE.local_shape(row, 2))) for row in TABLE.expand()}
    tensors = rollout_tensors(plan, params)
    norm, down = "decoder.final_layernorm.weight", "model.layers.0.mlp.down_proj.weight"
    assert tensors["model.norm.weight"].data_ptr() == params[norm].data_ptr()
    assert tensors[down].shape == (128, 256)
    train = {p.data_ptr() for p in params.values()}
    own = [t for t in tensors.values() if t.data_ptr() not in train]
    assert sum(t.numel() * 4 for t in own) == plan.bytes_moved == plan.peak_extra_bytes
    model = rollout_model()
    bind(model, tensors)
    assert check_binding(model, tensors).bytes_added == 0


@pytest.fixture
def bound():
    params, model = training(), rollout_model()
    tensors = rollout_tensors(PLAN, params)
    bind(model, tensors)
    return params, model, tensors


def test_binding_shares_storage_and_in_place_updates_are_seen(bound):
    params, model, tensors = bound
    objects = dict(model.named_parameters())
    report = check_binding(model, tensors)
    assert (report.parameters, report.bytes_added) == (len(PLAN.entries), 0)
    assert report.bytes_bound == PLAN.bytes_aliased
    with torch.no_grad():
        params["output_layer.weight"].fill_(3.0)
    assert model.lm_head.weight is objects["lm_head.weight"]
    assert bool((model.lm_head.weight == 3.0).all())
    check_binding(model, tensors)


def test_parameters_under_an_alternative_name_are_found():
    params = training()
    for layer in range(TINY.layers):
        name = f"decoder.layers.{layer}.input_layernorm.weight"
        params[f"decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight"] = params.pop(name)
    assert len(rollout_tensors(PLAN, params)) == len(PLAN.entries)


def test_what_plan_and_training_model_do_not_share_is_named():
    params = training()
    params["decoder.layers.9.extra"] = nn.Parameter(torch.zeros(1))
    del params["decoder.final_layernorm.weight"]
    params["output_layer.weight"] = nn.Parameter(torch.zeros(1030, 128))
    params["embedding.word_embeddings.weight"] = nn.Parameter(torch.zeros(1088, 128, dtype=torch.float64))
    with pytest.raises(RunError) as caught:
        rollout_tensors(PLAN, params)
    text = str(caught.value)
    assert "decoder.layers.9.extra: no row" in text
    assert "decoder.final_layernorm.weight: the training model has no such" in text
    assert "output_layer.weight: shape (1030, 128), the plan says (1088, 128)" in text
    assert "embedding.word_embeddings.weight: 8 bytes per element (torch.float64), the plan says 4" in text


def test_bind_changes_nothing_when_names_shapes_or_dtypes_differ():
    model, tensors = rollout_model(), rollout_tensors(PLAN, training())
    model.model.norm.register_parameter("bias", nn.Parameter(torch.zeros(3)))
    model.lm_head.weight.data = torch.zeros(4, 4)
    model.model.norm.weight.data = torch.zeros(128, dtype=torch.float64)
    del model.model.embed_tokens.weight
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    with pytest.raises(RunError) as caught:
        bind(model, tensors)
    for part in (
        "model.norm.bias: the plan does not name",
        "lm_head.weight: shape is (4, 4)",
        "model.norm.weight: dtype is torch.float64",
        "model.embed_tokens.weight: vLLM's model has no such",
    ):
        assert part in str(caught.value)
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}


def spoil_pointer(weight):
    return weight.clone()


def spoil_stride(weight):
    return weight.as_strided(weight.shape, (1, weight.shape[0]))


def spoil_shape(weight):
    return weight[:-1]


@pytest.mark.parametrize(
    ("spoil", "word"), [(spoil_pointer, "data_ptr"), (spoil_stride, "stride"), (spoil_shape, "shape")]
)
def test_a_parameter_that_is_no_longer_the_training_tensor_is_named(bound, spoil, word):
    _, model, tensors = bound
    weight = model.model.layers.get_submodule("1").mlp.down_proj.weight
    weight.data = spoil(weight.data)
    with pytest.raises(RunError, match=rf"layers\.1\.mlp\.down_proj\.weight: {word}"):
        check_binding(model, tensors)


def test_a_packed_layer_is_refused(bound):
    _, model, tensors = bound
    with pytest.raises(RunError, match=r"lm_head: vLLM packed"):
        check_binding(model, tensors, packed=["lm_head"])
