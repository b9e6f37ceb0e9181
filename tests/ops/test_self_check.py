"""`auto` takes a backend only after it was right on the device; wrong ones are caught by that and by the doctor."""

import json
from collections import Counter
from functools import partial

import pytest
import torch

import klformer
from klformer.errors import ArgumentError
from klformer.ops import near
from klformer.ops.spectral_product import BACKENDS, FusedBackend, dispatch, self_check
from klformer.testing import doctor

CPU = torch.device("cpu")


class Spoilt(FusedBackend):
    """What `chunked` gives, but for one mistake."""

    priority = 50

    def __init__(self, mistake=None):
        self.mistake, self.calls = mistake, 0

    def supports(self, call):
        return None if call.feature_map.name == "prf" else "it is for prf"

    def empty_kept(self, call):
        return BACKENDS["chunked"].empty_kept(call)

    def forward(self, call, *, keep):
        self.calls += 1
        if self.mistake == "raises":
            raise RuntimeError("out of shared memory\nand much more")
        found = BACKENDS["chunked"].forward(call, keep=keep)
        if self.mistake == "causal" and call.step == "causal":
            found[0] = found[0] * 1.01
        if self.mistake == "log-sum" and call.step != "absorb":
            found[1] = found[1] + 0.01
        return found

    def backward(self, call, outputs, d_results, needed):
        found = BACKENDS["chunked"].backward(call, outputs, d_results, needed)
        if self.mistake == "gradient" and "omega" in found:
            found["omega"] = found["omega"] * 0.99
        return found


OURS = ("chunked", "flash", "flash_cpu", "flash_half", "plain", "reference", "triton")


@pytest.fixture(autouse=True)
def own_registry(monkeypatch, tmp_path):
    # Other tests register some when they are imported.
    known = {name: backend for name, backend in BACKENDS._entries.items() if name in OURS}
    monkeypatch.setattr(BACKENDS, "_entries", known)
    monkeypatch.setattr(dispatch, "_by_priority", [b for b in dispatch._by_priority if b.name in OURS])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    self_check.is_right.cache_clear()


def registered(mistake=None):
    backend = Spoilt(mistake)
    klformer.register_backend("spoilt", backend)
    return backend


def examine(*arguments):
    doctor.run(doctor.parse(arguments, "klformer doctor"))


def served(feature_map="prf"):
    attention = klformer.build_attention(f"gmm-{feature_map}", num_heads=2, head_dim=8, num_frequencies=4)
    with klformer.record_backends() as names:
        attention(*torch.randn(3, 1, 2, 6, 8))
    return Counter(name for _, name in names.elements())


def test_a_right_backend_is_checked_once_and_remembered(tmp_path, monkeypatch):
    backend = registered()
    assert served().keys() == {"spoilt"}
    in_check = backend.calls
    assert served().keys() == {"spoilt"}
    assert backend.calls - in_check == 2  # absorb and read: nothing was checked again
    (file,) = (tmp_path / "klformer" / "backends").iterdir()
    assert json.loads(file.read_text()) == {"backend": "spoilt", "device": "cpu", "map": "prf"}
    # Another process finds the file; other versions do not.
    self_check.is_right.cache_clear()
    before = backend.calls
    served()
    assert backend.calls - before == 2
    monkeypatch.setattr(torch, "__version__", "0.0")
    monkeypatch.setattr(self_check, "installed", lambda package: "0.0")
    self_check.is_right.cache_clear()
    before = backend.calls
    served()
    assert backend.calls - before > 10


@pytest.mark.parametrize(
    ("mistake", "where"),
    [
        ("causal", r"causal, float32: relative error 1.0e-02 \(result"),
        ("log-sum", "relative error .* allowed 1e-04"),
        ("gradient", r"relative error 1.0e-02 \(gradient of omega\), allowed 1e-03"),
        ("raises", "RuntimeError: out of shared memory;|RuntimeError: out of shared memory\\)"),
    ],
)
def test_a_wrong_backend_is_not_taken_and_told_of_once(mistake, where, recwarn):
    registered(mistake)
    with pytest.warns(RuntimeWarning, match=f"backend 'spoilt' is wrong on cpu.*{where}.*`klformer doctor` says more"):
        assert served().keys() == {"chunked"}
    assert served().keys() == {"chunked"}
    assert not recwarn.list, "one warning is enough"
    found = list(self_check.check(BACKENDS["spoilt"], CPU, oracle="reference"))
    assert any(finding.is_wrong for finding in found)
    assert {finding.refused for finding in found if finding.kernel.startswith("rks")} == {"it is for prf"}
    # Who asks for it gets it.
    with klformer.use_backend("spoilt"):
        if mistake != "raises":
            assert served().keys() == {"spoilt"}


class NearKernels:
    """What takes the place of the module that launches kernels for neighbours: plain operations, and one mistake."""

    def __init__(self, mistake=None):
        self.mistake, self.__file__, self.calls = mistake, near.__file__, 0

    def forward(self, operands, kept, layout):
        self.calls += 1
        with torch.no_grad():
            out, log_sum = near.attend_plainly(operands, kept, layout)
        return out * (1.01 if self.mistake == "result" else 1), log_sum

    def backward(self, operands, kept, layout, results, d_out, d_log_sum):
        given = [None if x is None else x.detach().requires_grad_() for x in operands]
        with torch.enable_grad():
            found = near.attend_plainly(given, kept, layout)
        d_results = (d_out, torch.zeros_like(found[1]) if d_log_sum is None else d_log_sum)
        some = [x for x in given if x is not None]
        gradients = iter(torch.autograd.grad(found, some, d_results, allow_unused=True))
        gradients = [None if x is None else next(gradients) for x in given]
        if self.mistake == "gradient":
            gradients[1] = gradients[1] * 0.99
        return gradients


def near_served(monkeypatch, kernels):
    """How often kernels for neighbours are taken in one call, once they were checked."""
    monkeypatch.setattr(near, "why_not", lambda *given: None)
    monkeypatch.setattr(near, "near_kernels", lambda: kernels)
    self_check.near_is_right.cache_clear()
    q, k, v = torch.randn(3, 1, 2, 20, 8)
    klformer.near_attention(q, k, v, window=2)
    checked = kernels.calls
    out, _ = klformer.near_attention(q, k, v, window=2)
    with klformer.use_backend("plain"):
        torch.testing.assert_close(out, klformer.near_attention(q, k, v, window=2)[0])
    return kernels.calls - checked


def test_kernels_for_neighbours_are_taken_when_they_are_right(monkeypatch, tmp_path):
    assert near_served(monkeypatch, NearKernels()) == 1
    (file,) = (tmp_path / "klformer" / "backends").iterdir()
    assert json.loads(file.read_text()) == {"backend": "triton", "device": "cpu", "map": "near"}


@pytest.mark.parametrize("mistake", ["result", "gradient"])
def test_wrong_kernels_for_neighbours_are_not_taken(mistake, monkeypatch, capsys, tmp_path):
    with pytest.warns(RuntimeWarning, match=rf"backend 'triton' is wrong on cpu .*near, bidirectional.*{mistake}"):
        assert near_served(monkeypatch, NearKernels(mistake)) == 0
    monkeypatch.setattr(doctor, "why_not", lambda *given: None)
    monkeypatch.setattr(doctor, "near_kernels", lambda: NearKernels(mistake))
    monkeypatch.setattr(doctor, "DTYPES", (torch.float32,))
    monkeypatch.setattr(doctor, "BACKENDS", {})
    with pytest.raises(SystemExit):
        examine("--device", "cpu", "--lengths", "--json", str(tmp_path / "report.json"))
    assert (
        f"WRONG: near triton, near, bidirectional, float32: relative error 1.0e-02 ({mistake}"
        in capsys.readouterr().out
    )


def test_the_check_can_be_switched_off(monkeypatch):
    registered("causal")
    monkeypatch.setenv("KLFORMER_SELF_CHECK", "0")
    assert served().keys() == {"spoilt"}


def test_a_cache_folder_that_is_a_file_is_no_obstacle(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    registered()
    assert served().keys() == {"spoilt"}


def test_compiled_programs_are_made_of_backends_that_are_right():
    registered("causal")
    product = partial(klformer.spectral_product, feature_map="prf", causal=True)
    compiled = torch.compile(lambda *operands: product(*operands), backend="aot_eager", fullgraph=True)
    operands = *torch.randn(3, 1, 2, 6, 8), torch.randn(2, 4, 8)
    with pytest.warns(RuntimeWarning, match="backend 'spoilt' is wrong"):
        out = compiled(*operands)
    expected = product(*operands, backend="reference")
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_the_random_numbers_of_the_user_are_left_alone():
    registered()
    before = torch.get_rng_state()
    assert self_check.is_right(BACKENDS["spoilt"], "prf", CPU)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["chunked", "flash_cpu", "flash_half", "plain"])
def test_our_own_backends_are_right_in_every_precision(name):
    found = list(self_check.check(BACKENDS[name], CPU, dtypes=doctor.DTYPES, oracle="reference"))
    assert not [finding.describe() for finding in found if finding.is_wrong]
    assert any(finding.refused is None for finding in found)


def test_the_doctor_tells_of_a_wrong_backend(tmp_path, capsys, monkeypatch):
    registered("gradient")
    monkeypatch.setattr(doctor, "DTYPES", (torch.float32,))
    with pytest.raises(SystemExit) as stop:
        examine("--device", "cpu", "--lengths", "16", "--json", str(tmp_path / "report.json"))
    assert stop.value.code == 1
    printed, report = capsys.readouterr().out, json.loads((tmp_path / "report.json").read_text())
    assert "WRONG: spoilt, prf, bidirectional, float32: relative error 1.0e-02 (gradient of omega)" in printed
    assert "spoilt: it is for prf" in printed
    assert "By itself klformer takes: chunked for prf" in printed
    assert (
        "chunked, flash_cpu, flash_half, plain, reference, near right on this device; the others are not used"
        in printed
    )
    assert report["auto"]["prf"] == "chunked"
    assert list(report["wrong"]) == ["spoilt"]
    assert {entry["backend"] for entry in report["times"]} == {"softmax", "chunked", "flash_cpu", "flash_half", "plain"}
    assert all(entry["ms"] > 0 and entry["length"] == 16 for entry in report["times"])


def test_the_doctor_refuses_what_is_not_there():
    for arguments, message in (
        (["--device", "cuda:99"], "device 'cuda:99' can't be used"),
        (["--device", "cpu", "--lengths", "0"], "lengths must be at least 1, got 0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            examine(*arguments)
