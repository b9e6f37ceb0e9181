"""Converted causal models generate with a state for each layer: what they give is what the whole sequence gives."""

import pytest
import torch
from conversion_support import CAUSAL, PADDING, batches, convert
from torch.testing import assert_close
from transformers import DynamicCache, StaticCache

from klformer.conversion.hf import KernelCache
from klformer.errors import ArgumentError

PLAIN = {"do_sample": False, "eos_token_id": None, "pad_token_id": PADDING}


def converted(family, **arguments):
    arguments = {"options": {"num_frequencies": 8, "window": 3}, "steps": 1, **arguments}
    return convert(CAUSAL[family](), batches(family), **arguments).model


@pytest.fixture(scope="module", params=CAUSAL)
def model(request):
    torch.manual_seed(0)
    return converted(request.param)


def prompts():
    """Two prompts, of which one is padded on the left."""
    tokens = torch.randint(4, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    tokens[1, :4], mask[1, :4] = PADDING, 0
    return {"input_ids": tokens, "attention_mask": mask}


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_it_is_what_no_cache_gives(model, options):
    given = {**prompts(), "max_new_tokens": 12, **PLAIN, **options, "output_scores": True}
    got, right = (model.generate(**given, use_cache=use, return_dict_in_generate=True) for use in (True, False))
    assert torch.equal(got.sequences, right.sequences)
    assert isinstance(got.past_key_values, KernelCache)
    for a, b in zip(got.scores, right.scores, strict=True):
        assert_close(a, b, atol=2e-4, rtol=1e-4)


def test_memory_is_constant(model):
    """And is that of a state and w + 1 tokens in each layer."""
    sizes = []
    for count in (3, 40):
        made = model.generate(**prompts(), max_new_tokens=count, return_dict_in_generate=True, **PLAIN)
        cache = made.past_key_values
        assert cache.get_seq_length() == 9 + count - 1
        sizes.append(cache.num_bytes)
    features, tokens = 8 * (8 + 1 + 1), 4 * (8 + 8 + 1)
    assert sizes == [2 * 2 * 4 * (features + tokens) * 4] * 2  # layers, sequences, heads, bytes


def test_it_goes_on_from_what_was_read(model):
    """A prompt in pieces, and a second turn."""
    tokens = prompts()["input_ids"][:1]
    right = model(tokens, use_cache=False).logits
    cache = KernelCache(model)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in tokens.split(4, 1)]
    assert_close(torch.cat(parts, 1), right, atol=1e-4, rtol=1e-4)
    more = torch.cat([tokens, tokens[:, :3]], 1)
    again = model.generate(more, past_key_values=cache, max_new_tokens=3, **PLAIN)
    assert torch.equal(again, model.generate(more, max_new_tokens=3, use_cache=False, **PLAIN))


@pytest.mark.parametrize("attention", ["gmm-rks", "linear-elu", "performer", "atoms-prf:window=0"])
def test_other_attentions(attention):
    model = converted("llama", attention=attention, options={})
    given = {**prompts(), "max_new_tokens": 6, **PLAIN}
    assert torch.equal(model.generate(**given), model.generate(**given, use_cache=False))


def test_layers_that_stay_softmax_keep_their_keys():
    model = converted("llama", keep_softmax=1)
    given = {**prompts(), "max_new_tokens": 6, **PLAIN}
    assert torch.equal(model.generate(**given, num_beams=2), model.generate(**given, num_beams=2, use_cache=False))


def test_all_keys_on_demand():
    model = converted("llama")
    given = {**prompts(), "max_new_tokens": 6, **PLAIN}
    made = model.generate(**given, cache_implementation="dynamic", return_dict_in_generate=True)
    assert isinstance(made.past_key_values, DynamicCache)
    assert torch.equal(made.sequences, model.generate(**given))


def test_bfloat16():
    model = converted("llama").to(torch.bfloat16)
    assert model.generate(**prompts(), max_new_tokens=6, **PLAIN).shape == (2, 15)


def test_gradients_flow_through_pieces():
    model = converted("llama")
    tokens = prompts()["input_ids"][:1]
    gradients = []
    for parts in ([tokens], tokens.split(5, 1)):
        model.zero_grad()
        cache = KernelCache(model)
        torch.cat([model(part, past_key_values=cache).logits for part in parts], 1).square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert_close(gradients[1], gradients[0], atol=1e-3, rtol=1e-3)


@pytest.fixture(scope="module")
def llama():
    return converted("llama", steps=0)


@pytest.mark.parametrize("kind", ["static", "offloaded", "offloaded_static", "quantized"])
def test_other_caches_are_refused(llama, kind):
    with pytest.raises(ArgumentError, match=f"can't use a cache that is {kind}; leave cache_implementation out"):
        llama.generate(**prompts(), max_new_tokens=2, cache_implementation=kind)


def test_a_static_cache_that_is_given_is_refused(llama):
    with pytest.raises(ArgumentError, match="a cache that grows"):
        llama.generate(**prompts(), max_new_tokens=2, past_key_values=StaticCache(llama.config, max_cache_len=20))


def test_tokens_are_not_taken_back(llama):
    cache = KernelCache(llama)
    llama(**prompts(), past_key_values=cache)
    with pytest.raises(ArgumentError, match="can't take tokens back"):
        cache.crop(-1)


def test_keys_that_do_not_arrive(llama):
    cache = KernelCache(llama)
    for layer in cache.layers:
        layer.update(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8))
    with pytest.raises(ArgumentError, match="changes keys between its cache and its attention"):
        llama(**prompts(), past_key_values=cache)
