"""Every family: converts, answers as its definition says, trains a step, is saved and loaded."""

import copy
import functools

import pytest
import torch
import transformers
from conversion_support import CAUSAL, ENCODERS, FAMILIES, PADDING, SIZES, answer, batch, batches, convert
from torch.testing import assert_close

import klformer

OPTIONS = {"num_frequencies": 8}


def converted(family, **arguments):
    torch.manual_seed(0)
    model = FAMILIES[family]()
    return model, convert(model, batches(family), **{"options": OPTIONS, "steps": 3, **arguments})


@pytest.fixture(params=FAMILIES)
def case(request):
    return request.param, *converted(request.param)


def test_converts_trains_saves_and_loads(case, tmp_path):
    family, teacher, conversion = case
    before = copy.deepcopy(teacher.state_dict())
    layers = conversion.certificate.layers
    assert len(layers) == 2
    assert all(len(layer.fitted) == 4 for layer in layers)

    conversion.save(tmp_path / "model")
    loaded = klformer.load_converted(tmp_path / "model")
    inputs = batch(family)
    expected = answer(conversion.model, inputs)
    assert torch.equal(answer(loaded, inputs), expected)
    assert not torch.allclose(expected, answer(teacher.eval(), inputs), atol=1e-4)

    loaded.train()
    optimiser = torch.optim.SGD(loaded.parameters(), lr=0.01)
    out = loaded(**inputs)
    (out.logits if "logits" in out else out.last_hidden_state).square().mean().backward()
    kernels = [p for name, p in loaded.named_parameters() if ".klformer." in name]
    assert kernels
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in kernels)
    optimiser.step()
    assert not torch.equal(answer(loaded.eval(), inputs), expected)
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


def test_the_model_that_is_given_is_left_as_it_is():
    torch.manual_seed(0)
    model = FAMILIES["bert"]().train()
    model.bert.eval()
    expected = answer(model.bert, batch("bert"))
    implementation = model.config._attn_implementation
    convert(model, batches("bert"), options=OPTIONS, steps=2)
    assert torch.equal(answer(model.bert, batch("bert")), expected)
    assert model.config._attn_implementation == implementation != "klformer"
    assert model.training
    assert not model.bert.training
    assert model.config.attention_probs_dropout_prob == 0.1


@pytest.mark.parametrize("family", [*ENCODERS, *CAUSAL])
def test_padding_in_front_changes_nothing(family):
    model = converted(family)[1].model
    alone = batch(family, rows=1, padded=False)
    padded = {name: torch.nn.functional.pad(each, (4, 0), value=PADDING) for name, each in alone.items()}
    expected = answer(model, alone)
    kept = slice(4, None) if expected.dim() == 3 else 0
    close = functools.partial(assert_close, atol=1e-4, rtol=1e-4)
    if family != "bert-classes":  # whose vector is that of the first place, whatever stands there
        close(answer(model, padded)[:, kept], expected)
    if expected.dim() == 3:
        for each in (alone, padded):
            each["inputs_embeds"] = model.get_input_embeddings()(each.pop("input_ids"))
        close(answer(model, padded)[:, kept], answer(model, alone))


def test_padding_in_front_is_refused_where_a_model_counts_it():
    torch.manual_seed(0)
    config = transformers.EsmConfig(**SIZES, pad_token_id=PADDING, mask_token_id=3, position_embedding_type="rotary")
    model = convert(transformers.EsmForMaskedLM(config), batches("esm"), options=OPTIONS, steps=0).model
    padded = batch("esm", rows=1, padded=False)
    padded = {name: torch.nn.functional.pad(each, (4, 0), value=PADDING) for name, each in padded.items()}
    with pytest.raises(ValueError, match="EsmModel counts rotary positions with padding in front: pad at the end"):
        model(**padded)


@pytest.mark.parametrize("family", [*ENCODERS, *CAUSAL])
def test_padding_changes_nothing(family):
    """What padding holds, how much there is of it, and who else is in the batch: the same answers."""
    _, conversion = converted(family, steps=1)
    inputs = batch(family)
    expected = answer(conversion.model, inputs)
    poisoned = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 7)
    keep = inputs["attention_mask"].bool() if expected.dim() == 3 else slice(None)
    # ESM and RoBERTa take positions from which tokens are padding.
    if family not in ("roberta", "esm"):
        assert_close(answer(conversion.model, {**inputs, "input_ids": poisoned})[keep], expected[keep])
    longer = {
        "input_ids": torch.nn.functional.pad(inputs["input_ids"], (0, 5), value=PADDING),
        "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, 5)),
    }
    more = answer(conversion.model, longer)
    assert_close((more[:, :9] if expected.dim() == 3 else more)[keep], expected[keep], atol=1e-5, rtol=1e-5)
    alone = {name: value[1:2, :5] for name, value in inputs.items()}
    single = answer(conversion.model, alone)[0]
    assert_close(single, expected[1, :5] if expected.dim() == 3 else expected[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", CAUSAL)
def test_generation_is_what_the_whole_sequence_gives(family):
    _, conversion = converted(family, steps=1)
    model = conversion.model
    prompt = batch(family, rows=2, length=6, padded=False)
    prompt["input_ids"][1, :2], prompt["attention_mask"][1, :2] = PADDING, 0  # prompts are padded on the left
    made = model.generate(**prompt, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=PADDING)
    assert made.shape == (2, 11)
    for row, first in ((0, 0), (1, 2)):
        tokens = made[row : row + 1, first:6]
        for _ in range(5):
            following = answer(model, {"input_ids": tokens})[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, following], dim=1)
        assert torch.equal(tokens[0], made[row, first:])


@pytest.mark.parametrize("family", CAUSAL)
def test_causal_models_do_not_look_ahead(family):
    _, conversion = converted(family, steps=1)
    inputs = batch(family, padded=False)
    changed = {**inputs, "input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][:, 6:] = 11
    assert_close(answer(conversion.model, changed)[:, :6], answer(conversion.model, inputs)[:, :6])
    assert conversion.certificate.teacher["perplexity"] > 1


def test_windows_are_left_out_by_layers():
    torch.manual_seed(0)
    model = FAMILIES["modernbert"]()
    config = copy.deepcopy(model.config)
    config.layer_types = ["full_attention", "sliding_attention"]
    model = type(model)(config).eval()
    inputs = batches("modernbert")
    with pytest.raises(klformer.conversion.ConversionError, match=r"layer 1 sees a sliding window.*layers=\(0,\)"):
        convert(model, inputs)
    conversion = convert(model, inputs, layers=(0,), options=OPTIONS, steps=0)
    assert "1 of 2 layers were left out" in conversion.certificate.notes[0]
    # The layer that was left out is what it was: with the kernel taken away as well, all is as before.
    del conversion.model.model.layers[0].attn.klformer
    assert_close(answer(conversion.model, inputs[0]), answer(model, inputs[0]))
