"""States as values: what a kernel attention keeps of keys and values, read apart, merged in any order, kept in files.

    (m, S) + (m', S') = (M, exp(m - M) S + exp(m' - M) S')      M = max(m, m')

S is the sum over the keys and m the logarithm that it is relative to (`key_values.py`). For exponential maps m is the
largest score of each feature, so that no document is too far from another to be merged with it; for the others it is
the largest log-weight, 0 where keys have none, and the sums are plain. The operation is associative and commutative but
for rounding: a state of all documents is that of their concatenation, whoever read them, wherever, in whatever order.
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
from klformer.ops.shapes import check_key_bias, check_key_mask, check_operands
from klformer.ops.spectral_product.chunked.positive import LOG2_E
from klformer.ops.spectral_product.decoding import PreparedKernel
from klformer.ops.spectral_product.key_values import NO_KEY, KeyValueState
from klformer.ops.spectral_product.operands import SpectralKernel, check_kernel, checked_kernel, kept_keys

#: Of the files; one of another version is refused by its name.
FORMAT = "klformer-state-1"
_OF_KERNEL = ("omega", "pair_offset", "frequency_bias", "smoothing")
_OF_KEYS = ("product", "total", "shift")
_ABOUT = ("feature_map", "simplex", "num_heads", "head_dim")


class KernelState:
    """All that attention with one kernel needs of the keys and values that were read: a few matrices, however many.

    A state is a value: its methods leave it as it is and give another. For inference: no gradients flow through it.
    Make one with `KernelState.of`, or with `kernel_state` of an attention, which knows its frequencies and envelope.

    Args:
        prepared: The kernel, as decoding has it.
        key_values: What was absorbed.

    Examples:
        >>> import torch, klformer
        >>> omega = torch.randn(4, 64, 16)
        >>> documents = [torch.randn(2, 1, 4, length, 16) for length in (1000, 50)]  # keys and values
        >>> first, second = (klformer.KernelState.of(k, v, omega, feature_map="prf") for k, v in documents)
        >>> q = torch.randn(1, 4, 3, 16)
        >>> klformer.KernelState.merge(first, second).read(q).shape
        torch.Size([1, 4, 3, 16])

        To read the second document after the first gives the same, and so does another reference. With a weight, the
        keys of a document count more:

        >>> merged = klformer.KernelState.merge(first, second)
        >>> torch.allclose(first.absorb(*documents[1]).read(q), merged.read(q), atol=1e-4)
        True
        >>> torch.allclose(merged.shift(merged.reference + 1).read(q), merged.read(q), atol=1e-4)
        True
        >>> klformer.KernelState.merge(first, second.weigh(2.0))
        KernelState('prf', batch_size=1, num_heads=4, value_dim=16)
    """

    def __init__(self, prepared: PreparedKernel, key_values: KeyValueState) -> None:
        self._prepared = prepared
        self._key_values = key_values

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
        """The state of some keys and values. Other arguments are those of `spectral_product`.

        Args:
            k: Keys (B, H, S, D); S may be 0.
            v: Values (B, H, S, E).
            omega: Frequencies (H or 1, R, D); None for "elu".
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
        empty = KernelState.empty(kernel, like=k, batch_size=k.shape[0], num_heads=k.shape[1], value_dim=v.shape[3])
        return empty.absorb(k, v, key_mask=key_mask, key_bias=key_bias)

    @staticmethod
    def empty(
        kernel: SpectralKernel, *, like: Tensor, batch_size: int, num_heads: int, value_dim: int
    ) -> "KernelState":
        """The state before any key.

        Args:
            kernel: With its frequencies, which are copied.
            like: (..., D), of the device and the precision that the state is to have, which is float32 at least.
            batch_size: Sequences B.
            num_heads: Heads H.
            value_dim: Size E of values.

        Examples:
            >>> import torch, klformer
            >>> attention = klformer.build_attention("gmm-prf", num_heads=2, head_dim=8)
            >>> kernel = attention.kernel.present()
            >>> klformer.KernelState.empty(kernel, like=torch.empty(8), batch_size=1, num_heads=2, value_dim=8)
            KernelState('prf', batch_size=1, num_heads=2, value_dim=8, no key yet)
        """
        # A copy: training changes frequencies in place, and the state is of those that it was read with.
        tensors = {name: getattr(kernel, name) for name in _OF_KERNEL}
        own: dict[str, Any] = {name: x if x is None else x.detach().clone() for name, x in tensors.items()}
        kernel = SpectralKernel(kernel.feature_map, simplex=kernel.simplex, **own)
        prepared = PreparedKernel.of(kernel, num_heads=num_heads, head_dim=like.shape[-1], like=like)
        return KernelState(prepared, prepared.initial_state(batch_size, value_dim))

    @property
    def batch_size(self) -> int:
        return self._key_values.total.shape[0] // self._prepared.num_heads

    @property
    def value_dim(self) -> int:
        return self._key_values.total.shape[2] - 1

    @property
    def num_bytes(self) -> int:
        """What the sums take, without the kernel."""
        return sum(getattr(self._key_values, name).nbytes for name in _OF_KEYS)

    @property
    def reference(self) -> Tensor:
        """The natural logarithms that the sums are relative to, (B, H, R) for exponential maps, else (B, H, 1)."""
        return (self._key_values.shift * self._unit).view(self.batch_size, self._prepared.num_heads, -1)

    def absorb(
        self, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, key_bias: Tensor | None = None
    ) -> "KernelState":
        """The state after more keys and values.

        Args:
            k: Keys (B, H, S, D).
            v: Values (B, H, S, E).
            key_mask: (B, S), True = keep.
            key_bias: Log-weights of the keys, (B or 1, H or 1, S); the envelope of the kernel, if it has one.

        Raises:
            ArgumentError: shapes do not fit the state, or each other.
        """
        check_operands(
            k,
            k,
            v,
            key_mask=key_mask,
            num_heads=self._prepared.num_heads,
            head_dim=self._prepared.head_dim,
            value_dim=self.value_dim,
        )
        check_key_mask(key_mask, k)
        check_key_bias(key_bias, k)
        after = self._key_values.clone()
        self._prepared.absorb(after, k, v, key_mask=kept_keys(key_mask, key_bias), key_bias=key_bias)
        return KernelState(self._prepared, after)

    def read(self, q: Tensor) -> Tensor:
        """Attention of queries to every key that is in the state.

        Args:
            q: Queries (B, H, L, D).

        Returns:
            (B, H, L, E); 0 if there is no key.

        Raises:
            ArgumentError: the shape of q does not fit, or it has no floating-point numbers.
        """
        prepared = self._prepared
        fits = q.dim() == 4 and q.shape[1] == prepared.num_heads and q.shape[3] == prepared.head_dim
        if not fits or not q.is_floating_point():
            shape = f"(batch, {prepared.num_heads}, length, {prepared.head_dim})"
            raise ArgumentError(f"q must be floating-point of shape {shape}, got {q.dtype} of shape {tuple(q.shape)}")
        return prepared.read(self._key_values, q)

    @staticmethod
    def merge(first: "KernelState", *others: "KernelState") -> "KernelState":
        """The state of all keys of some states of the same kernel.

        Args:
            first: A state.
            *others: States of the same kernel and the same number of sequences; the order does not matter.

        Raises:
            ArgumentError: they are of other kernels, or of other numbers of sequences.
        """
        merged = first._key_values
        for number, other in enumerate(others, start=2):
            _check_mergeable(first, other, number)
            merged = first._prepared.merged(merged, other._key_values)
        return KernelState(first._prepared, merged)

    def shift(self, reference: Tensor) -> "KernelState":
        """The same state, its sums relative to other logarithms: what reads from it gives the same but for rounding.

        States with a common reference are merged by adding them up: with the maximum of theirs nothing overflows.

        Args:
            reference: Broadcastable to that of the property `reference`.

        Raises:
            ArgumentError: it is not.
        """
        own = self._key_values.shift
        shape = (self.batch_size, self._prepared.num_heads, own.shape[2])
        wanted = _expanded("reference", reference.to(own) / self._unit, shape).reshape(own.shape)
        return KernelState(self._prepared, self._prepared.shifted(self._key_values, wanted))

    def weigh(self, log_weight: float | Tensor) -> "KernelState":
        """The state in which every key weighs exp(log_weight) times as much: counts in what it is merged with.

        Args:
            log_weight: A number, or (B,), or (B, H).

        Raises:
            ArgumentError: it has another shape.
        """
        own, heads = self._key_values, self._prepared.num_heads
        weights = torch.as_tensor(log_weight, dtype=own.shift.dtype, device=own.shift.device)
        weights = weights.unsqueeze(-1) if weights.dim() == 1 else weights
        added = _expanded("log_weight", weights / self._unit, (self.batch_size, heads)).reshape(-1, 1, 1)
        return KernelState(self._prepared, KeyValueState(own.product, own.total, own.shift + added))

    @property
    def _unit(self) -> float:
        """A shift of 1 as a natural logarithm."""
        return 1 / LOG2_E if self._prepared.feature_map.exponential else 1.0

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
        tensors = {name: getattr(self._key_values, name) for name in _OF_KEYS}
        kernel = self._prepared.kernel
        for name in _OF_KERNEL:
            if (tensor := getattr(kernel, name)) is not None:
                tensors[f"kernel.{name}"] = tensor
        about = {
            "format": FORMAT,
            "feature_map": kernel.feature_map.name,
            "simplex": str(int(kernel.simplex)),
            "num_heads": str(self._prepared.num_heads),
            "head_dim": str(self._prepared.head_dim),
        }
        with replacing(Path(path)) as temporary:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, about)

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
        if about.get("format") != FORMAT or not tensors.keys() >= set(_OF_KEYS):
            raise FileError(f"{path} holds no state of a kernel: its format is {about.get('format')!r}, not {FORMAT!r}")
        if missing := [name for name in _ABOUT if name not in about]:
            raise FileError(f"{path} is damaged: it does not say {', '.join(missing)}")
        try:
            return _from_file(about, tensors)
        except ValueError as error:
            raise FileError(f"{path} is damaged: {error}") from error

    def __repr__(self) -> str:
        holds = bool((self._key_values.shift > NO_KEY).any())
        sizes = f"batch_size={self.batch_size}, num_heads={self._prepared.num_heads}, value_dim={self.value_dim}"
        return f"KernelState({self._prepared.feature_map.name!r}, {sizes}{'' if holds else ', no key yet'})"


def _from_file(about: Mapping[str, str], tensors: Mapping[str, Tensor]) -> KernelState:
    """The state that a file holds; ValueError if something does not fit."""
    kernel = SpectralKernel(
        FEATURE_MAPS[about["feature_map"]],
        simplex=bool(int(about["simplex"])),
        **{name: tensors.get(f"kernel.{name}") for name in _OF_KERNEL},
    )
    num_heads, head_dim = int(about["num_heads"]), int(about["head_dim"])
    check_kernel(kernel, num_heads=num_heads, head_dim=head_dim)
    prepared = PreparedKernel.of(kernel, num_heads=num_heads, head_dim=head_dim, like=tensors["product"])
    key_values = KeyValueState(*(tensors[name] for name in _OF_KEYS))
    if num_heads < 1 or key_values.total.dim() != 3 or not key_values.total.shape[2]:
        raise ArgumentError(f"total has shape {tuple(key_values.total.shape)}, for {num_heads} heads")
    rows, _, columns = key_values.total.shape
    expected = prepared.initial_state(rows // num_heads, columns - 1)
    for name in _OF_KEYS:
        found, wanted = getattr(key_values, name), getattr(expected, name)
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            raise ArgumentError(
                f"{name} is {found.dtype} of shape {tuple(found.shape)}, not {wanted.dtype} of {tuple(wanted.shape)}"
            )
    return KernelState(prepared, key_values)


def _expanded(name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """x in a shape that it broadcasts to."""
    try:
        return x.expand(shape)
    except RuntimeError:
        raise ArgumentError(f"{name} must be broadcastable to {shape}, got shape {tuple(x.shape)}") from None


def _check_mergeable(first: KernelState, other: KernelState, number: int) -> None:
    """Raises ArgumentError unless the sums of two states are of the same features."""
    left, right = first._prepared, other._prepared
    if left is not right:
        same = left.kernel.feature_map is right.kernel.feature_map and left.kernel.simplex == right.kernel.simplex
        for name in _OF_KERNEL:
            mine, its = getattr(left.kernel, name), getattr(right.kernel, name)
            same = same and (mine is None) == (its is None) and (mine is None or torch.equal(mine, its))
        if not same:
            raise ArgumentError(
                f"states of the same kernel can be merged, number {number} has another: its frequencies or weights "
                "differ. Read all documents with one draw of the noise"
            )
    if first._key_values.product.shape != other._key_values.product.shape or left.num_heads != right.num_heads:
        raise ArgumentError(
            f"states of the same number of sequences, heads and values can be merged, got {first} and {other}"
        )
