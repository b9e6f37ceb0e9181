"""A real BERT, trained on chemical reactions, where its weights and reactions are at hand: ../shared/data."""

import re
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForMaskedLM

import klformer

DATA = Path(__file__).parents[3] / "shared" / "data"
ARCHIVES = [DATA / f"{name}.tar.xz" for name in ("rxnfp_bert_fp16", "uspto50k_rxn")]
pytestmark = pytest.mark.skipif(not all(map(Path.exists, ARCHIVES)), reason="the weights are not in ../shared/data")

TOKEN = re.compile(
    r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("rxnfp")
    for archive in ARCHIVES:
        with tarfile.open(archive) as tar:
            # Python before 3.11.4 has no filters.
            tar.extractall(path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return path


@pytest.fixture(scope="module")
def model(folder):
    source = folder / "rxnfp_bert_fp16"
    model = BertForMaskedLM(BertConfig.from_pretrained(source))
    weights = {name: value.float() for name, value in load_file(source / "model.safetensors").items()}
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module")
def batches(folder):
    words = (folder / "rxnfp_bert_fp16/vocab.txt").read_text().split()
    numbers = {word: i for i, word in enumerate(words)}
    rows = [line.split("\t")[1] for line in (folder / "uspto50k_rxn/test.tsv").read_text().splitlines()[:48]]
    texts = [[numbers["[CLS]"], *(numbers[token] for token in TOKEN.findall(row)), numbers["[SEP]"]] for row in rows]
    texts.sort(key=len)
    generator = torch.Generator().manual_seed(0)
    made = []
    for first in range(0, 40, 8):  # the longest are left out, for time's sake
        part = [torch.tensor(text) for text in texts[first : first + 8]]
        tokens = torch.nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=numbers["[PAD]"])
        kept = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in part], batch_first=True)
        masked = (torch.rand(tokens.shape, generator=generator) < 0.15) & (kept > 0)
        labels = tokens.masked_fill(~masked, -100)
        made.append(
            {"input_ids": tokens.masked_fill(masked, numbers["[MASK]"]), "attention_mask": kept, "labels": labels}
        )
    return [made[2], *made[:2], *made[3:]]


def test_a_kernel_from_its_keys_keeps_what_a_fixed_one_loses(model, batches):
    options = {"num_frequencies": 128}
    alone = klformer.convert(model, batches, options=options | {"window": 0}, steps=4).certificate
    fixed = klformer.convert(model, batches, attention="performer", options=options, steps=0).certificate
    assert alone.teacher["accuracy"] > 0.85
    assert fixed.linear["accuracy"] < 0.35
    assert alone.linear["accuracy"] > fixed.linear["accuracy"] + 0.25
    # With neighbours it keeps more, with half the frequencies, and no part does it alone.
    both = klformer.convert(model, batches, options={"num_frequencies": 64}, steps=4).certificate
    assert both.linear["accuracy"] > max(alone.linear["accuracy"], *(x["accuracy"] for x in both.parts.values())) + 0.05
    assert set(both.parts) == {"near alone", "kernel alone"}
    assert "near alone" in both.table()
