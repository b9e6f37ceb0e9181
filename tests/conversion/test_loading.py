"""A saved folder loads like any other of transformers, and never as a softmax model."""

import pickle
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from conversion_support import FAMILIES, answer, batch, batches, convert, make_folder, texts
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from torch.testing import assert_close

import klformer
from klformer import autoload
from klformer.conversion.hf.saving import encoder_folder
from klformer.errors import ArgumentError, FileError
from klformer.lab.cli.main import main

SAID = "pip install 'klformer[hf]', import klformer, and load it with AutoModel"


@pytest.fixture
def conversion():
    return convert(FAMILIES["bert"](), batches("bert"), options={"num_frequencies": 8}, steps=1)


@pytest.fixture
def folder(conversion, tmp_path):
    conversion.save(tmp_path / "linear")
    return tmp_path / "linear"


def printed_by(script, folder):
    environment = {"HF_MODULES_CACHE": str(folder.parent / "modules"), "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", script, str(folder)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_after_import_klformer(folder):
    script = """
import sys, klformer
assert not {"torch", "transformers"} & set(sys.modules)
from transformers import AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel
print(AutoModelForMaskedLM.from_pretrained(sys.argv[1]).bert.encoder.layer[0].attention.self.klformer.num_heads)
"""
    assert printed_by(script, folder) == ["4"]


def test_without_klformer_it_fails_in_words_and_with_the_folders_module_it_loads(folder):
    script = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "klformer":
            raise ModuleNotFoundError("No module named 'klformer'")
sys.meta_path.insert(0, Missing())
import transformers
def tried(load, **options):
    try:
        load.from_pretrained(sys.argv[1], **options)
    except (ValueError, ImportError) as error:
        return str(error)
assert "trust_remote_code=True" in tried(transformers.AutoModel)
assert tried(transformers.AutoModel, trust_remote_code=True).endswith("klformer. Run `pip install klformer`")
for name in ("BertModel", "BertForMaskedLM"):
    assert {SAID!r} in tried(getattr(transformers, name)), name
del sys.meta_path[0]
assert "klformer" not in sys.modules
print("", type(transformers.AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)).__module__, sep="\\n")
"""
    assert printed_by(script, folder)[-1] == "klformer.conversion.hf.classes"


def test_telling_transformers_twice_changes_nothing():
    autoload.register()
    finders = list(sys.meta_path)
    autoload.register()
    assert sys.meta_path == finders


AUTO = {"ForMaskedLM": "MaskedLM", "ForCausalLM": "CausalLM", "LMHeadModel": "CausalLM"}
AUTO |= {f"For{task}": task for task in ("SequenceClassification", "ImageClassification")}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_auto_class_of_the_task_and_that_of_the_body(family, tmp_path):
    model = convert(FAMILIES[family](), batches(family), options={"num_frequencies": 4}, steps=0).model
    inputs = batch(family)
    # Once more than once: what was loaded is saved and loaded again.
    for name in ("once", "twice"):
        model.save_pretrained(tmp_path / name)
        task = next((auto for ending, auto in AUTO.items() if type(model).__name__.endswith(ending)), None)
        kind = getattr(transformers, f"AutoModelFor{task}" if task else "AutoModel")
        loaded = kind.from_pretrained(tmp_path / name)
        assert type(loaded) is type(model)
        assert torch.equal(answer(loaded, inputs), answer(model, inputs))
        model = loaded
    body = transformers.AutoModel.from_pretrained(tmp_path / "once")
    assert torch.equal(answer(body, inputs), answer(model.base_model, inputs))
    model.base_model.save_pretrained(tmp_path / "body")
    again = transformers.AutoModel.from_pretrained(tmp_path / "body")
    assert torch.equal(answer(again, inputs), answer(body, inputs))


def test_layers_that_stay_softmax_come_back_as_such(tmp_path):
    conversion = convert(FAMILIES["bert"](), batches("bert"), steps=0, keep_softmax=1)
    conversion.save(tmp_path)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(answer(loaded, batch("bert")), answer(conversion.model, batch("bert")))
    assert sum(name.endswith("klformer") for name, _ in loaded.named_modules()) == 1


def test_another_attention_is_refused(conversion, folder):
    with pytest.raises(ArgumentError, match="its attention is 'klformer' and can't be 'sdpa'"):
        conversion.model.set_attn_implementation("sdpa")
    with pytest.raises(ArgumentError, match="can't be 'eager'"):
        transformers.AutoModel.from_pretrained(folder, attn_implementation="eager")


def test_half_precision_is_for_the_model_and_not_for_its_kernels(conversion, folder):
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.bfloat16)
    kinds = {name.partition(".klformer.")[1]: p.dtype for name, p in loaded.named_parameters()}
    assert kinds == {"": torch.bfloat16, ".klformer.": torch.float32}
    right = answer(conversion.model, batch("bert"))
    assert (answer(loaded, batch("bert")) - right).norm() < 0.05 * right.norm()


@pytest.mark.parametrize("bare", [False, True])
def test_weights_can_be_read_by_whom_the_rest_can(conversion, folder, bare, tmp_path):
    if bare:
        conversion.model.save_pretrained(folder := tmp_path)
    modes = {path.name: path.stat().st_mode for path in folder.iterdir() if path.is_file()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_pickles(conversion):
    again = pickle.loads(pickle.dumps(conversion.model))
    assert torch.equal(answer(again, batch("bert")), answer(conversion.model, batch("bert")))


def test_without_transformers_one_line_says_how_to_get_it(folder, monkeypatch):
    monkeypatch.setattr("klformer.errors.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"needs transformers: pip install 'klformer\[hf\]'"):
        klformer.load_converted(folder)


class TestSentences:
    """Encoders of sentence-transformers keep their pooling and what comes after it."""

    @pytest.fixture
    def encoder(self, home):
        (home / "texts.txt").write_text("\n".join(texts()) + "\n")
        make_folder(home / "body", FAMILIES["bert-embeddings"]())
        body = Transformer("body", max_seq_length=10)
        pooling = Pooling(32, pooling_mode="mean")
        SentenceTransformer(modules=[body, pooling, Normalize()], device="cpu").save("encoder")
        return home / "encoder"

    def test_pooling_is_as_it_was(self, encoder):
        arguments = ["--attention", "atoms-prf:num_frequencies=8", "--batch-size", "4", "--steps", "2"]
        main(["convert", "encoder", "--data", "texts.txt", "--out", "linear", *arguments])
        some = texts(5)
        linear = SentenceTransformer("linear", device="cpu")
        assert [type(module) for module in linear] == [Transformer, Pooling, Normalize]
        assert linear.max_seq_length == 10
        got = linear.encode(some, convert_to_tensor=True)
        tokens = linear.tokenizer(some, padding=True, truncation=True, max_length=10, return_tensors="pt")
        out = answer(klformer.load_converted("linear"), tokens)
        mask = tokens["attention_mask"].unsqueeze(-1)
        mean = (out * mask).sum(1) / mask.sum(1)
        assert_close(got, torch.nn.functional.normalize(mean, dim=-1), atol=1e-5, rtol=1e-5)
        assert not torch.allclose(
            got, SentenceTransformer("encoder", device="cpu").encode(some, convert_to_tensor=True)
        )
        linear.save("again")
        assert torch.equal(SentenceTransformer("again", device="cpu").encode(some, convert_to_tensor=True), got)

    def test_an_encoder_in_a_folder_of_its_own(self, encoder):
        """As early versions of the library wrote it."""
        inner = encoder / "0_Transformer"
        inner.mkdir()
        for file in [f for f in encoder.iterdir() if f.is_file() and f.name != "modules.json"]:
            shutil.move(file, inner)
        listed = (encoder / "modules.json").read_text()
        (encoder / "modules.json").write_text(listed.replace('"path": ""', '"path": "0_Transformer"', 1))
        assert encoder_folder(encoder) == inner
        main(["convert", "encoder", "--data", "texts.txt", "--out", "linear", "--batch-size", "4", "--steps", "0"])
        assert [type(module) for module in SentenceTransformer("linear", device="cpu")] == [
            Transformer, Pooling, Normalize,
        ]  # fmt: skip

    def test_modules_elsewhere_are_not_followed(self, encoder):
        listed = (encoder / "modules.json").read_text()
        (encoder / "modules.json").write_text(listed.replace("1_Pooling", "../1_Pooling"))
        with pytest.raises(FileError, match="must be names of folders beside it"):
            encoder_folder(encoder)
