"""Chunks through an encoder are the whole sequence through it."""

import pytest
import torch
from support import small_options

import klformer
from klformer.attention import AttentionSpec
from klformer.errors import ArgumentError, FileError
from klformer.testing.subjects import KERNELS

CUTS = [1, 1, 7, 20, 21]
LENGTH, MODEL = 29, 12


def encoder(attention, *, causal, **config):
    spec = AttentionSpec(name=attention, options=small_options(attention))
    sizes = {"num_layers": 3, "model_dim": MODEL, "num_heads": 2, "ffn_dim": 8}
    config = klformer.EncoderConfig(attention=spec, **(sizes | config))
    return klformer.TransformerEncoder(config, causal=causal).double().eval()


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("name", KERNELS)
def test_a_stream_is_the_sequence(name, causal):
    model = encoder(name, causal=causal, rotary=name.endswith("rks"))
    x, mask = torch.randn(2, LENGTH, MODEL, dtype=torch.float64), torch.rand(2, LENGTH) > 0.3
    mask[:, 0] = True
    chunks = list(zip(x.tensor_split(CUTS, 1), mask.tensor_split(CUTS, 1), strict=True))
    encoded = list(model.encode_stream(iter(chunks)))
    assert [chunk.shape[1] for chunk in encoded] == [chunk.shape[1] for chunk, _ in chunks]
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(encoded, 1), model(x, key_mask=mask), atol=1e-10, rtol=1e-10)
    assert all(layer.self_attention.mechanism.parts is None for layer in model.layers)


def test_a_causal_stream_gives_each_chunk_at_once():
    model, given = encoder("gmm-prf", causal=True), []

    def chunks():
        for number in range(3):
            given.append(number)
            yield torch.randn(1, 4, MODEL, dtype=torch.float64)

    stream = model.encode_stream(chunks())
    next(stream)
    assert given == [0]


def test_a_stream_keeps_one_file_and_removes_it(tmp_path):
    model = encoder("gmm-prf", causal=False, num_layers=2)
    stream = model.encode_stream(torch.randn(1, 40, MODEL, dtype=torch.float64).split(10, 1), folder=tmp_path)
    next(stream)
    stream.close()
    assert not list(tmp_path.iterdir())
    assert not list(model.encode_stream([], folder=tmp_path))
    half = encoder("gmm-prf", causal=False).to(torch.bfloat16)
    assert next(half.encode_stream([torch.randn(1, 3, MODEL, dtype=torch.bfloat16)])).dtype == torch.bfloat16


def test_a_full_disk_is_said(monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(FileError, match="the disk is full"):
        next(encoder("gmm-prf", causal=False).encode_stream([torch.randn(1, 3, MODEL, dtype=torch.float64)]))


def test_what_can_not_be_streamed_is_refused():
    with pytest.raises(ArgumentError, match=r"layers\.0 has SoftmaxAttention, which has no state of fixed size"):
        encoder("softmax", causal=False).encode_stream([])
    with pytest.raises(ArgumentError, match="dropout is at work"):
        encoder("gmm-prf", causal=False).train().encode_stream([])
    with pytest.raises(ArgumentError, match="a chunk must have the shape"):
        next(encoder("gmm-prf", causal=False).encode_stream([torch.zeros(3, MODEL)]))
