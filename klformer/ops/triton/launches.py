"""What launches of kernels have in common: sizes of blocks, and the tensors of a call as kernels take them."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from klformer.ops.spectral_product.operands import Call
from klformer.ops.triton import prf


@dataclass(frozen=True)
class Blocks:
    """Sizes of blocks: constants that kernels are compiled for."""

    tokens: int
    frequencies: int
    head_dim: int
    value_dim: int
    precision: str
    warps: int

    @staticmethod
    def of(
        head_dim: int,
        value_dim: int,
        *,
        half: bool,
        hip: bool = False,
        causal: bool = False,
        cosines: bool = False,
    ) -> "Blocks":
        """Return those for a call: the largest that registers hold.

        Args:
            head_dim: Size D.
            value_dim: Size E.
            half: All operands are stored in half precision, so that products of ten bits lose nothing.
            hip: For AMD, whose units multiply float32 as it is.
            causal: A causal call, whose kernels have pairs of tokens beside a state.
            cosines: Features are cosines and sines.
        """
        wide = max(head_dim, value_dim) > 64
        few_tokens = wide or cosines or (causal and not half)
        precision = "ieee" if hip else "tf32" if half else "tf32x3"
        width, value_width = (max(16, 1 << (size - 1).bit_length()) for size in (head_dim, value_dim))
        tokens, frequencies = (16 if few else 32 for few in (few_tokens, wide or not half))
        return Blocks(tokens, frequencies, width, value_width, precision, 4 if hip else 8)

    def for_gradients(self, *, keys: bool, tight: bool) -> "Blocks":
        """Return those for gradients, which take the most registers: three products in tf32 for one are too much.

        Args:
            keys: Gradients of keys.
            tight: Of pairs of tokens or of frequencies.
        """
        if self.precision == "tf32x3":
            return replace(self, precision="ieee") if tight else self
        return replace(self, frequencies=16) if keys and tight else self

    @property
    def constants(self) -> dict[str, Any]:
        sizes = {"C": self.tokens, "BR": self.frequencies, "BD": self.head_dim, "BE": self.value_dim}
        return sizes | {"PREC": self.precision}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, blocks: Blocks, **constants: Any) -> None:
    """Launch a kernel on the device of its first argument. The constants of the blocks that it has no use for are left
    out."""
    constants |= {name: x for name, x in blocks.constants.items() if name in kernel.arg_names}
    with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
        kernel[grid](*arguments, **constants, num_warps=blocks.warps, num_stages=1)


class Launcher:
    """The launches of one call.

    Args:
        call: Absorb, read or causal.
    """

    def __init__(self, call: Call) -> None:
        self.call, kernel = call, call.kernel
        assert kernel.omega is not None
        stored = [x for x in (call.q, call.k, call.v) if x is not None]
        half = all(x.dtype.itemsize == 2 for x in stored)
        self.blocks = Blocks.of(
            call.head_dim,
            call.value_dim,
            half=half,
            hip=torch.version.hip is not None,
            causal=call.step == "causal",
            cosines=call.feature_map.name == "rks",
        )
        self.omega = kernel.omega.float().contiguous()
        self.a = self.omega[:1] if kernel.frequency_bias is None else kernel.frequency_bias.float().contiguous()
        self.rows = call.batch_size * call.num_heads
        self.length, self.num_frequencies = call.tokens.shape[2], self.omega.shape[1]
        self.chunks = -(-self.length // self.blocks.tokens)
        self.sizes = (self.length, call.num_heads, self.num_frequencies, call.head_dim)
        self.heads: tuple[int, ...] = (self.omega.shape[0], self.a.shape[0])
        self.has_a = kernel.frequency_bias is not None
        self.has_bias = bool(
            kernel.simplex or kernel.norm_coefficient or call.key_mask is not None or call.key_bias is not None
        )

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        shape = (self.call.batch_size, self.call.num_heads, *shape)
        return torch.empty(shape, dtype=dtype, device=self.call.device)

    def empty_envelope(self) -> list[Tensor]:
        """Return room for the log-weight of every key, and with a simplex envelope for its log-sum of scores."""
        kept = self.has_bias + self.call.kernel.simplex
        return [self.empty(self.length) for _ in range(kept)]

    def envelope(self) -> list[Tensor]:
        """Return the log-weights of the keys, and what a simplex envelope keeps; nothing if all are 0."""
        call, found = self.call, self.empty_envelope()
        if not found:
            return found
        assert call.k is not None
        rows = (call.batch_size, call.num_heads, self.length)
        k, omega = inner(call.k), self.omega
        mask = k if call.key_mask is None else call.key_mask.expand(rows)
        key_bias = k if call.key_bias is None else call.key_bias.expand(rows)
        strides = (*k.stride()[:3], *mask.stride()[:3], *key_bias.stride()[:3])
        has = {"HAS_MASK": call.key_mask is not None, "HAS_BIAS": call.key_bias is not None}
        constants = (float(call.kernel.norm_coefficient), math.log(self.num_frequencies))
        tensors = (k, mask, key_bias, omega, found[0], found[-1])
        grid, sizes = (self.chunks, self.rows), (*self.sizes, omega.shape[0])
        launch(
            prf.envelope_kernel, grid, *tensors, *constants, *sizes, *strides, **has,
            SIMPLEX=call.kernel.simplex, blocks=self.blocks,
        )  # fmt: skip
        return found

    def empty_exact(self) -> list[Tensor]:
        """Return room for results before they are rounded, if they are."""
        return [self.empty(self.length, self.call.value_dim)] if self.call.tokens.dtype.itemsize == 2 else []


def inner(x: Tensor) -> Tensor:
    """Return a tensor whose last axis is dense."""
    return x if x.stride(-1) == 1 else x.contiguous()
