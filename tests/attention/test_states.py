"""What does not fit a state is refused by name, whoever's state it is."""

import pytest
import torch

import klformer

H, D, E, B = 2, 3, 5, 2


def attention(name):
    return klformer.build_attention(name, num_heads=H, head_dim=D, value_dim=E)


def tokens(size, *, batch=B, length=4, heads=H):
    return torch.randn(batch, heads, length, size)


@pytest.mark.parametrize("name", ["gmm-prf", "gmm-rks", "linear-elu", "softmax"])
@pytest.mark.parametrize(
    ("k", "v", "mask", "message"),
    [
        (tokens(D), tokens(E, length=3), None, "v"),
        (tokens(D + 1), tokens(E), None, "head_dim|shape"),
        (tokens(D), tokens(E), torch.ones(B, 4), "key_mask"),
        (tokens(D), tokens(E), torch.ones(1, 1, dtype=torch.bool), "key_mask"),
        (tokens(D, batch=3), tokens(E, batch=3), None, "the state is for 2 sequences, got a batch of 3"),
    ],
)
def test_keys_that_do_not_fit_are_refused(name, k, v, mask, message):
    mechanism = attention(name)
    with pytest.raises((ValueError, TypeError), match=message):
        mechanism.absorb(mechanism.initial_state(B), k, v, key_mask=mask)


def test_queries_that_do_not_fit_are_refused():
    mechanism = attention("gmm-prf")
    with pytest.raises(ValueError, match=r"q must have shape \(batch, 2, length, 3\), got \(2, 2, 4, 4\)"):
        mechanism.read(mechanism.initial_state(B), tokens(D + 1))


@pytest.mark.parametrize("name", ["gmm-prf", "gmm-rks", "linear-elu", "softmax"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_state_is_read_by_as_many_sequences(name, batch):
    mechanism = attention(name)
    state = mechanism.absorb(mechanism.initial_state(B), tokens(D), tokens(E))
    with pytest.raises(ValueError, match=r"batch|sequences"):
        mechanism.read(state, tokens(D, batch=batch))
    with pytest.raises(ValueError, match=r"batch|sequences"):
        mechanism.step(*(tokens(size, batch=batch, length=1) for size in (D, D, E)), state)


def test_states_of_other_numbers_of_sequences_are_not_merged():
    mechanism = attention("gmm-prf")
    with pytest.raises(ValueError, match="the same number of sequences"):
        mechanism.merge(mechanism.initial_state(1), mechanism.initial_state(2))
