"""A backend from outside, by every door: by priority, by name, and where it can't serve."""

from collections import Counter

import pytest
import torch

import klformer
from klformer import plugins
from klformer.attention import MultiheadAttention
from klformer.distributed import sequence_parallel
from klformer.ops.spectral_product import BACKENDS, FusedBackend, dispatch

PLUGIN = """
from collections import Counter

import klformer
from klformer.ops.spectral_product import BACKENDS, FusedBackend

CALLS = Counter()


class Counted(FusedBackend):
    \"\"\"What `chunked` gives, and a count of the calls.\"\"\"

    def __init__(self, priority):
        self.priority = priority

    def supports(self, call):
        return None if call.kernel.omega is not None else "it needs frequencies"

    def empty_kept(self, call):
        return BACKENDS["chunked"].empty_kept(call)

    def forward(self, call, *, keep):
        CALLS[self.name, call.step] += 1
        return BACKENDS["chunked"].forward(call, keep=keep)

    def backward(self, call, outputs, d_results, needed):
        CALLS[self.name, "backward"] += 1
        return BACKENDS["chunked"].backward(call, outputs, d_results, needed)


klformer.register_backend("counted-first", Counted(priority=50))
klformer.register_backend("counted", Counted(priority=-50))
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """The file, and what it counted; its backends are gone after the test."""
    monkeypatch.setattr(BACKENDS, "_entries", dict(BACKENDS._entries))
    monkeypatch.setattr(dispatch, "_by_priority", list(dispatch._by_priority))
    monkeypatch.setenv(plugins.ENVIRONMENT, "")  # which names them to the processes of later tests
    path = tmp_path / "counted_plugin.py"
    path.write_text(PLUGIN)
    return path


@pytest.fixture
def calls(plugin):
    names = {}
    exec(compile(plugin.read_text(), plugin, "exec"), names)
    return names["CALLS"]


def sequences(length=6):
    return torch.randn(3, 1, 2, length, 8)


def doors():
    """Everything that makes a product, by name: a function of the attention's name with its options."""

    def function(attention, backend):
        q, k, v = sequences()
        klformer.spectral_product(q, k, v, torch.randn(2, 4, 8), feature_map="prf", backend=backend)

    def mechanism(attention, backend):
        klformer.AttentionSpec.of(attention).build(num_heads=2, head_dim=8)(*sequences())

    def layer(attention, backend):
        MultiheadAttention(model_dim=16, num_heads=2, attention=attention)(torch.randn(1, 6, 16)).sum().backward()

    def decoding(attention, backend):
        built = klformer.AttentionSpec.of(attention).build(num_heads=2, head_dim=8)
        for state in (built.initial_state(1), built.prepare_decoding(1)):
            for q, k, v in zip(*(x.split(1, 2) for x in sequences()), strict=True):
                _, state = built.step(q, k, v, state)

    def stream(attention, backend):
        config = klformer.EncoderConfig(model_dim=16, num_layers=1, num_heads=2, attention=attention)
        for causal in (False, True):
            encoder = klformer.TransformerEncoder(config, causal=causal).eval()
            list(encoder.encode_stream(torch.randn(1, 9, 16).split(4, 1)))

    def parts(attention, backend):
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
            for causal in (False, True):
                config = klformer.EncoderConfig(model_dim=16, num_layers=1, num_heads=2, attention=attention)
                model = sequence_parallel(klformer.TransformerEncoder(config, causal=causal), mesh)
                model(torch.randn(1, 9, 16)).sum().backward()
        finally:
            torch.distributed.destroy_process_group()

    def conversion(attention, backend):
        from conversion_support import ENCODERS, batches

        model, attention = ENCODERS["bert"](), attention.replace("gmm", "atoms")
        klformer.convert(model, batches("bert"), attention=attention, steps=2)

    return {f.__name__: f for f in (function, mechanism, layer, decoding, stream, parts, conversion)}


@pytest.mark.parametrize(
    "door",
    [pytest.param(door, marks=pytest.mark.needs("transformers") if door == "conversion" else ()) for door in doors()],
)
def test_a_backend_from_outside_serves_by_its_priority_and_by_its_name(door, calls):
    def served(attention, backend):
        calls.clear()
        doors()[door](attention, backend)
        return {name for name, _ in calls}

    assert served("gmm-prf:num_frequencies=4", "auto") == {"counted-first"}
    assert served("gmm-prf:backend=counted,num_frequencies=4", "counted") == {"counted"}
    assert served("gmm-prf:backend=chunked,num_frequencies=4", "chunked") == set()
    with klformer.use_backend("counted"):
        assert served("gmm-prf:num_frequencies=4", "auto") == {"counted"}


@pytest.mark.needs("klformer.lab")
def test_a_run_takes_the_backend_of_the_command_line(plugin, tmp_path, monkeypatch, capsys):
    from run_support import TINY_FLAGS

    from klformer.lab.cli.main import main

    common = ["train", "--task", "sparsity", "--attention", "gmm-prf:num_frequencies=4", *TINY_FLAGS]
    main(["--plugin", str(plugin), "--backend", "counted", *common, "--out", str(tmp_path), "--name", "run"])
    counted = next(b for name in ("counted",) if (b := BACKENDS[name]))
    calls = type(counted).forward.__globals__["CALLS"]
    assert {name for name, _ in calls} == {"counted"}
    assert calls["counted", "backward"] > 0
    # Nobody who loads the run needs it: a file does not say who computed.
    assert "backend" not in (tmp_path / "run" / "config.json").read_text()
    calls.clear()
    main(["--backend", "chunked", "eval", str(tmp_path / "run")])
    assert not calls
    with pytest.raises(SystemExit):
        main(["--backend", "chunky", "eval", str(tmp_path / "run")])
    assert "unknown backend 'chunky'; did you mean 'chunked'" in capsys.readouterr().err


def test_calls_that_it_does_not_support_fall_through_with_its_reason(calls):
    attention = klformer.build_attention("linear-elu", num_heads=2, head_dim=8)
    with klformer.record_backends() as served:
        attention(*sequences())
    assert served == Counter({("product", "chunked"): 1})
    attention = klformer.build_attention("linear-elu", num_heads=2, head_dim=8, backend="counted")
    with pytest.raises(ValueError, match="backend 'counted' can't serve this product: it needs frequencies"):
        attention(*sequences())
    q, k, v = sequences()
    call = klformer.ops.spectral_product.Call("product", attention.present(), q=q, k=k, v=v)
    reasons = klformer.ops.spectral_product.explain_backends(call)
    assert reasons["counted-first"] == "it needs frequencies"
    assert reasons["chunked"] is None
    assert next(iter(reasons)) == "counted-first"


def test_what_is_no_backend_is_refused():
    with pytest.raises(TypeError, match="backend must be a klformer Backend"):
        klformer.register_backend("nothing", object())
    with pytest.raises(ValueError, match="a backend can't be called 'auto'"):
        klformer.register_backend("auto", BACKENDS["chunked"])
    with pytest.raises(ValueError, match="registered already"):
        klformer.register_backend("chunked", type(BACKENDS["chunked"])())
    with pytest.raises(ValueError, match="unknown backend"):
        klformer.build_attention("gmm-prf", num_heads=2, head_dim=8, backend="none")
    assert issubclass(FusedBackend, klformer.Backend)
