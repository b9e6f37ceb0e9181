"""What users of torch.nn.MultiheadAttention type."""

import pytest
import torch

import klformer
import klformer.nn
from klformer.errors import ArgumentError
from klformer.models import EncoderConfig


def pair(**options):
    """Torch's module, and ours with softmax inside and the same weights."""
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(8, 2, dtype=torch.float64, **options)
    if theirs.in_proj_bias is not None:
        torch.nn.init.normal_(theirs.in_proj_bias)
    return theirs, klformer.nn.MultiheadAttention.from_torch(theirs, attention="softmax")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("padding", ["none", "bool", "float"])
def test_softmax_is_torchs_own(bias, batch_first, padding):
    theirs, ours = pair(bias=bias, batch_first=batch_first)
    q, k, v = torch.randn(3, 3, 5, 8, dtype=torch.float64)
    if not batch_first:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    mask = torch.tensor([[False] * 5, [False, True, False, True, True], [True, False, False, False, False]])
    if padding == "float":
        ours = klformer.nn.MultiheadAttention.from_torch(theirs, attention="gmm-prf:num_frequencies=8")
        dropped = torch.zeros(3, 5, dtype=torch.float64).masked_fill(mask, -torch.inf)
        torch.testing.assert_close(ours(q, k, v, dropped)[0], ours(q, k, v, mask)[0])
        return
    given = None if padding == "none" else mask
    expected, _ = theirs(q, k, v, given, need_weights=False)
    found, weights = ours(q, k, v, given)
    assert weights is None
    torch.testing.assert_close(found, expected)


def test_causal_and_without_a_batch():
    theirs, ours = pair()
    x = torch.randn(5, 8, dtype=torch.float64)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    expected, _ = theirs(x, x, x, attn_mask=mask, need_weights=False)
    for found in (ours(x, x, x, attn_mask=mask), ours(x, x, x, is_causal=True), ours(x, x, x, attn_mask=mask < 0)):
        torch.testing.assert_close(found[0], expected)


def test_a_kernel_takes_its_place_and_learns():
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    ours = klformer.nn.MultiheadAttention.from_torch(theirs, attention="gmm-rks:num_frequencies=8")
    x = torch.randn(2, 7, 8)
    ours(x, x, x)[0].square().sum().backward()
    assert all(p.grad is not None for p in ours.parameters())
    assert torch.equal(ours.in_proj_weight, theirs.in_proj_weight)
    assert ours.in_proj_weight is not theirs.in_proj_weight


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"need_weights": True}, "need_weights=True asks for all weights, which are never made"),
        ({"attn_mask": torch.zeros(5, 5)}, "attn_mask must be the causal mask, or None"),
        ({"attn_mask": torch.ones(4, 4).triu(1).bool()}, "attn_mask must be the causal mask"),
    ],
)
def test_what_does_not_factorise_is_refused(options, message):
    x = torch.randn(5, 2, 8)
    with pytest.raises(ArgumentError, match=message):
        klformer.nn.MultiheadAttention(8, 2)(x, x, x, **options)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 3}, {"dropout": 0.1}])
def test_what_there_is_no_counterpart_of_is_refused(options):
    with pytest.raises(ArgumentError, match=f"^{next(iter(options))} "):
        klformer.nn.MultiheadAttention(8, 2, **options)


def test_shapes_are_named():
    mha = klformer.nn.MultiheadAttention(8, 2)
    with pytest.raises(ArgumentError, match=r"key must have the shape \(L, B, 8\), got \(5, 2, 9\)"):
        mha(torch.randn(5, 2, 8), torch.randn(5, 2, 9), torch.randn(5, 2, 8))


def test_an_encoder_may_be_causal():
    sizes = {"model_dim": 8, "num_layers": 2, "num_heads": 2, "ffn_dim": 8, "dropout": 0.0}
    encoder = klformer.TransformerEncoder(EncoderConfig(**sizes, attention="gmm-prf:num_frequencies=8"), causal=True)
    x = torch.randn(2, 9, 8)
    changed = torch.cat([x[:, :5], torch.randn(2, 4, 8)], 1)
    before, after = encoder.eval()(x), encoder(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])
    torch.testing.assert_close(encoder(x, num_outputs=3), before[:, :3])
    with pytest.raises(ArgumentError, match="'linformer' has no causal form"):
        klformer.TransformerEncoder(EncoderConfig(**sizes, max_len=9, attention="linformer"), causal=True)
