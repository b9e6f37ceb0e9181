"""`klformer export`: an encoder as an ONNX file, the same at any batch and length."""

import pytest
import torch
from conversion_support import FAMILIES, answer, batch, batches, convert
from torch.nn.functional import normalize
from torch.testing import assert_close

from klformer.conversion import ConversionError
from klformer.conversion.hf.encoder import TextEncoder
from klformer.conversion.hf.export import export_onnx
from klformer.errors import ArgumentError
from klformer.lab.cli.main import main

LONGEST = 4000


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    given = {"options": {"num_frequencies": 8}, "steps": 1, "max_positions": LONGEST}
    return convert(FAMILIES["bert-embeddings"](), batches("bert"), **given).model


def pooled(model, inputs, pooling):
    out, mask = answer(model, inputs), inputs["attention_mask"].unsqueeze(-1)
    if pooling == "none":
        return out
    return normalize(out[:, 0] if pooling == "first" else (out * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.mark.parametrize("pooling", ["none", "mean", "first"])
def test_what_is_exported(model, pooling):
    inputs = batch("bert")
    encoder = TextEncoder(model, pooling=pooling, unit_length=pooling != "none")
    assert_close(encoder(**inputs), pooled(model, inputs, pooling))


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["none", "mean"])
def test_onnx_is_the_model_at_any_length(model, pooling, tmp_path, capsys):
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    file = tmp_path / "model.onnx"
    if pooling == "none":
        export_onnx(TextEncoder(model), file)
    else:
        model.save_pretrained(tmp_path / "linear")
        main(["export", str(tmp_path / "linear"), "--out", str(file), "--pooling", "mean", "--unit-length"])
        assert "has the BertModel of" in capsys.readouterr().out
    session = runtime.InferenceSession(file)
    for rows, length in ((3, 16), (2, 300), (2, LONGEST)):
        inputs = batch("bert", rows=rows, length=length)
        (got,) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        expected, got = pooled(model, inputs, pooling), torch.from_numpy(got)
        kept = inputs["attention_mask"].bool() if pooling == "none" else slice(None)
        assert_close(got[kept], expected[kept], atol=1e-4, rtol=1e-4)


def test_refusals(model, tmp_path, capsys, monkeypatch):
    for family, message in (("vit", "reads pixel_values"), ("gpt2", "is no encoder: it generates texts")):
        with pytest.raises(ConversionError, match=message):
            TextEncoder(FAMILIES[family]())
    with pytest.raises(ArgumentError, match="must be pooled"):
        TextEncoder(model, unit_length=True)
    (tmp_path / "there.onnx").touch()
    for arguments, said in (
        ([str(tmp_path), "--out", str(tmp_path / "there.onnx")], "is there already: give another --out"),
        ([str(tmp_path / "none"), "--out", str(tmp_path / "new.onnx")], "can't read"),
    ):
        with pytest.raises(SystemExit):
            main(["export", *arguments])
        assert said in capsys.readouterr().err
    monkeypatch.setattr("klformer.errors.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"needs onnx, onnxscript: pip install 'klformer\[onnx\]'"):
        export_onnx(TextEncoder(model), tmp_path / "new.onnx")
