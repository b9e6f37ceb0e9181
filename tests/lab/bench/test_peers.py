"""Peers compute what klformer computes, with the same weights, and the tables say what was measured."""

import json
from functools import partial

import pytest
import torch
from torch import nn

from klformer.kernels import SPECTRA
from klformer.lab.bench import measure, peer_modules, peers
from klformer.lab.bench.measure import in_own_process, round_times
from klformer.lab.bench.peer_modules import (
    Contender,
    Pair,
    PeerMissingError,
    PeerShape,
    build,
    check_same,
    forward_and_backward,
    pairs,
    performer_pytorch,
    without_epsilon,
)
from klformer.lab.bench.peers import PeersBench
from klformer.memory import MEBIBYTE

SMALL = PeerShape(batch=3, heads=2, head_dim=8, num_frequencies=14, num_layers=2), 29
NAMES = ("softmax", "performer", "gmm-rks", "generative-prf", "linear-elu")
PAIRS = pairs({"attention": NAMES, "encoder": NAMES})
EPSILON = 1e-4

try:
    performer_pytorch()
    MISSING = None
except PeerMissingError as error:
    MISSING = str(error)

needs_performer = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def contender_parameter(contender):
    marks = needs_performer if contender.maker == "performer-pytorch" else ()
    return pytest.param(contender, id=f"{contender.level}: {contender.label()}", marks=marks)


def pair_parameter(pair):
    marks = needs_performer if pair.peer.maker == "performer-pytorch" else ()
    return pytest.param(pair, id=f"{pair.peer.label()} as {pair.ours.label()}", marks=marks)


def inputs_of(level):
    torch.manual_seed(2)
    shape = (3, 29, 16) if level == "encoder" else (3, 2, 29, 8)
    count = 1 if level == "encoder" else 3
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(count)]


def test_who_is_compared_with_whom():
    same = {(pair.peer.label(), pair.ours.label()) for pair in PAIRS if pair.same}
    assert same == {
        ("torch scaled_dot_product_attention", "softmax"),
        ("torch.nn.TransformerEncoder", "encoder, softmax"),
        ("performer-pytorch FastAttention", "performer"),
        ("performer-pytorch Performer", "encoder, performer"),
        ("performer, features materialised", "performer"),
        ("gmm-rks, features materialised", "gmm-rks"),
        ("generative-prf, features materialised", "generative-prf"),
        ("linear-elu, features materialised", "linear-elu"),
    }
    others = {(pair.peer.maker, pair.ours.attention) for pair in PAIRS if not pair.same}
    assert others == {("torch", name) for name in NAMES if name != "softmax"}


@pytest.mark.parametrize("pair", [pair_parameter(pair) for pair in PAIRS if pair.same])
def test_results_and_gradients_are_the_same(pair):
    results = []
    for contender in (pair.ours, pair.peer):
        module, inputs = build(contender, *SMALL).double(), inputs_of(pair.ours.level)
        if contender.maker == "performer-pytorch":
            with without_epsilon():
                out = module(*inputs)
        else:
            out = module(*inputs)
        generator = torch.Generator().manual_seed(3)
        d_out = torch.randn(out.shape, dtype=out.dtype, generator=generator)
        results.append([out, *torch.autograd.grad(out, inputs, d_out)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("pair", [pair_parameter(pair) for pair in PAIRS if pair.same])
def test_the_check_passes_in_single_precision(pair):
    errors = check_same(pair, *SMALL)
    assert errors["error"] < 1e-5
    assert ("error_with_epsilon" in errors) == (pair.peer.maker == "performer-pytorch")


@needs_performer
def test_epsilon_is_the_only_difference_of_performer_pytorch():
    ours = build(Contender("attention", "klformer", "performer"), *SMALL).double()
    theirs = build(Contender("attention", "performer-pytorch", "performer"), *SMALL).double()
    q, k, v = inputs_of("attention")

    def features(x, axes):
        # Its shift is the maximum of the projections, without the norm: over features, for keys over all keys as well.
        projections = x * 8**-0.25 @ ours.kernel.spectrum.frequencies()[0].double().T
        shift = projections.amax(axes, keepdim=True)
        envelope = (-0.5 * (x * 8**-0.25).square().sum(-1, keepdim=True)).exp()
        return ours.features(x, "query") * envelope * 14**0.5 * (-shift).exp() + EPSILON

    phi_q, phi_k = features(q, -1), features(k, (-2, -1))
    expected = phi_q @ (phi_k.transpose(-1, -2) @ v) / (phi_q @ phi_k.sum(-2).unsqueeze(-1))
    torch.testing.assert_close(theirs(q, k, v), expected, atol=1e-10, rtol=1e-10)
    assert not torch.allclose(ours(q, k, v), expected, atol=1e-4)


@needs_performer
def test_epsilon_is_put_back():
    kernel = performer_pytorch().softmax_kernel
    with without_epsilon():
        assert performer_pytorch().softmax_kernel.keywords == {"eps": 0.0}
    assert performer_pytorch().softmax_kernel is kernel


@pytest.mark.parametrize(
    "contender", [contender_parameter(c) for c in dict.fromkeys(c for pair in PAIRS for c in (pair.ours, pair.peer))]
)
def test_every_contender_runs(contender):
    forward_and_backward(contender, *SMALL)()


def test_the_encoder_is_torchs_with_a_copy_of_the_weights():
    peer = build(Contender("encoder", "torch", "softmax"), *SMALL)
    ours = build(Contender("encoder", "klformer", "softmax"), *SMALL)
    assert type(peer) is nn.TransformerEncoder
    torch.testing.assert_close(peer.layers[1].linear1.weight, ours.layers[1].ffn[0].weight)
    x = torch.randn(1, 5, 16)
    before = peer(x)
    with torch.no_grad():
        ours.layers[0].ffn[0].weight.mul_(2)
    torch.testing.assert_close(peer(x), before)
    assert not torch.allclose(ours(x), before, atol=1e-3)


def test_a_peer_that_computes_something_else_is_refused():
    wrong = Pair(Contender("attention", "torch", "softmax"), Contender("attention", "klformer", "performer"), same=True)
    with pytest.raises(RuntimeError, match=r"scaled_dot_product_attention differs from performer by .*, more than"):
        check_same(wrong, *SMALL)


def test_only_kernels_have_features_to_materialise():
    with pytest.raises(ValueError, match=r"attention must be a kernel to have features, got 'softmax'"):
        build(Contender("attention", "materialised", "softmax"), *SMALL)
    with pytest.raises(ValueError, match=r"there is no encoder by 'materialised'"):
        build(Contender("encoder", "materialised", "gmm-rks"), *SMALL)


def small_bench(**changes):
    sizes = {"lengths": (13, 17), "heads": 2, "head_dim": 4, "num_frequencies": 6, "num_layers": 1, "repeats": 3}
    return PeersBench(**{"memory": False, "kept": False, "encoder_attentions": (), **sizes, **changes})


def test_without_performer_pytorch_the_others_are_measured(monkeypatch, tmp_path, capsys):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(peer_modules.importlib, "import_module", missing)
    peers.run(small_bench(attentions=("performer",), lengths=(13,), repeats=1, out=tmp_path))
    out = capsys.readouterr().out
    assert "performer-pytorch is left out" in out
    assert "pip install 'klformer[bench]'" in out
    assert "features materialised" in out
    assert "FastAttention" not in out
    report = json.loads((tmp_path / "peers.json").read_text())
    assert report["left_out"].startswith("performer-pytorch is left out")


def test_ratios_are_those_of_each_round(monkeypatch, tmp_path, capsys):
    seconds = {"klformer": [1.0, 2.0, 4.0], "torch": [3.0, 4.0, 4.0], "materialised": [0.5, 2.0, 8.0]}
    monkeypatch.setattr(peers, "both_times", lambda subjects, **_: {c: (seconds[c.maker],) * 2 for c in subjects})
    peers.run(small_bench(attentions=("gmm-rks",), lengths=(13,), out=tmp_path))
    report = json.loads((tmp_path / "peers.json").read_text())
    assert report["command"]
    torch_row, plain_row = report["comparisons"]
    assert torch_row["time_ratio"] == {"median": 2.0, "low": 1.0, "high": 3.0}
    assert torch_row["errors"] is None
    assert torch_row["memory_ratio"] is None
    assert plain_row["time_ratio"] == {"median": 1.0, "low": 0.5, "high": 2.0}
    assert plain_row["errors"]["error"] < 1e-5
    assert [row["seconds"]["median"] for row in report["subjects"]] == [2.0, 4.0, 2.0]
    out = capsys.readouterr().out
    assert "2.00 (1.00 to 3.00)" in out
    assert "2,000.0 (1,000.0 to 4,000.0)" in out


def test_who_is_slow_has_fewer_rounds(monkeypatch, tmp_path, capsys):
    clock = [0.0]
    seconds = {"klformer": 1.0, "torch": 6.0, "materialised": 5.0}

    def step(contender, shape, length):
        def run():
            clock[0] += seconds[contender.maker]

        return run

    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(peers, "forward_and_backward", step)
    peers.run(small_bench(attentions=("gmm-rks",), lengths=(13,), repeats=5, out=tmp_path))
    report = json.loads((tmp_path / "peers.json").read_text())
    assert {row["maker"]: row["rounds"] for row in report["subjects"]} == {"klformer": 5, "torch": 2, "materialised": 5}
    assert [(row["rounds"], row["time_ratio"]["median"]) for row in report["comparisons"]] == [(2, 6.0), (5, 5.0)]
    assert "rounds" in capsys.readouterr().out


def test_memory_is_the_median_of_several_processes(monkeypatch, tmp_path, capsys):
    mebibytes = {"klformer": iter([200, 100, 300]), "torch": iter([100, 100, 600]), "materialised": iter([0, 0, 0])}
    monkeypatch.setattr(peers, "in_own_process", lambda run, who, *shape: next(mebibytes[who.maker]) * MEBIBYTE)
    peers.run(small_bench(attentions=("gmm-rks",), lengths=(13,), memory=True, memory_repeats=3, out=tmp_path))
    report = json.loads((tmp_path / "peers.json").read_text())
    ours = report["subjects"][0]["memory"]
    assert {key: value / MEBIBYTE for key, value in ours.items()} == {"median": 200, "low": 100, "high": 300}
    torch_row, plain_row = report["comparisons"]
    assert torch_row["memory_ratio"] == {"median": 0.5, "low": 0.5, "high": 2.0}
    assert plain_row["memory_ratio"]["high"] == 0
    out = capsys.readouterr().out
    assert "200 (100 to 300)" in out
    assert "0.50 (0.50 to 2.00)" in out


def test_encoders_have_attentions_of_their_own(monkeypatch, tmp_path):
    options = PeersBench()
    assert {2048, 16384} <= set(options.lengths)
    learned = {f"{spectrum}-{features}" for spectrum in SPECTRA for features in ("rks", "prf")}
    assert learned - set(options.attentions) == {"atoms-rks"}  # ours; the conversion's kernel is atoms-prf
    assert set(options.encoder_attentions) < set(options.attentions)
    peers.run(small_bench(attentions=("gmm-rks",), encoder_attentions=("softmax",), lengths=(13,), out=tmp_path))
    subjects = json.loads((tmp_path / "peers.json").read_text())["subjects"]
    assert [row["name"] for row in subjects if row["maker"] == "klformer"] == ["gmm-rks", "encoder, softmax"]


def test_rounds_are_interleaved_and_the_first_is_not_counted():
    calls = []
    times = round_times({name: partial(calls.append, name) for name in "ab"}, repeats=2)
    assert calls == ["a", "b"] * 3
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2}


def test_memory_is_measured_in_a_process_of_its_own():
    contender = Contender("attention", "materialised", "performer")
    out = in_own_process(peers.measure_memory, contender, PeerShape(heads=2), 8192)
    features = 2 * 2 * 8192 * 128 * 4  # of queries and keys, two heads, R = 128, float32
    assert features < out < 20 * features


def test_bad_options_are_named():
    with pytest.raises(ValueError, match=r"attentions must be one of .* got 'sofmax'; did you mean 'softmax'"):
        peers.run(small_bench(attentions=("sofmax",)))
    with pytest.raises(ValueError, match=r"encoder_attentions must be one of .* got 'sofmax'"):
        peers.run(small_bench(encoder_attentions=("sofmax",)))
    with pytest.raises(ValueError, match=r"memory_repeats must be at least 1, got 0"):
        peers.run(small_bench(memory_repeats=0))
    with pytest.raises(ValueError, match=r"repeats must be at least 1, got 0"):
        peers.run(small_bench(repeats=0))
