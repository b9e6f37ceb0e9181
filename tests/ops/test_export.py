"""A program that is exported holds the product as an op for each step, for any length."""

import warnings

import pytest
import torch

import klformer

WIDTH = 16


@pytest.mark.parametrize("name", ["gmm-rks", "gmm-prf", "atoms-prf"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_an_exported_layer_takes_any_length(name, causal):
    attention = klformer.AttentionSpec(name=name, options={"num_frequencies": 8})
    layer = klformer.MultiheadAttention(model_dim=WIDTH, num_heads=2, attention=attention, causal=causal).eval()
    length = torch.export.Dim("length", min=1)
    example = (torch.randn(2, 9, WIDTH),)
    program = torch.export.export(layer, example, dynamic_shapes={"x": {1: length}})
    ops = sum("spectral_product" in str(node.target) for node in program.graph.nodes)
    assert ops == 1
    for tokens in (1, 7, 300, 5000):
        x = torch.randn(2, tokens, WIDTH)
        torch.testing.assert_close(program.module()(x), layer(x), atol=1e-5, rtol=1e-5)


def test_an_exported_layer_says_that_it_can_not_be_trained():
    layer = klformer.MultiheadAttention(model_dim=WIDTH, num_heads=2, attention="gmm-prf")
    program = torch.export.export(layer, (torch.randn(1, 5, WIDTH),))
    with pytest.raises(ValueError, match="an exported product has no gradients"):
        program.module()(torch.randn(1, 5, WIDTH, requires_grad=True)).sum().backward()


for_onnx = pytest.mark.parametrize("name", ["gmm-prf", "gmm-rks", "atoms-prf", "linear-elu"])
directions = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
LENGTHS = {"x": {1: torch.export.Dim("length", min=1)}}


def layer_for_onnx(name, causal):
    options = {} if name == "linear-elu" else {"num_frequencies": 8}
    attention = klformer.AttentionSpec(name=name, options=options)
    return klformer.MultiheadAttention(model_dim=WIDTH, num_heads=2, attention=attention, causal=causal).eval()


@pytest.mark.slow
@for_onnx
@directions
def test_a_program_for_onnx_takes_any_length(monkeypatch, name, causal):
    """What the exporter is given: no op of ours, no loop over the length. Needs no extra."""
    layer = layer_for_onnx(name, causal)
    with monkeypatch.context() as patch:
        patch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
        program = torch.export.export(layer, (torch.randn(2, 9, WIDTH),), dynamic_shapes=LENGTHS)
    assert not any("klformer" in str(node.target) for node in program.graph.nodes)
    for tokens in (1, 7, 300, 5000):
        x = torch.randn(2, tokens, WIDTH)
        torch.testing.assert_close(program.module()(x), layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@for_onnx
@directions
def test_onnx_takes_any_length(tmp_path, name, causal):
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    layer = layer_for_onnx(name, causal)
    path = tmp_path / "layer.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        torch.onnx.export(layer, (torch.randn(2, 9, WIDTH),), dynamo=True, dynamic_shapes=LENGTHS, verbose=False).save(
            path
        )
    session = runtime.InferenceSession(path)
    for tokens in (7, 300, 5000):
        x = torch.randn(2, tokens, WIDTH)
        (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(out), layer(x), atol=1e-5, rtol=1e-5)
