from megaverl.commands import doctor
from megaverl.parallel.device import Hardware


def by_name(findings):
    return {finding.what: finding for finding in findings}


def test_the_choice_of_kernels_comes_with_its_reason_and_what_a_faster_one_needs(monkeypatch):
    monkeypatch.setattr(Hardware, "here", classmethod(lambda cls: Hardware((9, 0), missing={"te": "TE: no such file"})))
    found = by_name(doctor.kernels())
    assert found["kernels"].found == "flash, bfloat16"
    assert "TE: no such file" in found["kernels"].note
    assert "megaverl[te]" in found["faster kernels"].note
    assert "torch wheel" not in found


def test_nothing_faster_than_transformer_engine_is_offered(monkeypatch):
    monkeypatch.setattr(Hardware, "here", classmethod(lambda cls: Hardware((9, 0))))
    assert list(by_name(doctor.kernels())) == ["kernels"]


def test_for_a_pascal_card_the_torch_wheels_that_carry_it_are_named(monkeypatch):
    monkeypatch.setenv("MEGAVERL_CAPABILITY", "6.1")
    found = by_name(doctor.kernels())
    assert found["kernels"].found == "eager, float32"
    assert "8.0 or newer" in found["faster kernels"].note
    assert "CUDA 12.6" in found["torch wheel"].note
    assert found["MEGAVERL_CAPABILITY"].found == "6.1"


def test_a_torch_that_cannot_run_on_the_gpu_is_wrong(monkeypatch):
    broken = Hardware((6, 1), wheel="this torch has no code for compute capability 6.1 (it has sm_75)")
    monkeypatch.setattr(Hardware, "here", classmethod(lambda cls: broken))
    (finding,) = doctor.kernels()
    assert finding.state == "wrong"
    assert "no code for compute capability 6.1" in finding.note
    assert "CUDA 12.6" in finding.note
