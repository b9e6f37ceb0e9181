"""What is said to somebody who has mistyped something."""

import pytest
import torch
from cli_support import fails

import klformer
from klformer.checks import suggestion
from klformer.models import EncoderConfig

OPTIONS = ("num_frequencies", "num_components", "covariance", "init", "smoothing", "redraw", "frozen")


@pytest.mark.parametrize(
    ("text", "choices", "meant"),
    [
        ("nfreq", OPTIONS, "num_frequencies"),
        ("num_freqs", OPTIONS, "num_frequencies"),
        ("frozn", OPTIONS, "frozen"),
        ("lr", ("eps", "learning_rate"), "learning_rate"),
        ("--optimiser.lr", ("--optimiser.eps", "--optimiser.learning-rate"), "--optimiser.learning-rate"),
        ("version", ("train", "eval", "--version"), "--version"),
    ],
)
def test_what_is_meant_is_suggested(text, choices, meant):
    assert suggestion(text, choices) == f"; did you mean {meant!r}?"


@pytest.mark.parametrize("text", ["x", "nowhere", "train"])
def test_what_is_far_from_everything_suggests_nothing(text):
    assert suggestion(text, OPTIONS) == ""


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (2, ["version"], "unknown command 'version'; did you mean '--version'?"),
        (2, ["train", "--optimiser.lr", "1"], "no option '--optimiser.lr'; did you mean '--optimiser.learning-rate'?"),
        (2, ["eval", "x", "--drws=3"], "no option '--drws'; did you mean '--draws'? klformer eval --help"),
        (2, ["train", "--attention", "gmm-rks:nfreq=3"], "no option 'nfreq'; did you mean 'num_frequencies'? Options:"),
        (2, ["train", "--attention", "nope"], "unknown attention 'nope'. Known: gmm-rks"),
        (1, ["eval", "nope"], "there is no folder nope"),
        (
            2,
            ["train", "--training.batch-size", "-1"],
            "--training.batch-size: Input should be greater than or equal to 1, got -1\n",
        ),
    ],
)
def test_what_is_wrong_is_said_in_our_words(home, capsys, code, arguments, message):
    error = fails(capsys, code, *arguments)
    assert message in error
    assert "http" not in error


def test_a_sequence_without_a_batch_is_named():
    config = EncoderConfig(model_dim=16, num_layers=1, num_heads=2, ffn_dim=8, attention="softmax")
    for module in (klformer.TransformerEncoder(config), klformer.MultiheadAttention(model_dim=16, num_heads=2)):
        with pytest.raises(
            ValueError, match=r"x must have the shape \(batch, length, 16\), got \(5, 16\); .*: x\[None\]"
        ):
            module(torch.randn(5, 16))


def test_weights_of_another_number_of_frequencies_are_explained_and_can_be_loaded():
    many, few = (klformer.build_attention("gmm-rks", num_heads=2, head_dim=4, num_frequencies=n) for n in (16, 8))
    with pytest.raises(RuntimeError, match=r"num_frequencies=8.* made with another num_frequencies.*without_noise"):
        few.load_state_dict(many.state_dict())
    few.load_state_dict(klformer.without_noise(many.state_dict(), few), strict=False)
    assert all(torch.equal(a, b) for a, b in zip(few.parameters(), many.parameters(), strict=True))


@pytest.mark.parametrize("name", klformer.attention_names())
def test_operands_of_several_types_give_that_of_the_values(name):
    attention = klformer.build_attention(name, num_heads=2, head_dim=8, max_len=64)
    q, k, v = torch.randn(3, 1, 2, 64, 8)
    found = attention(q, k, v.bfloat16())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, attention(q, k, v.bfloat16().float()).bfloat16())
