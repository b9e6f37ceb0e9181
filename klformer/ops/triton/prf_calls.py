"""Launches of the kernels for positive features (`prf.py`): a call's tensors in, results and gradients out.

    absorb   [envelope] states                                    read   attend
    causal   [envelope] states attend          backward of causal  states gradients, and one sum over chunks

The envelope is computed only if there is one, or a mask, or weights of keys.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klformer.ops.spectral_product.operands import Call
from klformer.ops.triton import prf
from klformer.ops.triton.launches import Launcher, inner, launch


class States(NamedTuple):
    """What is before each chunk."""

    values: Tensor  # (B, H, chunks, R, E)
    weights: Tensor  # (B, H, chunks, R)
    scale: Tensor  # (B, H, chunks, R)


class PrfLauncher(Launcher):
    """The launches of one call with positive features."""

    def empty_sums(self) -> list[Tensor]:
        r, e = self.num_frequencies, self.call.value_dim
        return [self.empty(r, e), self.empty(r), self.empty(r)]

    def empty_states(self) -> States:
        r, e = self.num_frequencies, self.call.value_dim
        return States(self.empty(self.chunks, r, e), self.empty(self.chunks, r), self.empty(self.chunks, r))

    def states(
        self,
        x: Tensor,
        y: Tensor,
        bias: Tensor | None,
        before: Sequence[Tensor] | None,
        *,
        store: bool = False,
        gradient: tuple[Tensor, Tensor | None] | None = None,
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
        out, d_log = gradient or (x, None)
        arguments = (
            x,
            y,
            x if bias is None else bias,
            out,
            out if d_log is None else d_log,
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
            HAS_LOG=d_log is not None,
            HAS_BIAS=bias is not None,
            HAS_A=self.has_a and gradient is not None,
            HAS_0=before is not None,
            STORE=store,
            REVERSE=gradient is not None,
            blocks=self.blocks,
        )
        return found, after

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
        results: tuple[Tensor, Tensor, Tensor, Tensor | None] | None = None,
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
        out, log_sum, d_out, d_log = results or (tokens[0], tokens[0], tokens[0], None)
        d_out = inner(d_out)
        bias, simplex = (envelope[0], envelope[-1]) if envelope else (tensor, tensor)
        blocks = self.blocks.for_gradients(
            keys=keys, tight=keys and (lost is not None or self.blocks.precision == "tf32x3")
        )
        places = [found.get(name, tensor) for name in ("q", "k", "v", "key_bias")]
        launch(
            prf.gradients_kernel,
            (self.chunks, self.rows),
            *(*given, bias, simplex, out, log_sum, d_out, out if d_log is None else d_log, self.omega, self.a, *states),
            *(tensor if lost is None else lost, *places, d_omega),
            float(call.kernel.norm_coefficient),
            math.log(self.num_frequencies),
            *(*self.sizes, call.value_dim, self.chunks, *self.heads, 0),
            *(stride for x in (*given, d_out) for stride in x.stride()[:3]),
            KEYS=keys,
            PAIRS=lost is not None,
            HAS_BIAS=bool(envelope),
            HAS_A=self.has_a,
            HAS_LOG=d_log is not None,
            SIMPLEX=call.kernel.simplex,
            blocks=blocks,
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


def empty_kept(call: Call) -> list[Tensor]:
    """Return uninitialised tensors like those after the results of `forward`."""
    at = PrfLauncher(call)
    if call.step == "absorb":
        return at.empty_envelope()
    if call.step == "read":
        return at.empty_exact()
    lost = at.empty(at.chunks, dtype=torch.int32)
    return [*at.empty_states(), lost, *at.empty_exact(), *at.empty_envelope()]


def forward(call: Call) -> list[Tensor]:
    """Return the results of a step, and what backward needs."""
    at = PrfLauncher(call)
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


def backward(
    call: Call, outputs: Sequence[Tensor], d_results: Sequence[Tensor | None], needed: Collection[str]
) -> dict[str, Tensor]:
    """Return all gradients by name, those of parameters for every head and perhaps every sequence."""
    at = PrfLauncher(call)
    if call.step == "absorb":
        d_sums = [torch.zeros_like(x) if d is None else d for x, d in zip(outputs[:2], d_results[:2], strict=True)]
        states, parts = [*(x.contiguous() for x in d_sums), outputs[2]], at.empty_parameters(1)
        found = at.gradients(states, parts[0], keys=True, envelope=outputs[3:])
        return found | at.parameters(parts)
    assert call.q is not None
    out, log_sum = outputs[:2]
    d_out, d_log = (torch.zeros_like(out) if d_results[0] is None else d_results[0]), d_results[1]
    d_log, kept = None if d_log is None else d_log.contiguous(), list(outputs[2 if call.step == "read" else 9 :])
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
