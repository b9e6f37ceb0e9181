"""Launches of the kernels for positive features (`prf.py`): a call's tensors in, results and gradients out.

    absorb   [envelope] states                                    read   attend
    causal   [envelope] states attend          backward of causal  states gradients, and one sum over chunks

The envelope is computed only if there is one, or a mask, or weights of keys.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klformer.ops.spectral_product.operands import Call
from klformer.ops.triton import prf


class States(NamedTuple):
    """What is before each chunk."""

    values: Tensor  # (B, H, chunks, R, E)
    weights: Tensor  # (B, H, chunks, R)
    scale: Tensor  # (B, H, chunks, R)


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
    def of(head_dim: int, value_dim: int, *, half: bool, hip: bool = False) -> "Blocks":
        """Return those for a call.

        Args:
            head_dim: Size D.
            value_dim: Size E.
            half: All operands are stored in half precision, so that products of ten bits lose nothing.
            hip: For AMD, whose units multiply float32 as it is.
        """
        wide = max(head_dim, value_dim) > 64
        precision = "ieee" if hip else "tf32" if half else "tf32x3"
        width, value_width = (max(16, 1 << (size - 1).bit_length()) for size in (head_dim, value_dim))
        return Blocks(
            16 if wide else 32, 16 if wide or not half else 32, width, value_width, precision, 4 if hip else 8
        )

    @property
    def constants(self) -> dict[str, Any]:
        sizes = {"C": self.tokens, "BR": self.frequencies, "BD": self.head_dim, "BE": self.value_dim}
        return sizes | {"PREC": self.precision}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, blocks: Blocks, **constants: Any) -> None:
    """Launch a kernel. The constants of the blocks that it has no use for are left out."""
    constants |= {name: x for name, x in blocks.constants.items() if name in kernel.arg_names}
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
        self.blocks = Blocks.of(call.head_dim, call.value_dim, half=half, hip=torch.version.hip is not None)
        self.omega = kernel.omega.float().contiguous()
        self.a = self.omega[:1] if kernel.frequency_bias is None else kernel.frequency_bias.float().contiguous()
        self.rows = call.batch_size * call.num_heads
        self.length, self.num_frequencies = call.tokens.shape[2], self.omega.shape[1]
        self.chunks = -(-self.length // self.blocks.tokens)
        self.sizes = (self.length, call.num_heads, self.num_frequencies, call.head_dim)
        self.heads = (self.omega.shape[0], self.a.shape[0])
        self.has_a = kernel.frequency_bias is not None
        self.has_bias = bool(
            kernel.simplex or kernel.norm_coefficient or call.key_mask is not None or call.key_bias is not None
        )

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        shape = (self.call.batch_size, self.call.num_heads, *shape)
        return torch.empty(shape, dtype=dtype, device=self.call.device)

    def empty_sums(self) -> list[Tensor]:
        r, e = self.num_frequencies, self.call.value_dim
        return [self.empty(r, e), self.empty(r), self.empty(r)]

    def empty_states(self) -> States:
        r, e = self.num_frequencies, self.call.value_dim
        return States(self.empty(self.chunks, r, e), self.empty(self.chunks, r), self.empty(self.chunks, r))

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

    def states(
        self,
        x: Tensor,
        y: Tensor,
        bias: Tensor | None,
        before: Sequence[Tensor] | None,
        *,
        store: bool = False,
        gradient: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[States | None, list[Tensor]]:
        """Return what is before each chunk, if that is to be stored, and what is left after all.

        Args:
            x: Keys; queries for gradients.
            y: Values; gradients of results.
            bias: Log-weights; log-sums for gradients.
            before: Sums to go on from; for gradients those of the final sums, which are gone back from.
            store: Store what is before each chunk.
            gradient: Results and the gradients of log-sums.
        """
        call, after = self.call, self.empty_sums()
        found = self.empty_states() if store else None
        x, y = inner(x), inner(y)
        start = [t.contiguous() for t in before] if before is not None else after
        out, d_log = gradient or (x, x)
        arguments = (
            x,
            y,
            x if bias is None else bias,
            out,
            d_log,
            self.omega,
            self.a,
            *start,
            *(found or after),
            *after,
        )
        launch(
            prf.states_kernel,
            (-(-self.num_frequencies // self.blocks.frequencies), self.rows),
            *arguments,
            math.log(self.num_frequencies),
            *self.sizes,
            call.value_dim,
            self.chunks,
            *self.heads,
            *x.stride()[:3],
            *y.stride()[:3],
            GRADIENT=gradient is not None,
            HAS_BIAS=bias is not None,
            HAS_A=self.has_a and gradient is not None,
            HAS_0=before is not None,
            STORE=store,
            REVERSE=gradient is not None,
            blocks=self.blocks,
        )
        return found, after

    def empty_exact(self) -> list[Tensor]:
        """Return room for results before they are rounded, if they are."""
        return [self.empty(self.length, self.call.value_dim)] if self.call.tokens.dtype.itemsize == 2 else []

    def attend(self, states: Sequence[Tensor], bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return results, log-sums, which chunks had lost terms, and results that were not rounded, if others were; of
        queries alone or of a causal call."""
        call, causal = self.call, self.call.step == "causal"
        assert call.q is not None
        q = inner(call.q)
        k, v = (inner(call.k), inner(call.v)) if call.k is not None and call.v is not None else (q, q)
        out = self.empty(self.length, call.value_dim, dtype=q.dtype)
        log_sum, lost = self.empty(self.length), self.empty(self.chunks if causal else 0, dtype=torch.int32)
        exact = self.empty_exact()
        launch(
            prf.attend_kernel,
            (self.chunks, self.rows),
            *(q, k, v, q if bias is None else bias, self.omega, self.a, *states, out, *(exact or [out]), log_sum, lost),
            math.log(self.num_frequencies),
            *self.sizes,
            call.value_dim,
            self.chunks,
            *self.heads,
            0,
            *(stride for x in (q, k, v) for stride in x.stride()[:3]),
            CAUSAL=causal,
            HAS_BIAS=bias is not None,
            HAS_A=self.has_a,
            HAS_EXACT=bool(exact),
            blocks=self.blocks,
        )
        return out, log_sum, lost, exact

    def gradients(
        self,
        states: Sequence[Tensor],
        d_omega: Tensor,
        *,
        keys: bool,
        results: Sequence[Tensor] = (),
        envelope: Sequence[Tensor] = (),
        lost: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return gradients by name, of the queries or of the keys and values.

        Args:
            states: What queries read; for keys the gradients of sums, or what is after each chunk.
            d_omega: Where each chunk's part of the gradients of omega and of a goes.
            keys: Those of keys and values.
            results: Results, log-sums, and the gradients of both, unless only keys are there.
            envelope: What `envelope` returned.
            lost: What `attend` returned, for causal calls.
        """
        call, tensor = self.call, self.omega
        sizes = {"q": call.head_dim} if not keys else {"k": call.head_dim, "v": call.value_dim}
        found = {name: self.empty(self.length, size) for name, size in sizes.items()}
        if keys:
            found["key_bias"] = self.empty(self.length)
        tokens = [inner(x) for x in (call.q, call.k, call.v) if x is not None]
        given = [tokens[0] if x is None else inner(x) for x in (call.q, call.k, call.v)]
        out, log_sum, d_out, d_log = results or (tokens[0],) * 4
        d_out = inner(d_out)
        bias, simplex = (envelope[0], envelope[-1]) if envelope else (tensor, tensor)
        places = [found.get(name, tensor) for name in ("q", "k", "v", "key_bias")]
        launch(
            prf.gradients_kernel,
            (self.chunks, self.rows),
            *(*given, bias, simplex, out, log_sum, d_out, d_log, self.omega, self.a, *states),
            *(tensor if lost is None else lost, *places, d_omega),
            float(call.kernel.norm_coefficient),
            math.log(self.num_frequencies),
            *(*self.sizes, call.value_dim, self.chunks, *self.heads, 0),
            *(stride for x in (*given, d_out) for stride in x.stride()[:3]),
            KEYS=keys,
            PAIRS=lost is not None,
            HAS_BIAS=bool(envelope),
            HAS_A=self.has_a,
            SIMPLEX=call.kernel.simplex,
            blocks=self.blocks,
        )
        return found

    def empty_parameters(self, parts: int) -> Tensor:
        """Return room for the gradients of omega and a, chunk by chunk, (parts, B, H, chunks, R, D + 1)."""
        rows = (parts, self.call.batch_size, self.call.num_heads, self.chunks)
        return torch.empty(*rows, self.num_frequencies, self.call.head_dim + 1, device=self.call.device)

    def parameters(self, parts: Tensor) -> dict[str, Tensor]:
        """Return the gradients of omega and a by name: their parts added up."""
        shared = max(self.omega.shape[0], self.a.shape[0]) == 1
        found = parts.sum((0, 1, 2, 3)).unsqueeze(0) if shared else parts.sum((0, 1, 3))
        return {"omega": found[..., :-1], "frequency_bias": found[..., -1]}


def inner(x: Tensor) -> Tensor:
    """Return a tensor whose last axis is dense."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_kept(call: Call) -> list[Tensor]:
    """Return uninitialised tensors like those after the results of `forward`."""
    at = Launcher(call)
    if call.step == "absorb":
        return at.empty_envelope()
    if call.step == "read":
        return at.empty_exact()
    lost = at.empty(at.chunks, dtype=torch.int32)
    return [*at.empty_states(), lost, *at.empty_exact(), *at.empty_envelope()]


def forward(call: Call) -> list[Tensor]:
    """Return the results of a step, and what backward needs."""
    at = Launcher(call)
    if call.step == "read":
        assert call.sums is not None
        out, log_sum, _, exact = at.attend([x.contiguous() for x in call.sums], None)
        return [out, log_sum, *exact]
    assert call.k is not None
    assert call.v is not None
    envelope = at.envelope()
    bias = envelope[0] if envelope else None
    states, sums = at.states(call.k, call.v, bias, call.sums, store=call.step == "causal")
    if states is None:
        return [*sums, *envelope]
    out, log_sum, lost, exact = at.attend(states, bias)
    return [out, log_sum, *sums, *states, lost, *exact, *envelope]


def backward(call: Call, outputs: Sequence[Tensor], d_results: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Return all gradients by name, those of parameters for every head and perhaps every sequence."""
    at = Launcher(call)
    if call.step == "absorb":
        d_sums = [torch.zeros_like(x) if d is None else d for x, d in zip(outputs[:2], d_results[:2], strict=True)]
        states, parts = [*(x.contiguous() for x in d_sums), outputs[2]], at.empty_parameters(1)
        found = at.gradients(states, parts[0], keys=True, envelope=outputs[3:])
        return found | at.parameters(parts)
    assert call.q is not None
    out, log_sum = outputs[:2]
    d_out, d_log = (torch.zeros_like(x) if d is None else d for x, d in zip(outputs[:2], d_results[:2], strict=True))
    d_log, kept = d_log.contiguous(), list(outputs[2 if call.step == "read" else 9 :])
    if at.empty_exact():
        out = kept.pop(0)
    results = (out, log_sum, d_out, d_log)
    if call.step == "read":
        assert call.sums is not None
        states, parts = [x.contiguous() for x in call.sums], at.empty_parameters(1)
        _, d_before = at.states(call.q, d_out, log_sum, None, gradient=(out, d_log))
        found = at.gradients(states, parts[0], keys=False, results=results)
    else:
        final, parts = None, at.empty_parameters(2)
        if d_results[2] is not None or d_results[3] is not None:
            pairs = zip(outputs[2:4], d_results[2:4], strict=True)
            final = [*(torch.zeros_like(x) if d is None else d for x, d in pairs), outputs[4]]
        later, d_before = at.states(call.q, d_out, log_sum, final, store=True, gradient=(out, d_log))
        assert later is not None
        given: dict[str, Any] = {"results": results, "lost": outputs[8], "envelope": kept}
        found = at.gradients(outputs[5:8], parts[0], keys=False, **given)
        found |= at.gradients(later, parts[1], keys=True, **given)
    found |= at.parameters(parts)
    return found | (_of_sums(call, d_before) if call.sums is not None else {})


def _of_sums(call: Call, d_before: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the gradients of the sums that queries read, which are relative to a scale."""
    assert call.sums is not None
    d_values, d_weights, scale = d_before
    factor = (call.sums.log_scale + scale).exp()
    d_values, d_weights = d_values * factor.unsqueeze(-1), d_weights * factor
    d_scale = (d_values * call.sums.values).sum(-1) + d_weights * call.sums.weights
    return {"values": d_values, "weights": d_weights, "log_scale": d_scale}
