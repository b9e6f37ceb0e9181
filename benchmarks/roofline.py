"""`bench roofline`: how long the kernels for GPUs take at least, from what they compute and move. Nothing is measured.

    TRITON_INTERPRET=1 klformer --plugin benchmarks bench roofline

Triton's interpreter runs the kernels on few tokens and counts the operations of their products and the bytes that
programs load and store; both grow linearly with the length. A launch takes the longest of

    products / peak of their precision        tensors, each once / bandwidth of the memory

the first times what is idle where there are fewer programs than processors. It is a bound from below: exponentials and
sines, latency, loads that miss the L2 cache and the sums over chunks at the end are left out.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch

from klformer.errors import ArgumentError, check_extra
from klformer.lab.bench.measure import write_report
from klformer.lab.environment import describe_machine
from klformer.lab.tables import Table, number
from klformer.lab.terminal import make_console
from klformer.ops import near
from klformer.ops.feature_maps import FEATURE_MAPS
from klformer.ops.spectral_product import BACKENDS, Call, FusedBackend, SpectralKernel, Sums


@dataclass(frozen=True)
class Device:
    """What a maker says of a device: dense products a second by precision, bytes a second, and processors."""

    peaks: Mapping[str, float]
    bandwidth: float
    processors: int


#: Data sheets: A100 SXM 80 GB and H100 SXM. Three products in tf32 make one of float32.
DEVICES = {
    "A100": Device({"tf32": 156e12, "tf32x3": 52e12, "ieee": 19.5e12, "bf16": 312e12}, 2.04e12, 108),
    "H100": Device({"tf32": 495e12, "tf32x3": 165e12, "ieee": 67e12, "bf16": 989e12}, 3.35e12, 132),
}
PRODUCTS = ("prf causal", "rks", "rks causal", "near")
#: Keys on each side of a query.
WINDOW = 8
#: Tokens that are counted on.
FEW, MORE = 64, 128


@dataclass(frozen=True)
class RooflineBench:
    """Least time of the kernels for GPUs, forward and backward, predicted from operations and bytes.

    Example: TRITON_INTERPRET=1 klformer --plugin benchmarks bench roofline --length 16384
    """

    length: int = 16384
    """Tokens L."""
    heads: int = 8
    """Heads H."""
    head_dim: int = 64
    """Size D = E of queries, keys and values."""
    frequencies: int = 128
    """Frequencies R."""
    json: Path | None = None
    """Write all figures to this file."""


@dataclass
class Launch:
    """What one launch computes and moves."""

    kernel: str
    precision: str
    programs: int
    tensors: int = 0
    products: float = 0.0
    loaded: float = 0.0

    def seconds(self, device: Device) -> float:
        """Return the least time on a device."""
        idle = max(1.0, device.processors / self.programs)
        return max(self.products / device.peaks[self.precision] * idle, self.tensors / device.bandwidth)


def run(options: RooflineBench) -> None:
    """Count, print the table, and write the figures where they were asked for.

    Raises:
        ArgumentError: Triton's interpreter is off.
        MissingExtraError: Triton is not installed.
    """
    check_extra("triton", "this benchmark", ["triton"])
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise ArgumentError("bench roofline counts in Triton's interpreter: set TRITON_INTERPRET=1 before the command")
    results = []
    for product in PRODUCTS:
        for stored in ("bf16", "fp32"):
            launches = count(product, stored, options)
            row: dict[str, Any] = {"product": product, "type": stored, "launches": len(launches)}
            row |= {"gflop": sum(x.products for x in launches) / 1e9, "mb": sum(x.tensors for x in launches) / 1e6}
            row |= {"loaded_mb": sum(x.loaded for x in launches) / 1e6, "kernels": [asdict(x) for x in launches]}
            row |= {name: 1e3 * sum(x.seconds(device) for x in launches) for name, device in DEVICES.items()}
            results.append(row)
    # Of every pair one product forward, and two and a half backward.
    softmax = 3.5 * 4 * options.length**2 * options.head_dim * options.heads
    for causal in (False, True):
        work = softmax / (1 + causal)
        row = {"product": f"softmax{' causal' if causal else ''}", "type": "bf16", "gflop": work / 1e9}
        results.append(row | {name: 1e3 * work / device.peaks["bf16"] for name, device in DEVICES.items()})
    console = make_console(100)
    cells = [
        {"product": row["product"], "type": row["type"], "launches": str(row.get("launches", ""))}
        | {"GFLOP": number(row["gflop"], "{:.0f}"), "MB": number(row["mb"], "{:.0f}") if "mb" in row else ""}
        | {f"{name}, ms": number(row[name], "{:.2f}") for name in DEVICES}
        for row in results
    ]
    Table.of(cells).print(console)
    write_report(options.json, describe_machine(), {"options": asdict(options), "results": results}, console)


def count(product: str, stored: str, options: RooflineBench) -> list[Launch]:
    """Return the launches of a product, forward and backward, at the length that is asked for."""
    with _counted() as few:
        _compute(product, stored, FEW, 1, options, "cpu")
    with _counted() as more:
        _compute(product, stored, MORE, 1, options, "cpu")
    with _counted(compute=False) as whole:
        _compute(product, stored, options.length, options.heads, options, "meta")
    for launch, one, two in zip(whole, few, more, strict=True):
        steps = (options.length - FEW) / (MORE - FEW)
        launch.products = options.heads * (one.products + steps * (two.products - one.products))
        launch.loaded = options.heads * (one.loaded + steps * (two.loaded - one.loaded))
    return whole


@contextmanager
def _counted(*, compute: bool = True) -> Iterator[list[Launch]]:
    """Record the launches inside, and with `compute` what they compute and load."""
    from triton.runtime.interpreter import InterpreterBuilder

    from klformer.ops.triton import launches, near_calls, prf_calls, rks_calls

    found: list[Launch] = []
    launch, dot = launches.launch, InterpreterBuilder.create_dot
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def launched(kernel: Any, grid: tuple[int, ...], *arguments: Any, blocks: Any, **constants: Any) -> None:
        tensors = {id(x): x for x in arguments if isinstance(x, torch.Tensor)}
        size = sum(x.numel() * x.element_size() for x in tensors.values())
        found.append(Launch(kernel.fn.__name__, blocks.precision, grid[0] * grid[1], size))
        if compute:
            launch(kernel, grid, *arguments, blocks=blocks, **constants)

    def dotted(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        found[-1].products += 2.0 * a.data.size * b.data.shape[-1]
        return dot(self, a, b, *rest)

    def loaded(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        result = load(self, pointers, mask, *rest)
        found[-1].loaded += float(mask.data.sum()) * result.data.itemsize
        return result

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        found[-1].loaded += float(mask.data.sum()) * value.data.itemsize
        return store(self, pointers, value, mask, *rest)

    replaced: dict[str, Any] = {"create_dot": dotted, "create_masked_load": loaded, "create_masked_store": stored}
    with (
        patch.multiple(InterpreterBuilder, **replaced),
        patch.object(prf_calls, "launch", launched),
        patch.object(rks_calls, "launch", launched),
        patch.object(near_calls, "launch", launched),
    ):
        yield found


def _compute(product: str, stored: str, length: int, heads: int, options: RooflineBench, device: str) -> None:
    """Compute a product and its gradients."""
    dtype, dim = {"bf16": torch.bfloat16, "fp32": torch.float32}[stored], options.head_dim
    q, k, v, d_out = (torch.ones(1, heads, length, dim, dtype=dtype, device=device) for _ in range(4))
    if product == "near":
        kernels, window = near.near_kernels(), near.Layout(WINDOW, WINDOW, 0)
        operands = [*(x.float() for x in (q, k, v)), None, None, None, None]
        results = kernels.forward(operands, None, window)
        kernels.backward(operands, None, window, results, d_out.float(), None)
        return
    backend = cast(FusedBackend, BACKENDS["triton"])
    kernel = SpectralKernel(FEATURE_MAPS[product[:3]], torch.zeros(heads, options.frequencies, dim, device=device))
    if product.endswith("causal"):
        call = Call("causal", kernel, q=q, k=k, v=v)
        outputs = backend.forward(call, keep=True)
        backend.backward(call, outputs, [d_out, None, None, None, None], ("q", "k", "v", "omega"))
        return
    absorb = Call("absorb", kernel, k=k, v=v)
    sums = backend.forward(absorb, keep=True)
    read = Call("read", kernel, q=q, sums=Sums(*sums[:3]))
    found = backend.backward(read, backend.forward(read, keep=True), [d_out, None], ("q", "omega", "values", "weights"))
    backend.backward(absorb, sums, [found["values"], found["weights"], None], ("k", "v", "omega"))
