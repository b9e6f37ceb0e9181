"""`bench launches`: how many kernels a GPU would launch for the product, counted on tensors without memory.

No GPU is needed: tensors on torch's device "meta" have shapes and no numbers, and take the ways of a GPU.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from klformer.lab.bench.measure import write_report
from klformer.lab.bench.subjects import Sizes
from klformer.lab.environment import describe_machine
from klformer.lab.tables import Table, number
from klformer.lab.terminal import make_console
from klformer.ops.feature_maps import FEATURE_MAPS
from klformer.ops.spectral_product import BACKENDS, Call, FusedBackend, SpectralKernel
from klformer.ops.spectral_product.chunked import causal, tiles

#: Operators that compute nothing: views, allocations, and those that only call others.
NO_LAUNCH = frozenset(
    {
        *("_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "contiguous", "detach", "empty"),
        *("empty_like", "empty_strided", "expand", "flatten", "linear", "matmul", "narrow", "new_empty"),
        *("promote_types", "reshape", "resolve_conj", "select", "slice", "split", "squeeze", "t", "to"),
        *("transpose", "unbind", "unflatten", "unsqueeze", "view"),
    }
)
#: Products by name: feature map, whether it is causal, and who computes it.
PRODUCTS: Mapping[str, tuple[str, bool, str]] = {
    "prf flash": ("prf", False, "flash_cpu"),
    "prf": ("prf", False, "chunked"),
    "rks": ("rks", False, "chunked"),
    "prf causal": ("prf", True, "chunked"),
    "rks causal": ("rks", True, "chunked"),
}


@dataclass(frozen=True)
class LaunchesBench:
    """Kernels that a GPU would launch for forward and backward of the product, counted without a GPU.

    A launch takes time whatever it computes, and short sequences take little else. Products in plain PyTorch are made
    of many; flash and Triton are there to have few. No time is measured.

    Example: klformer --plugin benchmarks bench launches --length 16384
    """

    length: int = 16384
    """Tokens L."""
    heads: int = 8
    """Heads H."""
    head_dim: int = 16
    """Size D = E of queries, keys and values."""
    frequencies: int = 128
    """Frequencies R."""
    json: Path | None = None
    """Write all figures to this file."""


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts calls that would be launches on a GPU: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        self.by_name[name] += name not in NO_LAUNCH
        return func(*args, **(kwargs or {}))


def run(options: LaunchesBench) -> None:
    """Count, print the table, and write the figures where they were asked for."""
    console, environment = make_console(80), describe_machine()
    sizes = Sizes(1, options.heads, options.length, options.head_dim, options.head_dim, options.frequencies)
    results = [{"name": name, **asdict(sizes), "launches": count_launches(name, sizes)} for name in PRODUCTS]
    title = f"forward + backward, L={options.length:,} H={options.heads} D=E={options.head_dim} R={options.frequencies}"
    replace(launch_table(results), title=title).print(console)
    console.print("a launch is a kernel that a GPU is told to run: short sequences spend their time on these")
    write_report(options.json, environment, {"options": asdict(options), "results": results}, console)


def count_launches(name: str, sizes: Sizes) -> int:
    """Launches of a product, forward and backward."""
    feature_map, is_causal, backend = PRODUCTS[name]
    chosen = cast(FusedBackend, BACKENDS[backend])
    sequence = (sizes.batch, sizes.heads, sizes.length)
    q, k = (torch.empty(*sequence, sizes.head_dim, device="meta") for _ in range(2))
    v, d_out = (torch.empty(*sequence, sizes.value_dim, device="meta") for _ in range(2))
    omega = torch.empty(sizes.heads, sizes.frequencies, sizes.head_dim, device="meta")
    kernel = SpectralKernel(FEATURE_MAPS[feature_map], omega)
    # What depends on numbers is decided as it mostly is: nothing was lost, and chunks are as long as at first.
    with patch.object(causal, "_lost_anything", lambda lost: False), Launches() as launches:
        call = Call("causal" if is_causal else "product", kernel, q=q, k=k, v=v)
        outputs = chosen.results(call, keep=True)
        d_results: list[Tensor | None] = [d_out, None]
        if is_causal:
            outputs[-1] = torch.full(outputs[-1].shape, tiles.GPU_CAUSAL_CHUNK)
            d_results += [None] * 3
        chosen.gradients(call, outputs, d_results, ("q", "k", "v", "omega"))
    return launches.by_name.total()


def launch_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return a line for each product."""
    return Table.of([{"product": row["name"], "launches": number(row["launches"], "{:,}")} for row in results])
