"""`bench few-queries`: the product of one query, without a state and through one, in turns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from klformer.checks import check_count
from klformer.lab.bench.measure import both_times, spread, write_report
from klformer.lab.environment import describe_machine
from klformer.lab.tables import Table, interval, number
from klformer.lab.terminal import make_console
from klformer.ops.spectral_product import spectral_product
from klformer.ops.spectral_product.chunked import pairs

#: Whether a call is served without a state.
WAYS: Mapping[str, bool] = {"pairs": True, "state": False}


@dataclass(frozen=True)
class FewQueriesBench:
    """Processor time of forward and backward for one query: by pairs, and through a state, round by round.

    Example: klformer --plugin benchmarks bench few-queries --keys 2048 4096 --json few.json
    """

    feature_maps: tuple[str, ...] = ("prf", "rks")
    """Feature maps that have both ways."""
    head_dims: tuple[int, ...] = (16, 64)
    """Sizes D = E of queries, keys and values."""
    keys: tuple[int, ...] = (2048,)
    """Keys S."""
    heads: int = 8
    """Heads H."""
    frequencies: int = 128
    """Frequencies R."""
    repeats: int = 21
    """Rounds that are counted, after one to warm up."""
    json: Path | None = None
    """Write all figures to this file."""


def run(options: FewQueriesBench) -> None:
    """Measure, print the table, and write the figures where they were asked for."""
    check_count("repeats", options.repeats)
    console, environment = make_console(100), describe_machine()
    cases = product(options.feature_maps, options.head_dims, options.keys)
    results = [_measure(options, feature_map, head_dim, keys) for feature_map, head_dim, keys in cases]
    shape = f"H={options.heads} R={options.frequencies}"
    title = f"one query, forward + backward, {shape}, {environment['date']}, {environment['machine']}"
    replace(few_query_table(results), title=title).print(console)
    write_report(options.json, environment, {"options": asdict(options), "results": results}, console)


def _measure(options: FewQueriesBench, feature_map: str, head_dim: int, keys: int) -> dict[str, Any]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, options.heads, n, head_dim, requires_grad=True) for n in (1, keys, keys))
    omega = torch.randn(options.heads, options.frequencies, head_dim) * 0.3

    def taking(way: str) -> Callable[[], None]:
        def step() -> None:
            with patch.object(pairs, "serves", lambda call: WAYS[way]):
                torch.autograd.grad(spectral_product(q, k, v, omega, feature_map=feature_map).sum(), [q, k, v])

        return step

    times = both_times({way: taking(way) for way in WAYS}, repeats=options.repeats)
    processor = {way: seconds for way, (_, seconds) in times.items()}
    return {
        "feature_map": feature_map,
        "head_dim": head_dim,
        "queries": 1,
        "keys": keys,
        **{way: spread(seconds) for way, seconds in processor.items()},
        "state_over_pairs": spread([s / p for s, p in zip(processor["state"], processor["pairs"], strict=True)]),
    }


def few_query_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return a line for each case; above 1 the way without a state is faster."""
    lines = [
        {
            "feature map": row["feature_map"],
            "D = E": row["head_dim"],
            "queries": row["queries"],
            "pairs, ms": number(row["pairs"]["median"] * 1e3, "{:.1f}"),
            "state, ms": number(row["state"]["median"] * 1e3, "{:.1f}"),
            "state / pairs (lowest to highest)": interval(row["state_over_pairs"]),
        }
        for row in results
    ]
    return Table.of(lines)
