"""The contenders of `klformer bench peers` as modules, each with klformer's own weights and frequencies.

Where the maths is the same, so must the results be. performer-pytorch adds 1e-4 to each feature after shifting it by a
maximum, which klformer does without; it is checked with 0 in its place, and how far its results are off with 1e-4 is
reported.
"""

import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from klformer.attention import attention_options, build_attention
from klformer.attention.kernelized import KernelizedAttention
from klformer.errors import ArgumentError
from klformer.lab.bench.measure import Shape
from klformer.models import AttentionSpec, EncoderConfig, TransformerEncoder

Level = Literal["attention", "encoder"]
Maker = Literal["klformer", "torch", "performer-pytorch", "materialised"]


@dataclass(frozen=True, kw_only=True)
class PeerShape(Shape):
    """The shape of a problem; an encoder has a model of H D and 4 H D hidden units."""

    num_layers: int = 2
    """Layers of the encoders."""


@dataclass(frozen=True)
class Contender:
    """Who computes what: an attention of klformer, or another's way to it."""

    level: Level
    """One attention or an encoder."""
    maker: Maker
    """Whose code."""
    attention: str
    """klformer's attention whose weights are taken over."""

    def label(self) -> str:
        names = {
            ("attention", "torch"): "torch scaled_dot_product_attention",
            ("encoder", "torch"): "torch.nn.TransformerEncoder",
            ("attention", "performer-pytorch"): "performer-pytorch FastAttention",
            ("encoder", "performer-pytorch"): "performer-pytorch Performer",
            ("attention", "materialised"): f"{self.attention}, features materialised",
            ("attention", "klformer"): self.attention,
            ("encoder", "klformer"): f"encoder, {self.attention}",
        }
        return names[self.level, self.maker]


@dataclass(frozen=True)
class Pair:
    """A peer and the part of klformer that it is compared with."""

    peer: Contender
    ours: Contender
    #: The results are to be the same.
    same: bool


def pairs(attentions: Mapping[Level, Sequence[str]]) -> list[Pair]:
    """Return who is compared with whom: every attention with torch, kernels with their features, Performer with its
    peer."""
    found = []
    for level, names in attentions.items():
        for name in names:
            ours = Contender(level, "klformer", name)
            # One torch for all: its weights are those of klformer's softmax.
            found.append(Pair(Contender(level, "torch", "softmax"), ours, same=name == "softmax"))
            if name == "performer":
                found.append(Pair(Contender(level, "performer-pytorch", name), ours, same=True))
            if level == "attention" and _is_kernel(name):
                found.append(Pair(Contender(level, "materialised", name), ours, same=True))
    return found


def _is_kernel(name: str) -> bool:
    return isinstance(build_attention(name, num_heads=1, head_dim=2, max_len=4), KernelizedAttention)


#: Relative RMS error in float32 up to which results are the same.
TOLERANCE = 1e-4


class PeerMissingError(Exception):
    """A peer that is not installed."""


class MaterialisedAttention(nn.Module):
    """A kernel's attention with the features of the whole sequence written out, under plain autograd."""

    def __init__(self, attention: KernelizedAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        phi_q, phi_k = self.attention.features(q, role="query"), self.attention.features(k, role="key")
        normaliser = phi_q @ phi_k.sum(-2).unsqueeze(-1)  # (B, H, L, 1)
        return phi_q @ (phi_k.transpose(-1, -2) @ v) / normaliser


class TorchAttention(nn.Module):
    """torch's own attention."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v)


def performer_pytorch() -> Any:
    """Return the module performer_pytorch.performer_pytorch."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about distutils and torch.cuda.amp
            return importlib.import_module("performer_pytorch.performer_pytorch")
    except ImportError as error:
        raise PeerMissingError(
            f"performer-pytorch is left out, it can't be imported ({error}); pip install 'klformer[bench]' installs it"
        ) from error


@contextmanager
def without_epsilon() -> Iterator[None]:
    """Compute performer-pytorch's features without the constant 1e-4 that it adds to them."""
    module = performer_pytorch()
    kernel = module.softmax_kernel
    module.softmax_kernel = partial(kernel, eps=0.0)
    try:
        yield
    finally:
        module.softmax_kernel = kernel


def build(contender: Contender, shape: PeerShape, length: int) -> nn.Module:
    """Return the module of a contender, with the same weights and frequencies as klformer's.

    Returns:
        A function of q, k and v (B, H, L, D) for an attention, of x (B, L, H D) for an encoder.

    Raises:
        PeerMissingError: the peer is not installed.
        ValueError: there is no such contender.
    """
    torch.manual_seed(0)
    ours = (
        _our_attention(contender.attention, shape, length)
        if contender.level == "attention"
        else _our_encoder(contender, shape, length)
    )
    match contender.level, contender.maker:
        case _, "klformer":
            return ours
        case "attention", "torch":
            return TorchAttention()
        case "attention", "materialised":
            if not isinstance(ours, KernelizedAttention):
                raise ArgumentError(f"attention must be a kernel to have features, got {contender.attention!r}")
            return MaterialisedAttention(ours)
        case "attention", "performer-pytorch":
            peer = performer_pytorch().FastAttention(shape.head_dim, nb_features=shape.num_frequencies)
            peer.projection_matrix.copy_(_frequencies(ours))
            return peer
        case "encoder", "torch":
            return _torch_encoder(ours, shape)
        case "encoder", "performer-pytorch":
            return _performer_encoder(ours, shape)
    raise ArgumentError(f"there is no {contender.level} by {contender.maker!r}")


def forward_and_backward(contender: Contender, shape: PeerShape, length: int) -> Callable[[], None]:
    """Return one training step's worth: the result and the gradients of inputs and parameters."""
    module = build(contender, shape, length)
    inputs = _inputs(contender.level, shape, length)
    d_out = torch.randn_like(inputs[0])
    wanted = [*(x.requires_grad_() for x in inputs), *(p for p in module.parameters() if p.requires_grad)]

    def step() -> None:
        torch.autograd.grad(module(*inputs), wanted, d_out)

    return step


@torch.no_grad()
def check_same(pair: Pair, shape: PeerShape, length: int) -> dict[str, float]:
    """Return relative RMS differences of a peer's results from klformer's.

    Returns:
        "error", and for performer-pytorch, whose error is that without its epsilon, "error_with_epsilon" as it comes.

    Raises:
        RuntimeError: the error is above `TOLERANCE`; what is measured would not be the same thing.
    """
    ours, peer = build(pair.ours, shape, length), build(pair.peer, shape, length)
    inputs = _inputs(pair.ours.level, shape, length)
    expected = ours(*inputs)
    errors = {}
    if pair.peer.maker == "performer-pytorch":
        errors["error_with_epsilon"] = _relative_rms(peer(*inputs), expected)
        with without_epsilon():
            errors["error"] = _relative_rms(peer(*inputs), expected)
    else:
        errors["error"] = _relative_rms(peer(*inputs), expected)
    if not errors["error"] <= TOLERANCE:
        raise RuntimeError(
            f"{pair.peer.label()} differs from {pair.ours.label()} by {errors['error']:.1e}, more than {TOLERANCE:.0e}"
        )
    return errors


def _our_attention(name: str, shape: PeerShape, length: int) -> nn.Module:
    return build_attention(
        name, num_heads=shape.heads, head_dim=shape.head_dim, max_len=length, **_options(name, shape)
    )


def _our_encoder(contender: Contender, shape: PeerShape, length: int) -> TransformerEncoder:
    model_dim = shape.heads * shape.head_dim
    config = EncoderConfig(
        model_dim=model_dim,
        num_layers=shape.num_layers,
        num_heads=shape.heads,
        ffn_dim=4 * model_dim,
        attention=AttentionSpec(name=contender.attention, options=_options(contender.attention, shape)),
        max_len=length,
        dropout=0.0,
    )
    return TransformerEncoder(config)


def _options(name: str, shape: PeerShape) -> dict[str, Any]:
    # The smoothing is the authors': with it no query is raised, for which plainly written formulas have nothing.
    wanted = {"num_frequencies": shape.num_frequencies, "smoothing": 1.0}
    return {key: value for key, value in wanted.items() if key in attention_options(name)}


def _frequencies(attention: nn.Module) -> Tensor:
    """Return the frequencies (R, D) of a kernel whose heads share them."""
    if not isinstance(attention, KernelizedAttention) or attention.kernel.spectrum is None:
        raise ArgumentError(f"{type(attention).__name__} has no frequencies")
    return attention.kernel.spectrum.frequencies()[0]


@torch.no_grad()
def _torch_encoder(ours: Any, shape: PeerShape) -> nn.Module:
    """Return torch's encoder with klformer's weights; the biases of its projections, which klformer has not, are 0."""
    model_dim = shape.heads * shape.head_dim
    layer = nn.TransformerEncoderLayer(
        model_dim, shape.heads, 4 * model_dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    peer: Any = nn.TransformerEncoder(layer, shape.num_layers, nn.LayerNorm(model_dim), enable_nested_tensor=False)
    for theirs, mine in zip(peer.layers, ours.layers, strict=True):
        attention = mine.self_attention
        weights = [attention.query.weight, attention.key.weight, attention.value.weight]
        theirs.self_attn.in_proj_weight.copy_(torch.cat(weights))
        theirs.self_attn.in_proj_bias.zero_()
        theirs.self_attn.out_proj.weight.copy_(attention.out.weight)
        theirs.self_attn.out_proj.bias.zero_()
        _copy(mine.self_norm, theirs.norm1)
        _copy(mine.ffn_norm, theirs.norm2)
        _copy(mine.ffn[0], theirs.linear1)
        _copy(mine.ffn[3], theirs.linear2)
    _copy(ours.norm, peer.norm)
    return peer


@torch.no_grad()
def _performer_encoder(ours: Any, shape: PeerShape) -> nn.Module:
    """Return performer-pytorch's Performer with klformer's weights, and the final normalisation that it leaves to its
    user."""
    model_dim = shape.heads * shape.head_dim
    peer = performer_pytorch().Performer(
        dim=model_dim,
        depth=shape.num_layers,
        heads=shape.heads,
        dim_head=shape.head_dim,
        nb_features=shape.num_frequencies,
        qkv_bias=False,
        attn_out_bias=False,
    )
    for (attend, feed), mine in zip(peer.net.layers, ours.layers, strict=True):
        theirs, attention = attend.fn, mine.self_attention
        for source, target in (
            (attention.query, theirs.to_q),
            (attention.key, theirs.to_k),
            (attention.value, theirs.to_v),
            (attention.out, theirs.to_out),
        ):
            target.weight.copy_(source.weight)
        theirs.fast_attention.projection_matrix.copy_(_frequencies(attention.mechanism))
        _copy(mine.self_norm, attend.norm)
        _copy(mine.ffn_norm, feed.norm)
        _copy(mine.ffn[0], feed.fn.fn.w1)
        _copy(mine.ffn[3], feed.fn.fn.w2)
    norm = nn.LayerNorm(model_dim)
    _copy(ours.norm, norm)
    return nn.Sequential(peer, norm)


def _copy(source: nn.Module, target: nn.Module) -> None:
    target.load_state_dict(source.state_dict())


def _inputs(level: Level, shape: PeerShape, length: int) -> list[Tensor]:
    """Return normal inputs, the same for everyone."""
    generator = torch.Generator().manual_seed(1)
    if level == "encoder":
        return [torch.randn(shape.batch, length, shape.heads * shape.head_dim, generator=generator)]
    sizes = (shape.batch, shape.heads, length, shape.head_dim)
    return [torch.randn(sizes, generator=generator) for _ in range(3)]


def _relative_rms(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).norm() / expected.norm())
