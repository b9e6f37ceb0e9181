"""What can't be converted is said in words, before any work."""

import copy

import pytest
import torch
import transformers
from conversion_support import FAMILIES, SIZES, batch, batches, convert

import klformer
from klformer.conversion import ConversionError, fitting
from klformer.errors import ArgumentError, ArgumentTypeError, FileError


@pytest.fixture(autouse=True)
def _no_work(monkeypatch):
    """Refusals come before anything is fitted."""

    def work(*args, **kwargs):
        raise AssertionError("it was not refused")

    monkeypatch.setattr("klformer.conversion.learning.learn_kernels", work)
    monkeypatch.setattr(fitting, "_fit_batch", work)


def tiny(kind, config, **options):
    return getattr(transformers, kind)(getattr(transformers, config)(**options))


T5 = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4, "d_ff": 48}
MODELS = {
    "never calls it": (lambda: tiny("MPNetForMaskedLM", "MPNetConfig", **SIZES), "MPNetForMaskedLM does not call"),
    "never calls it either": (
        lambda: tiny("DebertaV2Model", "DebertaV2Config", **SIZES),
        "does not call the attention",
    ),
    "position bias": (lambda: tiny("T5EncoderModel", "T5Config", **T5), "layer 0 adds a bias of pairs of positions"),
    "decoder": (lambda: tiny("T5Model", "T5Config", **T5), "convert its encoder alone"),
    "windows": (
        lambda: tiny("MistralForCausalLM", "MistralConfig", **SIZES, num_key_value_heads=2, sliding_window=4),
        "layer 0 sees a sliding window only",
    ),
    "softcap": (
        lambda: tiny("Gemma2Model", "Gemma2Config", **SIZES, num_key_value_heads=2, head_dim=8, layer_types=FULL),
        "layer 0 caps its scores",
    ),
    "maps": (lambda: tiny("BertModel", "BertConfig", **SIZES, output_attentions=True), "output_attentions = False"),
    "no attention": (lambda: torch.nn.Linear(2, 2), "Linear has no attention to convert"),
}
FULL = ["full_attention", "full_attention"]


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    build, message = MODELS[name]
    with pytest.raises(ConversionError, match=message):
        convert(build().eval(), batches("bert"))


ARGUMENTS = {
    "an attention": ({"attention": "atomsprf"}, "unknown attention 'atomsprf'; did you mean 'atoms-prf'"),
    "an option": ({"options": {"num_frequences": 8}}, "did you mean 'num_frequencies'"),
    "layers": ({"layers": (0, 2)}, "layers must be numbers from 0 to 1, got 2"),
    "no layers": ({"layers": ()}, "at least one layer"),
    "steps": ({"steps": -1}, "steps: .*greater than or equal to 0, got -1"),
    "learning_rate": ({"learning_rate": 0.0}, "learning_rate: .*greater than 0, got 0.0"),
    "finetune": ({"finetune": "head"}, "finetune: .*'kernels' or 'all'"),
    "labels": ({"label_weight": 1.0}, "label_weight must be 0 where batches have no 'labels'"),
    "positions": ({"attention": "linformer"}, "'linformer' is made for one longest"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name):
    arguments, message = ARGUMENTS[name]
    with pytest.raises((ArgumentError, ArgumentTypeError, ConversionError), match=message):
        convert(FAMILIES["bert"](), batches("bert"), **arguments)


def test_an_attention_without_causal_form(monkeypatch):
    monkeypatch.setattr("klformer.attention.bigbird.BigBirdAttention.supports_causal", False)
    with pytest.raises(ConversionError, match="'bigbird' has no causal form, and the model is causal"):
        convert(FAMILIES["gpt2"](), batches("gpt2"), attention="bigbird")


def test_batches():
    model = FAMILIES["bert"]()
    with pytest.raises(ArgumentError, match="one to fit to, one to choose by and one to measure by, got 0, 0 and 1"):
        convert(model, batches("bert", 1))
    with pytest.raises(ArgumentTypeError, match="a batch must be a mapping"):
        convert(model, [torch.ones(2, 3)] * 3)
    with pytest.raises(ArgumentTypeError, match=r"batch\['input_ids'\] must be a tensor, got list"):
        convert(model, [{"input_ids": [[1]]}] * 3)


def test_folders(tmp_path):
    with pytest.raises(FileError, match="there is no folder"):
        klformer.load_converted(tmp_path / "nothing")
    FAMILIES["bert"]().config.save_pretrained(str(tmp_path))
    with pytest.raises(FileError, match="has no section 'klformer'"):
        klformer.load_converted(tmp_path)


class TestConverted:
    """What a converted model refuses."""

    @pytest.fixture
    def model(self, monkeypatch):
        monkeypatch.undo()
        return convert(FAMILIES["bert"](), batches("bert"), options={"num_frequencies": 8}, steps=0).model

    def test_maps(self, model):
        with pytest.raises(ArgumentError, match="output_attentions must be False"):
            model(**batch("bert"), output_attentions=True)

    def test_masks_of_pairs(self, model):
        pairs = torch.ones(3, 1, 9, 9).tril().bool()
        with pytest.raises(ArgumentError, match="has a mask of pairs of positions"):
            model(input_ids=batch("bert")["input_ids"], attention_mask=pairs)

    def test_dropout_is_off(self, model):
        model.train()
        model.bert.embeddings.dropout.p = 0.0
        for layer in model.bert.encoder.layer:
            assert layer.attention.self.dropout.p == 0.0
            layer.attention.self.dropout.p = 0.1
        with pytest.raises(ArgumentError, match=r"no weights to drop.*got 0.1"):
            model(**batch("bert"))

    def test_again(self, model):
        with pytest.raises(ConversionError, match="converted already"):
            convert(model, batches("bert"))

    def test_weights_of_another(self, model, tmp_path):
        conversion = convert(FAMILIES["bert"](), batches("bert"), options={"num_frequencies": 8}, steps=0)
        conversion.save(tmp_path)
        config = copy.deepcopy(conversion.model.config)
        config.num_hidden_layers = 3
        config.save_pretrained(str(tmp_path))
        with pytest.raises(FileError, match=r"does not hold the weights of the model"):
            klformer.load_converted(tmp_path)


def test_a_part_of_a_layer_can_not_stay_softmax():
    with pytest.raises(ArgumentError, match=r"keep_softmax: must be a number of layers, or an error below 1, got 1\.5"):
        convert(FAMILIES["bert"](), batches("bert"), keep_softmax=1.5)
