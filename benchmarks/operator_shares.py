"""`bench operator-shares`: where the time of the product goes."""

from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from benchmarks.shares import measure_shares, share_table
from klformer.checks import check_choice, check_count
from klformer.lab.bench.measure import write_report
from klformer.lab.bench.ops import PRODUCTS
from klformer.lab.bench.subjects import Operands, Sizes, forward_and_backward
from klformer.lab.environment import describe_machine
from klformer.lab.terminal import make_console


@dataclass(frozen=True)
class OperatorSharesBench:
    """Shares of matrix products, sines, passes and calls in the time of the product, forward and backward.

    Example: klformer --plugin benchmarks bench operator-shares --head-dims 16 64
    """

    products: tuple[str, ...] = ("prf", "prf causal", "rks", "rks causal")
    """Products, as `klformer bench ops` names them."""
    head_dims: tuple[int, ...] = (16, 64)
    """Sizes D = E of queries, keys and values."""
    length: int = 4096
    """Tokens L."""
    heads: int = 8
    """Heads H."""
    frequencies: int = 128
    """Frequencies R."""
    repeats: int = 5
    """Steps that are profiled."""
    json: Path | None = None
    """Write all figures to this file."""


def run(options: OperatorSharesBench) -> None:
    """Profile, print the table, and write the figures where they were asked for."""
    for name in options.products:
        check_choice("products", name, PRODUCTS)
    check_count("repeats", options.repeats)
    console, environment = make_console(120), describe_machine()
    results = []
    for name, dim in product(options.products, options.head_dims):
        sizes = Sizes(1, options.heads, options.length, dim, dim, options.frequencies)
        step = forward_and_backward(name, Operands.random(sizes))
        shares = measure_shares(step, repeats=options.repeats)
        results.append({"name": f"{name}, D={dim}", "product": name, **asdict(sizes), **shares})
    shape = f"L={options.length:,} H={options.heads} R={options.frequencies}"
    title = f"the product, forward + backward, {shape}, {environment['date']}, {environment['machine']}"
    replace(share_table(results), title=title).print(console)
    write_report(options.json, environment, {"options": asdict(options), "results": results}, console)
