"""States as values: what attention keeps of keys and values, absorbed apart, merged in any order, kept in files.

    (m, S) + (m', S') = (M, exp(m - M) S + exp(m' - M) S')      M = max(m, m')

S are the sums over the keys and m the logarithm that they are relative to (`Sums` in operands.py). For exponential maps
m is that of each feature, so that no document is too far from another to be merged with it; for the others it is the
largest log-weight, 0 where keys have none. The operation is associative and commutative but for rounding: a state of
all documents is that of their concatenation, whoever absorbed them, wherever, in whatever order.

Everything here is differentiable, and a state knows its kernel: what was absorbed with one is not read with another.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from klformer.errors import ArgumentError, FileError
from klformer.files import replacing
from klformer.ops.feature_maps import FEATURE_MAPS
from klformer.ops.shapes import check_key_bias, check_operands
from klformer.ops.spectral_product.dispatch import choose_backend
from klformer.ops.spectral_product.operands import (
    NO_KEY,
    OF_KERNEL,
    Call,
    SpectralKernel,
    Sums,
    check_kernel,
    checked_kernel,
    kept_keys,
)

#: Of the files; one of another version is refused by its name.
FORMAT = "klformer-state-2"


class KernelState:
    """All that attention with one kernel needs of the keys and values that it has absorbed: a few matrices.

    A state is a value: its methods leave it as it is and return another. Make one with `KernelState.of`, with
    `kernel_state` of an attention, or with `absorb`.

    Args:
        kernel: What keys were absorbed with.
        sums: What they add up to.

    Examples:
        >>> import torch, klformer
        >>> omega = torch.randn(4, 64, 16)
        >>> documents = [torch.randn(2, 1, 4, length, 16) for length in (1000, 50)]  # keys and values
        >>> first, second = (klformer.KernelState.of(k, v, omega, feature_map="prf") for k, v in documents)
        >>> q = torch.randn(1, 4, 3, 16)
        >>> klformer.KernelState.merge(first, second).read(q).shape
        torch.Size([1, 4, 3, 16])

        To absorb the second document after the first gives the same, and so does another reference. With a weight, the
        keys of a document count more:

        >>> merged = klformer.KernelState.merge(first, second)
        >>> torch.allclose(first.absorb(*documents[1]).read(q), merged.read(q), atol=1e-4)
        True
        >>> torch.allclose(merged.shift(merged.reference + 1).read(q), merged.read(q), atol=1e-4)
        True
        >>> klformer.KernelState.merge(first, second.weigh(2.0))
        KernelState('prf', batch_size=1, num_heads=4, value_dim=16)
        >>> torch.allclose(first.absorb_(*documents[1]).read(q), merged.read(q), atol=1e-4)  # now the first is changed
        True
    """

    def __init__(self, kernel: SpectralKernel, sums: Sums) -> None:
        self.kernel = kernel
        self.sums = sums
        self._versions: tuple[int, ...] | None = None if torch.compiler.is_compiling() else kernel.versions()
        #: What an attention knows its own states by.
        self.made_by: object = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._versions = self.kernel.versions()  # copies have others

    @staticmethod
    def of(
        k: Tensor,
        v: Tensor,
        omega: Tensor | None,
        *,
        feature_map: str,
        key_mask: Tensor | None = None,
        key_bias: Tensor | None = None,
        frequency_bias: Tensor | None = None,
        pair_offset: Tensor | None = None,
        smoothing: float | Tensor = 0.0,
    ) -> "KernelState":
        """Return the state of some keys and values. Other arguments are those of `spectral_product`.

        Args:
            k: Keys (B, H, S, D); S may be 0.
            v: Values (B, H, S, E).
            omega: Frequencies (H or 1, R, D), of which the state has a copy; None for "elu".
            feature_map: "rks", "prf" or "elu".
            key_mask: (B, S), True = keep.
            key_bias: Log-weights of the keys, (B or 1, H or 1, S).
            frequency_bias: Log-weights of the frequencies, (H or 1, R).
            pair_offset: (H or 1, D), "rks" only.
            smoothing: A number, or (H or 1,); "rks" only.

        Raises:
            ArgumentError: a shape or a combination of arguments is impossible.
        """
        check_operands(k, k, v, key_mask=key_mask)
        kernel = checked_kernel(
            feature_map, k, omega, pair_offset=pair_offset, frequency_bias=frequency_bias, smoothing=smoothing
        )
        return absorb(kernel.copy(), k, v, key_mask=key_mask, key_bias=key_bias)

    @staticmethod
    def empty(
        kernel: SpectralKernel, *, like: Tensor, batch_size: int, num_heads: int, value_dim: int
    ) -> "KernelState":
        """Return the state before any key.

        Args:
            kernel: With its frequencies.
            like: (..., D), of the device and the precision that the state is to have, which is float32 at least.
            batch_size: Sequences B.
            num_heads: Heads H.
            value_dim: Size E of values.

        Examples:
            >>> import torch, klformer
            >>> kernel = klformer.build_attention("gmm-prf", num_heads=2, head_dim=8).kernel.present()
            >>> klformer.KernelState.empty(kernel, like=torch.empty(8), batch_size=1, num_heads=2, value_dim=8)
            KernelState('prf', batch_size=1, num_heads=2, value_dim=8, no key yet)
        """
        head_dim, dtype = like.shape[-1], torch.promote_types(like.dtype, torch.float32)
        rows, features = (batch_size, num_heads), kernel.state_features(head_dim)
        scales = kernel.num_projections(head_dim) if kernel.feature_map.exponential else 1
        values = torch.zeros(*rows, features, value_dim, dtype=dtype, device=like.device)
        log_scale = values.new_full((*rows, scales), NO_KEY)
        return KernelState(kernel, Sums(values, values.new_zeros(*rows, features), log_scale))

    @property
    def batch_size(self) -> int:
        return self.sums.values.shape[0]

    @property
    def num_heads(self) -> int:
        return self.sums.values.shape[1]

    @property
    def head_dim(self) -> int:
        omega = self.kernel.omega
        return self.sums.values.shape[2] if omega is None else omega.shape[-1]

    @property
    def value_dim(self) -> int:
        return self.sums.values.shape[3]

    @property
    def num_bytes(self) -> int:
        """What the sums take, without the kernel."""
        return sum(x.nbytes for x in self.sums)

    @property
    def reference(self) -> Tensor:
        """The logarithms that the sums are relative to, (B, H, R) for exponential maps, else (B, H, 1)."""
        return self.sums.log_scale

    def absorb(
        self,
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None = None,
        key_bias: Tensor | None = None,
        backend: str = "auto",
    ) -> "KernelState":
        """Return the state after more keys and values.

        Args:
            k: Keys (B, H, S, D).
            v: Values (B, H, S, E).
            key_mask: (B, S), True = keep.
            key_bias: Log-weights of the keys besides the envelope of the kernel, (B or 1, H or 1, S).
            backend: As in `spectral_product`.

        Raises:
            ArgumentError: shapes do not fit the state, or each other.
        """
        options: dict[str, Any] = {"key_mask": key_mask, "key_bias": key_bias, "backend": backend}
        return KernelState(self.kernel, self._after(k, v, **options))

    def absorb_(self, k: Tensor, v: Tensor, **options: Any) -> "KernelState":
        """Absorb more keys and values in place, without gradients; return the state itself.

        Args:
            k: Keys (B, H, S, D).
            v: Values (B, H, S, E).
            **options: As in `absorb`.

        Raises:
            ArgumentError: as `absorb`.
        """
        with torch.no_grad():
            for place, x in zip(self.sums, self._after(k, v, **options), strict=True):
                place.copy_(x)
        return self

    def _after(self, k: Tensor, v: Tensor, **options: Any) -> Sums:
        heads, dim = self.num_heads, self.head_dim
        check_operands(
            k, k, v, key_mask=options.get("key_mask"), num_heads=heads, head_dim=dim, value_dim=self.value_dim
        )
        self._check_batch(k)
        self._check_kernel()
        own = absorb(self.kernel, k, v, **options)
        return merged(self.sums, own.sums)

    def read(self, q: Tensor, *, backend: str = "auto") -> Tensor:
        """Attend from queries to every key that is in the state.

        Args:
            q: Queries (B, H, L, D).
            backend: As in `spectral_product`.

        Returns:
            (B, H, L, E); 0 if there is no key.

        Raises:
            ArgumentError: the shape of q does not fit, or it has no floating-point numbers.
        """
        return read(self.kernel, q, self, backend=backend)[0]

    def _check_batch(self, tokens: Tensor) -> None:
        if tokens.shape[0] != self.batch_size:
            raise ArgumentError(f"the state is for {self.batch_size} sequences, got a batch of {tokens.shape[0]}")

    def _check_kernel(self, kernel: SpectralKernel | None = None) -> None:
        """Raise ArgumentError if another kernel is given, or that of the state was changed in place."""
        if torch.compiler.is_compiling():
            return
        if self._versions is None:  # it was made by a compiled program
            self._versions = self.kernel.versions()
        if self._versions != self.kernel.versions():
            raise ArgumentError(
                "the frequencies of this state were changed after it had absorbed its keys: absorb again"
            )
        if kernel is not None and not self.kernel.same_as(kernel):
            raise ArgumentError(
                "the state is of another kernel, or of another draw of its noise: read it with what absorbed its keys"
            )

    @staticmethod
    def merge(first: "KernelState", *others: "KernelState") -> "KernelState":
        """Return the state of all keys of some states of the same kernel.

        Args:
            first: A state.
            *others: States of the same kernel and the same number of sequences; the order does not matter.

        Raises:
            ArgumentError: they are of other kernels, or of other numbers of sequences.
        """
        sums = first.sums if others else Sums(*(x.clone() for x in first.sums))
        for number, other in enumerate(others, start=2):
            if not first.kernel.same_as(other.kernel):
                raise ArgumentError(
                    "states are merged that were absorbed with the same kernel and the same draw of its noise; "
                    f"number {number} has another than the first"
                )
            if sums.values.shape != other.sums.values.shape:
                raise ArgumentError(
                    "states are merged that have the same number of sequences, heads and values; number "
                    f"{number} has the shape {tuple(other.sums.values.shape)}, the first {tuple(sums.values.shape)}"
                )
            first._check_kernel()
            other._check_kernel()
            sums = merged(sums, other.sums)
        return KernelState(first.kernel, sums)

    def shift(self, reference: Tensor) -> "KernelState":
        """Return the same state, its sums relative to other logarithms: what reads from it gives the same.

        States with a common reference are merged by adding them up: with the maximum of theirs nothing overflows.

        Args:
            reference: Broadcastable to that of the property `reference`.

        Raises:
            ArgumentError: it is not.
        """
        own = self.sums.log_scale
        return KernelState(self.kernel, shifted(self.sums, _expanded("reference", reference.to(own), own.shape)))

    def weigh(self, log_weight: float | Tensor) -> "KernelState":
        """Return the state in which every key weighs exp(log_weight) times as much: counts where states are merged.

        Args:
            log_weight: A number, or (B,), or (B, H).

        Raises:
            ArgumentError: it has another shape.
        """
        own = self.sums.log_scale
        weights = torch.as_tensor(log_weight, dtype=own.dtype, device=own.device)
        weights = weights.unsqueeze(-1) if weights.dim() == 1 else weights
        added = _expanded("log_weight", weights, own.shape[:2]).unsqueeze(-1)
        values, weights, _ = self.sums
        return KernelState(self.kernel, Sums(values.clone(), weights.clone(), own + added))

    def save(self, path: Path | str) -> None:
        """Write the state and its kernel as safetensors, in one stroke.

        Args:
            path: The file. One that is there is replaced, and its folder is made if it is not there.

        Raises:
            FileError: it can't be written.

        Examples:
            >>> import tempfile, torch, klformer
            >>> k, v, q = torch.randn(3, 1, 2, 50, 8)
            >>> state = klformer.KernelState.of(k, v, torch.randn(2, 16, 8), feature_map="prf")
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     state.save(f"{folder}/document.safetensors")
            ...     again = klformer.KernelState.load(f"{folder}/document.safetensors")
            >>> torch.equal(again.read(q), state.read(q))
            True
        """
        kernel = self.kernel
        tensors = self.sums._asdict() | {f"kernel.{name}": x for name, x in kernel.tensors().items()}
        about = {
            "format": FORMAT,
            "feature_map": kernel.feature_map.name,
            "simplex": str(int(kernel.simplex)),
            "norm_coefficient": repr(kernel.norm_coefficient),
        }
        with replacing(Path(path)) as temporary:
            save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, temporary, about)

    @staticmethod
    def load(path: Path | str, *, device: str | torch.device = "cpu") -> "KernelState":
        """Read what `save` wrote; ready to read from, to absorb more and to be merged.

        Args:
            path: The file.
            device: Where the state is to be.

        Raises:
            FileError: it is not there, damaged, or something else.
        """
        try:
            with safe_open(path, "pt", device=str(device)) as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise FileError(f"can't read {path}: {error}") from error
        if about.get("format") != FORMAT or not tensors.keys() >= set(Sums._fields):
            raise FileError(f"{path} holds no state of a kernel: its format is {about.get('format')!r}, not {FORMAT!r}")
        if missing := [name for name in ("feature_map", "simplex", "norm_coefficient") if name not in about]:
            raise FileError(f"{path} is damaged: it does not say {', '.join(missing)}")
        try:
            return _from_file(about, tensors)
        except ValueError as error:
            raise FileError(f"{path} is damaged: {error}") from error

    def __repr__(self) -> str:
        holds = bool((self.sums.log_scale > NO_KEY / 2).any())
        sizes = f"batch_size={self.batch_size}, num_heads={self.num_heads}, value_dim={self.value_dim}"
        name = self.kernel.feature_map.name
        return f"{type(self).__name__}({name!r}, {sizes}{'' if holds else ', no key yet'})"


def absorb(
    kernel: SpectralKernel,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    backend: str = "auto",
) -> KernelState:
    """Absorb keys and values into a state.

    Args:
        kernel: With its present frequencies, as `Kernel.present` gives it. The state refers to it.
        k: Keys (B, H, S, D); S may be 0.
        v: Values (B, H, S, E).
        key_mask: (B, S), True = keep.
        key_bias: Log-weights of the keys besides the envelope of the kernel, (B or 1, H or 1, S).
        backend: As in `spectral_product`.

    Returns:
        The state, differentiable in all tensors.

    Raises:
        ArgumentError: a shape does not fit, or the backend can't serve this.

    Examples:
        >>> import torch, klformer
        >>> from klformer.ops.spectral_product import absorb, causal, read
        >>> kernel = klformer.build_attention("gmm-prf", num_heads=2, head_dim=8).kernel.present()
        >>> q, k, v = torch.randn(3, 1, 2, 6, 8)
        >>> out, log_sum = read(kernel, q, absorb(kernel, k, v))
        >>> out.shape, log_sum.shape
        (torch.Size([1, 2, 6, 8]), torch.Size([1, 2, 6]))

        Causal in two halves; the last query sees all keys:

        >>> _, _, state = causal(kernel, *(x[:, :, :3] for x in (q, k, v)))
        >>> last, _, state = causal(kernel, *(x[:, :, 3:] for x in (q, k, v)), state=state)
        >>> torch.allclose(last[:, :, -1], out[:, :, -1], atol=1e-5)
        True
    """
    check_operands(k, k, v, key_mask=key_mask)
    check_key_bias(key_bias, k)
    check_kernel(kernel, num_heads=k.shape[1], head_dim=k.shape[3])
    call = Call("absorb", kernel, k=k, v=v, key_mask=kept_keys(key_mask, key_bias), key_bias=key_bias)
    return KernelState(kernel, choose_backend(call, backend).absorb(call))


def read(kernel: SpectralKernel, q: Tensor, state: KernelState, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Attend from queries to all keys of a state.

    Args:
        kernel: That of the state.
        q: Queries (B, H, L, D).
        state: What was absorbed.
        backend: As in `spectral_product`.

    Returns:
        (B, H, L, E) in the type of q, 0 without any key; and the log-sums (B, H, L), as `spectral_product` has them.

    Raises:
        ArgumentError: the state is of another kernel, the shape of q does not fit, or the backend can't serve this.

    Examples:
        >>> import torch, klformer
        >>> kernel = klformer.build_attention("gmm-prf", num_heads=2, head_dim=8).kernel.present()
        >>> q, k, v = torch.randn(3, 1, 2, 6, 8)
        >>> memory = klformer.absorb(kernel, k, v)
        >>> out, log_sum = klformer.read(kernel, q, memory)
        >>> out.shape, log_sum.shape
        (torch.Size([1, 2, 6, 8]), torch.Size([1, 2, 6]))
    """
    _check_queries(q, state)
    state._check_kernel(kernel)
    call = Call("read", kernel, q=q, sums=state.sums)
    return choose_backend(call, backend).read(call)


def causal(
    kernel: SpectralKernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: KernelState | None = None,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, KernelState]:
    """Attend from every query to the keys up to it and to all keys of a state.

    Args:
        kernel: That of the state, if there is one.
        q: Queries (B, H, L, D).
        k: Keys (B, H, L, D).
        v: Values (B, H, L, E).
        state: What came before; nothing if None.
        key_mask: (B, L), True = keep.
        key_bias: Log-weights of the keys besides the envelope of the kernel, (B or 1, H or 1, L).
        backend: As in `spectral_product`.

    Returns:
        (B, H, L, E), the log-sums (B, H, L), and the state after the last key.

    Raises:
        ArgumentError: the state is of another kernel, a shape does not fit, or the backend can't serve this.

    Examples:
        >>> import torch, klformer
        >>> kernel = klformer.build_attention("gmm-prf", num_heads=2, head_dim=8).kernel.present()
        >>> q, k, v = torch.randn(3, 1, 2, 6, 8)
        >>> whole, _, _ = klformer.causal(kernel, q, k, v)
        >>> _, _, state = klformer.causal(kernel, q[:, :, :2], k[:, :, :2], v[:, :, :2])
        >>> rest, _, state = klformer.causal(kernel, q[:, :, 2:], k[:, :, 2:], v[:, :, 2:], state=state)
        >>> torch.allclose(rest, whole[:, :, 2:], atol=1e-5)
        True
    """
    check_operands(q, k, v, key_mask=key_mask, causal=True)
    check_key_bias(key_bias, k)
    check_kernel(kernel, num_heads=k.shape[1], head_dim=k.shape[3])
    if state is not None:
        _check_queries(q, state)
        state._check_kernel(kernel)
        if v.shape[3] != state.value_dim:
            raise ArgumentError(f"the state has values of size {state.value_dim}, got v of shape {tuple(v.shape)}")
    mask, sums = kept_keys(key_mask, key_bias), None if state is None else state.sums
    call = Call("causal", kernel, q=q, k=k, v=v, sums=sums, key_mask=mask, key_bias=key_bias)
    out, log_sum, after = choose_backend(call, backend).causal(call)
    return out, log_sum, KernelState(kernel, after)


def _check_queries(q: Tensor, state: KernelState) -> None:
    fits = q.dim() == 4 and q.shape[1] == state.num_heads and q.shape[3] == state.head_dim
    if not fits or not q.is_floating_point():
        shape = f"(batch, {state.num_heads}, length, {state.head_dim})"
        raise ArgumentError(f"q must be floating-point of shape {shape}, got {q.dtype} of shape {tuple(q.shape)}")
    state._check_batch(q)


def shifted(sums: Sums, log_scale: Tensor) -> Sums:
    """Return the same sums relative to other logarithms (B, H, F or 1)."""
    factor = (sums.log_scale - log_scale).exp()
    return Sums(sums.values * factor.unsqueeze(-1), sums.weights * factor, log_scale)


def merged(first: Sums, second: Sums) -> Sums:
    """Return the sums over the keys of both. Associative and commutative but for rounding."""
    common = torch.maximum(first.log_scale, second.log_scale).detach()
    left, right = shifted(first, common), shifted(second, common)
    return Sums(left.values + right.values, left.weights + right.weights, common)


def _expanded(name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    try:
        return x.expand(shape)
    except RuntimeError as error:
        raise ArgumentError(f"{name} must be broadcastable to {tuple(shape)}, got shape {tuple(x.shape)}") from error


def _from_file(about: Mapping[str, str], tensors: Mapping[str, Tensor]) -> KernelState:
    """Return the state that a file holds; ValueError if something does not fit."""
    kernel = SpectralKernel(
        FEATURE_MAPS[about["feature_map"]],
        **{name: tensors.get(f"kernel.{name}") for name in OF_KERNEL},
        simplex=bool(int(about["simplex"])),
        norm_coefficient=float(about["norm_coefficient"]),
    )
    sums = Sums(*(tensors[name] for name in Sums._fields))
    if sums.values.dim() != 4 or 0 in sums.values.shape[1:]:
        raise ArgumentError(f"values has shape {tuple(sums.values.shape)}")
    state = KernelState(kernel, sums)
    check_kernel(kernel, num_heads=state.num_heads, head_dim=state.head_dim)
    sizes = {"batch_size": state.batch_size, "num_heads": state.num_heads, "value_dim": state.value_dim}
    wanted = KernelState.empty(kernel, like=torch.empty(state.head_dim, device="meta"), **sizes).sums
    for name, x, like in zip(Sums._fields, sums, wanted, strict=True):
        if x.shape != like.shape or x.dtype not in (torch.float32, torch.float64):
            raise ArgumentError(f"{name} is {x.dtype} of shape {tuple(x.shape)}, not of shape {tuple(like.shape)}")
    return state
