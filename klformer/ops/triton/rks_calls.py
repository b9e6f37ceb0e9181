"""Launches of the kernels for random kitchen sinks (`rks.py`): a call's tensors in, results and gradients out.

    absorb   [envelope] sums           backward   gradients
    read     attend                    backward   gradients
    causal   [envelope] sums attend    backward   sums gradients gradients, and one sum over chunks

The envelope is there to see which keys are, and their weights. Gradients of parameters are added up over sequences
where there are several.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klformer.ops.spectral_product.operands import Call, Sums
from klformer.ops.triton import rks
from klformer.ops.triton.launches import Launcher, inner, launch


class Seen(NamedTuple):
    """What queries saw: kept for backward, or parts of a state that all have seen."""

    n: Tensor  # (B, H, L), relative to m
    t: Tensor  # (B, H, L or F)
    m: Tensor  # (B, H, L or 1)
    total: Tensor  # (B, H, L or F, E)


class RksLauncher(Launcher):
    """The launches of one call with random kitchen sinks.

    Args:
        call: Absorb, read or causal.
        needed: Names of gradients, for backward.
    """

    def __init__(self, call: Call, needed: Collection[str] = ()) -> None:
        super().__init__(call)
        self.needed = frozenset(needed)
        offset, smoothing = call.kernel.pair_offset, call.kernel.smoothing
        self.offset = self.omega if offset is None else offset.float().contiguous()
        self.smoothing = self.omega if smoothing is None else smoothing.float().contiguous()
        self.has = {"SMOOTH": smoothing is not None, "PARTS": 1 if offset is None else 2, "HAS_A": self.has_a}
        self.heads = (*self.heads, self.offset.shape[0], self.smoothing.shape[0])
        self.features = call.kernel.state_features(call.head_dim)
        self.tiles = self.has["PARTS"] * -(-self.num_frequencies // self.blocks.frequencies)
        self.of_kernel = (self.omega, self.a, self.offset)

    def empty_sums(self, *chunks: int) -> Sums:
        shape = (*chunks, self.features)
        return Sums(self.empty(*shape, self.call.value_dim), self.empty(*shape), self.empty(*(chunks or (1,))))

    def empty_seen(self) -> Seen:
        """Return room for what is kept: only n where all queries read one state."""
        causal = self.call.step == "causal"
        held = causal and self.has["SMOOTH"]
        total = self.empty(self.length if held else 0, self.call.value_dim)
        rows = (self.length, self.length if held else 0, self.length if causal else 0)
        n, t, m = (self.empty(size) for size in rows)
        return Seen(n, t, m, total)

    def sums(
        self,
        x: Tensor,
        y: Tensor,
        bias: Tensor | None,
        before: Sums | None,
        *,
        store: bool = False,
        gradient: tuple[Tensor, Tensor | None, Seen] | None = None,
    ) -> tuple[Sums, Sums]:
        """Return the sums before each chunk, if they are to be stored, and those of all tokens.

        Args:
            x: Keys; queries for gradients.
            y: Values; gradients of results.
            bias: Log-weights.
            before: Sums to go on from; for gradients those of the final sums, with their scale.
            store: Store what is before each chunk.
            gradient: Results, the gradients of log-sums, and what queries saw.
        """
        call, after = self.call, self.empty_sums()
        found = self.empty_sums(self.chunks) if store else after
        x, y = inner(x), inner(y)
        out, d_log, seen = gradient or (x, x, Seen(x, x, x, x))
        launch(
            rks.sums_kernel,
            (self.tiles, self.rows),
            *(x, y, (x if bias is None else bias) if gradient is None else seen.m),
            *(out, out if d_log is None else d_log, seen.n, seen.t, seen.total, self.smoothing, *self.of_kernel),
            *(after if before is None else (t.contiguous() for t in before)),
            *(*found, *after, *self.sizes, call.value_dim, self.chunks, *self.heads),
            *(*x.stride()[:3], *y.stride()[:3]),
            GRADIENT=gradient is not None,
            HAS_LOG=d_log is not None,
            HAS_BIAS=bias is not None,
            HAS_0=before is not None,
            STORE=store,
            **self.has,
            blocks=self.blocks,
        )
        return found, after

    def attend(self, states: Sums, bias: Tensor | None) -> tuple[Tensor, Tensor, Seen, list[Tensor]]:
        """Return results, log-sums, what queries saw, and results that were not rounded, if others were."""
        call, causal = self.call, self.call.step == "causal"
        assert call.q is not None
        q = inner(call.q)
        k, v = (inner(call.k), inner(call.v)) if call.k is not None and call.v is not None else (q, q)
        out = self.empty(self.length, call.value_dim, dtype=q.dtype)
        log_sum, seen, exact = self.empty(self.length), self.empty_seen(), self.empty_exact()
        launch(
            rks.attend_kernel,
            (self.chunks, self.rows),
            *(q, k, v, q if bias is None else bias, self.smoothing, *self.of_kernel, *states),
            *(out, *(exact or [out]), log_sum, *seen, math.log(self.num_frequencies)),
            *(*self.sizes, call.value_dim, self.chunks, *self.heads, 0),
            *(stride for x in (q, k, v) for stride in x.stride()[:3]),
            CAUSAL=causal,
            HAS_BIAS=bias is not None,
            HAS_EXACT=bool(exact),
            **self.has,
            blocks=self.blocks,
        )
        return out, log_sum, seen, exact

    def gradients(
        self,
        states: Sums,
        *,
        keys: bool,
        results: tuple[Tensor, Tensor, Tensor | None] | None = None,
        parts: tuple[Tensor, Tensor],
        seen: Seen | None = None,
        bias: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], Sums]:
        """Return gradients of queries or of keys by name, and where queries read one state that of it.

        Args:
            states: What queries read; for keys the gradients of what they went into, with their scale.
            keys: Those of keys and values.
            results: Results, and the gradients of both, unless only keys are there.
            parts: Where those of parameters go.
            seen: What queries saw.
            bias: Log-weights of keys.
        """
        call, tensor = self.call, self.omega
        pairs = call.step == "causal"
        tokens = [inner(x) for x in (call.q, call.k, call.v) if x is not None]
        q, k, v = (tokens[0] if x is None else inner(x) for x in (call.q, call.k, call.v))
        out, d_out, d_log = results or (tokens[0], tokens[0], None)
        d_out = inner(d_out)
        sizes: dict[str, tuple[int, ...]] = {"q": (call.head_dim,)}
        if keys:
            sizes = {"k": (call.head_dim,), "v": (call.value_dim,), "key_bias": ()}
        if self.has["SMOOTH"] and not keys:
            sizes["smoothing"] = ()
        found = {name: self.empty(self.length, *size) for name, size in sizes.items()}
        n, t, m, total = seen or (tensor,) * 4
        strides: tuple[int, ...] = (self.length, 1, self.length, 1)
        if call.step == "read":  # all of them saw the whole state
            t, m, total = states.weights[..., -1:], states.log_scale, states.values[..., -1:, :]
            strides = (1, 0, self.features, 0)
        blocks = self.blocks.for_gradients(keys=keys, tight=pairs or self.has["PARTS"] == 2)
        d_sums = self.empty_sums() if call.step == "read" else states
        launch(
            rks.gradients_kernel,
            (self.chunks + (0 if pairs else self.tiles), self.rows),
            *(q, k, v, tensor if bias is None else bias, out, d_out, out if d_log is None else d_log),
            *(n, t, m, total, self.smoothing, *self.of_kernel, *states),
            *(found.get(name, tensor) for name in ("q", "k", "v", "key_bias", "smoothing")),
            *(*d_sums, *parts, *self.sizes, call.value_dim, self.chunks, *self.heads, 0, *strides),
            *(stride for x in (q, k, v, d_out) for stride in x.stride()[:3]),
            KEYS=keys,
            PAIRS=pairs,
            HAS_BIAS=bias is not None,
            HAS_LOG=d_log is not None,
            **self.has,
            blocks=blocks,
        )
        return found, d_sums

    def empty_parts(self, count: int) -> tuple[Tensor, Tensor]:
        """Return room for parts of the gradients of omega and a, and of the offset, (count, B, H, pieces, ...)."""
        causal, call = self.call.step == "causal", self.call
        rows = (count, call.batch_size, call.num_heads)
        pieces, tiles = (self.chunks, self.chunks) if causal else (self.has["PARTS"], self.tiles)
        of_omega = (*rows, pieces, self.num_frequencies, call.head_dim + 1)
        of_offset = (*rows, tiles if self.has["PARTS"] == 2 else 0, call.head_dim)
        return torch.empty(of_omega, device=call.device), torch.empty(of_offset, device=call.device)

    def parameters(self, parts: tuple[Tensor, Tensor], smoothing: Tensor | None = None) -> dict[str, Tensor]:
        """Return the gradients of parameters for every head: their parts added up, of the smoothing one for a query."""
        found = dict[str, Tensor]()
        if self.needed & {"omega", "frequency_bias"}:
            of_omega = _added_up(parts[0])
            found = {"omega": of_omega[..., :-1], "frequency_bias": of_omega[..., -1]}
        if "pair_offset" in self.needed:
            found["pair_offset"] = _added_up(parts[1])
        if "smoothing" in self.needed and smoothing is not None:
            found["smoothing"] = _added_up(smoothing.unsqueeze(0))
        return found


def _added_up(parts: Tensor) -> Tensor:
    """Return (H, ...) of (count, B, H, pieces, ...)."""
    one = parts.shape[0] * parts.shape[1] * parts.shape[3] == 1
    return parts[0, 0, :, 0] if one else parts.sum((0, 1, 3))


def empty_kept(call: Call) -> list[Tensor]:
    """Return uninitialised tensors like those after the results of `forward`."""
    at = RksLauncher(call)
    if call.step == "absorb":
        return at.empty_envelope()
    kept = [*at.empty_seen(), *at.empty_exact()]
    return kept + ([*at.empty_sums(at.chunks), *at.empty_envelope()] if call.step == "causal" else [])


def forward(call: Call) -> list[Tensor]:
    """Return the results of a step, and what backward needs."""
    at = RksLauncher(call)
    if call.step == "read":
        assert call.sums is not None
        out, log_sum, seen, exact = at.attend(_dense(call.sums), None)
        return [out, log_sum, *seen, *exact]
    assert call.k is not None
    assert call.v is not None
    envelope = at.envelope()
    bias = envelope[0] if envelope else None
    states, sums = at.sums(call.k, call.v, bias, call.sums, store=call.step == "causal")
    if call.step == "absorb":
        return [*sums, *envelope]
    out, log_sum, seen, exact = at.attend(states, bias)
    return [out, log_sum, *sums, *seen, *exact, *states, *envelope]


def backward(
    call: Call, outputs: Sequence[Tensor], d_results: Sequence[Tensor | None], needed: Collection[str]
) -> dict[str, Tensor]:
    """Return the gradients that are needed by name, those of parameters for every head."""
    at = RksLauncher(call, needed)
    if call.step == "absorb":
        later = _of_sums(outputs[:3], d_results)
        parts, bias = at.empty_parts(1), outputs[3] if len(outputs) > 3 else None
        found, _ = at.gradients(later, keys=True, parts=(parts[0][0], parts[1][0]), bias=bias)
        return found | at.parameters(parts)
    assert call.q is not None
    d_out, d_log = torch.zeros_like(outputs[0]) if d_results[0] is None else d_results[0], d_results[1]
    d_log, kept = None if d_log is None else d_log.contiguous(), list(outputs[2 if call.step == "read" else 5 :])
    seen, kept = Seen(*kept[:4]), kept[4:]
    out = kept.pop(0) if at.empty_exact() else outputs[0]
    if call.step == "read":
        assert call.sums is not None
        parts = at.empty_parts(1)
        given: dict[str, Any] = {"results": (out, d_out, d_log), "seen": seen}
        found, d_sums = at.gradients(_dense(call.sums), keys=False, parts=(parts[0][0], parts[1][0]), **given)
        found |= {"values": d_sums.values, "weights": d_sums.weights} | at.parameters(parts, found.get("smoothing"))
        return found | (_of_scale(call.sums, found) if "log_scale" in needed else {})
    states, bias = Sums(*kept[:3]), kept[3] if len(kept) > 3 else None
    final = None
    if d_results[2] is not None or d_results[3] is not None:
        final = _of_sums(outputs[2:5], d_results[2:])
    later, d_before = at.sums(call.q, d_out, None, final, store=True, gradient=(out, d_log, seen))
    parts, given = at.empty_parts(2), {"results": (out, d_out, d_log), "seen": seen, "bias": bias}
    found, _ = at.gradients(states, keys=False, parts=(parts[0][0], parts[1][0]), **given)
    found |= at.gradients(later, keys=True, parts=(parts[0][1], parts[1][1]), **given)[0]
    found |= at.parameters(parts, found.get("smoothing"))
    if call.sums is not None:
        factor = (call.sums.log_scale + d_before.log_scale).exp()  # each is relative to its scale
        found |= {"values": d_before.values * factor.unsqueeze(-1), "weights": d_before.weights * factor}
        found |= _of_scale(call.sums, found)
    return found


def _of_sums(sums: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Sums:
    """Return the gradients of sums, zeros where there are none, with the scale of the sums."""
    values, weights = (torch.zeros_like(x) if d is None else d for x, d in zip(sums[:2], gradients[:2], strict=True))
    return _dense(Sums(values, weights, sums[2]))


def _dense(sums: Sums) -> Sums:
    return Sums(*(x.contiguous() for x in sums))


def _of_scale(sums: Sums, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of a log-scale, whose exponential is a factor of values and weights."""
    by_feature = (found["values"] * sums.values).sum(-1) + found["weights"] * sums.weights
    return {"log_scale": by_feature.sum(-1, keepdim=True)}
