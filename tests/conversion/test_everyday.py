"""A converted model in everyday use: half precision, compilation, gradient checkpointing, Trainer."""

import pytest
import torch
from conversion_support import FAMILIES, SIZES, answer, batch, batches
from torch.testing import assert_close
from transformers import AutoModelForMaskedLM, BertConfig, BertModel, Trainer, TrainingArguments

import klformer


@pytest.fixture
def model():
    torch.manual_seed(0)
    return klformer.convert(FAMILIES["bert"](), batches("bert"), options={"num_frequencies": 8}, steps=1).model


def test_bfloat16(model):
    expected = answer(model, batch("bert"))
    half = answer(model.to(torch.bfloat16), batch("bert"))
    assert half.dtype == torch.bfloat16
    assert (half.float() - expected).norm() < 0.05 * expected.norm()


def test_bfloat16_teacher(tmp_path):
    """Kernels are learned and kept in float32, and come back so."""
    teacher = FAMILIES["bert"]().to(torch.bfloat16)
    conversion = klformer.convert(teacher, batches("bert"), options={"num_frequencies": 8}, steps=1)
    conversion.save(tmp_path)
    loaded = klformer.load_converted(tmp_path)
    kinds = {name.partition(".klformer.")[1]: p.dtype for name, p in loaded.named_parameters()}
    assert kinds == {"": torch.bfloat16, ".klformer.": torch.float32}
    assert torch.equal(answer(loaded, batch("bert")), answer(conversion.model, batch("bert")))


def test_compiled_as_one_graph(model):
    inputs = batch("bert")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(compiled(**inputs).logits, model(**inputs).logits)


def test_gradient_checkpointing_changes_no_gradient(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(**batch("bert")).logits.square().mean().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert any(".klformer." in name for name in gradients[0])
    assert_close(gradients[1], gradients[0])


@pytest.mark.filterwarnings("ignore")
def test_trainer_trains_the_kernels_and_its_checkpoints_have_them(model, tmp_path):
    rows = [{name: value[0] for name, value in batch("bert", rows=2, padded=False, seed=i).items()} for i in range(8)]
    rows = [{**row, "labels": row["input_ids"]} for row in rows]
    before = {name: p.detach().clone() for name, p in model.named_parameters() if ".klformer." in name}
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=4, report_to=[], save_steps=2, use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    assert all(not torch.equal(dict(model.named_parameters())[name], value) for name, value in before.items())
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "checkpoint-2").eval()
    assert torch.equal(answer(again, batch("bert")), answer(model.eval(), batch("bert")))


@pytest.mark.parametrize("pooled", [True, False])
def test_an_encoder_without_its_pooler(tmp_path, pooled):
    """As sentence encoders are built that take the mean over the tokens."""
    config = BertConfig(**SIZES)
    model = BertModel(config, add_pooling_layer=pooled).eval()
    conversion = klformer.convert(model, batches("bert"), options={"num_frequencies": 4}, steps=1)
    conversion.save(tmp_path)
    loaded = klformer.load_converted(tmp_path)
    assert (loaded.pooler is not None) == pooled
    assert torch.equal(answer(loaded, batch("bert")), answer(conversion.model, batch("bert")))
