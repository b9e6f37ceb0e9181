"""`klformer bench ops`: the fused product against materialised features, softmax and its own floor."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from klformer.lab.bench.measure import (
    backends_of,
    both_times,
    describe_backends,
    in_own_process,
    log_log_slope,
    spread,
    with_kept_memory,
    write_report,
)
from klformer.lab.bench.subjects import ATTENTIONS, Operands, Sizes, forward_and_backward, matrix_products
from klformer.lab.environment import describe_machine
from klformer.lab.tables import Table, interval, number
from klformer.lab.terminal import make_console
from klformer.memory import MEBIBYTE, extra_peak_memory
from klformer.ops.feature_maps import FEATURE_MAPS

#: The subjects that are this library's.
PRODUCTS = ("rks", "rks causal", "prf", "prf causal", "prf flash")
CAPTION = (
    "processor: time of all threads, median (lowest to highest); all ratios are of it. materialised, softmax\n"
    "(causal where we are): theirs / ours, higher is better; kept: in a process that keeps the memory it frees.\n"
    "floor: ours / the matrix products alone, with a column of ones and in new memory; lean: without either.\n"
    "bidirectional: ours / that without causality. MiB: peak memory above the operands; also as a share of that of\n"
    "materialised features, and in relation to the result and the gradients of q, k and v, which can't be avoided."
)


@dataclass(frozen=True)
class OpsBench:
    """Time of forward and backward, interleaved and as medians, and extra peak memory, each in a process of its own.

    Example: klformer bench ops --lengths 2048 16384 --frequencies 128 256 --json ops.json
    """

    lengths: tuple[int, ...] = (2048, 16384)
    """Sequence lengths L."""
    frequencies: tuple[int, ...] = (128, 256)
    """Numbers of frequencies R."""
    batch: int = 1
    """Batch size B."""
    heads: int = 8
    """Heads H."""
    head_dim: int = 64
    """Size D of queries and keys."""
    value_dim: int = 64
    """Size E of values."""
    repeats: int = 5
    """Rounds that are counted, after one to warm up."""
    softmax_up_to: int = 16384
    """Longest sequence at which softmax is run; it takes time quadratic in the length."""
    materialised_up_to: int = 16384
    """Longest sequence at which features are materialised; they take gigabytes."""
    memory: bool = True
    """Measure memory as well."""
    kept: bool = True
    """Measure time again in a process that keeps the memory that it frees."""
    json: Path | None = None
    """Write all figures to this file."""

    def sizes(self, length: int, frequencies: int) -> Sizes:
        return Sizes(self.batch, self.heads, length, self.head_dim, self.value_dim, frequencies)

    def skips(self, name: str, length: int) -> bool:
        too_long_for_softmax = name.startswith("softmax") and length > self.softmax_up_to
        return too_long_for_softmax or ("materialised" in name and length > self.materialised_up_to)


def run(options: OpsBench) -> None:
    """Measure, print the tables, and write the figures where they were asked for."""
    console = make_console(168)
    environment = describe_machine()
    console.print(f"klformer op benchmark, {environment['date']}, {environment['machine']}")
    results: list[dict[str, Any]] = []
    again = with_kept_memory(measure, options) if options.kept else []
    kept = {tuple(row[key] for key in ("name", "length", "frequencies")): row for row in again}
    for frequencies in options.frequencies:
        for length in options.lengths:
            results += _measure(options, options.sizes(length, frequencies), console)
        for row in results:
            other = kept.get((row["name"], row["length"], row["frequencies"]))
            row["kept"] = None if other is None else {key: other[key] for key in ("seconds", "processor", "ratios")}
        table = operator_table([row for row in results if row["frequencies"] == frequencies])
        shape = f"B={options.batch} H={options.heads} D={options.head_dim} E={options.value_dim} R={frequencies}"
        title = f"forward + backward of spectral_product, {shape}"
        replace(table, title=title, notes=(CAPTION,)).print(console)
    console.print(describe_backends(results), highlight=False)
    growth = _growth(results)
    for item in growth:
        console.print(_describe_growth(item))
    found = {"options": asdict(options), "results": results, "growth": growth}
    write_report(options.json, environment, found, console)


def measure(options: OpsBench) -> list[dict[str, Any]]:
    """Return the rows of all sizes."""
    sizes = [options.sizes(length, frequencies) for frequencies in options.frequencies for length in options.lengths]
    return [row for each in sizes for row in _measure(options, each, Console(quiet=True))]


def measure_memory(name: str, sizes: Sizes) -> int:
    """Return the extra peak memory in bytes; meant to be alone in its process."""
    forward_and_backward(name, Operands.random(replace(sizes, length=256)))()
    return extra_peak_memory(forward_and_backward(name, Operands.random(sizes)))


def _measure(options: OpsBench, sizes: Sizes, console: Console) -> list[dict[str, Any]]:
    """Time and memory of every subject at one size."""
    names = [name for name in ATTENTIONS if not options.skips(name, sizes.length)]
    operands = Operands.random(sizes)
    subjects = {name: forward_and_backward(name, operands) for name in names}
    for feature_map in ("rks", "prf"):
        parts = FEATURE_MAPS[feature_map].parts
        subjects[f"{feature_map} matrix products"] = matrix_products(sizes, parts=parts, lean=False)
        subjects[f"{feature_map} matrix products, lean"] = matrix_products(sizes, parts=parts, lean=True)
    with console.status(f"L={sizes.length} R={sizes.frequencies}: time"):
        times = both_times(subjects, repeats=options.repeats)
    served = {name: backends_of(subjects[name]) for name in names}
    results = []
    for name, (wall, processor) in times.items():
        memory = None
        if options.memory and name in ATTENTIONS:
            with console.status(f"L={sizes.length} R={sizes.frequencies}: memory of {name}"):
                memory = in_own_process(measure_memory, name, sizes)
        clocks = {"seconds": statistics.median(wall), "processor": spread(processor)}
        least = sizes.result_and_gradients()
        row = {"name": name, **asdict(sizes), **clocks, "memory": memory, "result_and_gradients": least}
        results.append(row | {"backends": served.get(name, [])})
    rows = {row["name"]: row for row in results}
    return [row | {"ratios": _ratios(rows, row["name"]) if row["name"] in PRODUCTS else None} for row in results]


def _ratios(rows: dict[str, dict[str, Any]], name: str) -> dict[str, float | None]:
    """Return how the fused product `name` compares with the others at one size; None where there is nothing to
    compare."""
    kind, causal = name.split()[0], name.endswith("causal")
    row = rows[name]
    materialised = None if causal else rows.get(f"{kind} materialised")
    return {
        "materialised_over_ours": _ratio(materialised, row),
        "softmax_over_ours": _ratio(rows.get("softmax causal" if causal else "softmax"), row),
        "ours_over_matrix_products": None if causal else _ratio(row, rows[f"{kind} matrix products"]),
        "ours_over_lean": None if causal else _ratio(row, rows[f"{kind} matrix products, lean"]),
        "causal_over_bidirectional": _ratio(row, rows[kind]) if causal else None,
        "memory_of_materialised": _memory_ratio(row, materialised),
    }


def _ratio(above: dict[str, Any] | None, below: dict[str, Any] | None) -> float | None:
    """Return the ratio of medians of processor time."""
    if above is None or below is None or not below["processor"]["median"]:
        return None
    return float(above["processor"]["median"] / below["processor"]["median"])


def _memory_ratio(above: dict[str, Any], below: dict[str, Any] | None) -> float | None:
    if below is None or not above["memory"] or not below["memory"]:
        return None
    return float(above["memory"] / below["memory"])


def operator_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return a line for each fused product and size, with the ratios to everything else. D is there if it changes."""
    products = sorted((row for row in results if row["ratios"]), key=lambda row: (row["head_dim"], row["length"]))
    several = len({row["head_dim"] for row in products}) > 1
    return Table.of([({"D": row["head_dim"]} if several else {}) | _line(row) for row in products])


def _line(row: Mapping[str, Any]) -> dict[str, object]:
    ratios, memory, times = row["ratios"], row["memory"], "{:.2f}x"
    kept = row["kept"]["ratios"]["materialised_over_ours"] if row["kept"] else None
    return {
        "L": number(row["length"], "{:,}"),
        "kernel": row["name"],
        "ms": number(row["seconds"] * 1e3, "{:,.0f}"),
        "processor ms": interval(row["processor"], "{:,.0f}", 1e3),
        "materialised": number(ratios["materialised_over_ours"], times),
        "kept": number(kept, times),
        "softmax": number(ratios["softmax_over_ours"], times),
        "floor": number(ratios["ours_over_matrix_products"], times),
        "lean floor": number(ratios["ours_over_lean"], times),
        "bidirectional": number(ratios["causal_over_bidirectional"], times),
        "MiB": number(memory and memory / MEBIBYTE, "{:,.0f}"),
        "of materialised": number(ratios["memory_of_materialised"], times),
        "of result and gradients": number(memory and memory / row["result_and_gradients"], times),
    }


def _growth(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return slopes of time and memory with the length, and ratios of memory between the most and the fewest
    frequencies."""
    found = []
    for name in PRODUCTS:
        mine = [r for r in results if r["name"] == name]
        for frequencies in sorted({r["frequencies"] for r in mine}):
            series = sorted((r for r in mine if r["frequencies"] == frequencies), key=lambda r: r["length"])
            for field in ("seconds", "memory"):
                points = [(r["length"], r[field]) for r in series if r[field]]
                if len(points) >= 3:
                    slope = log_log_slope(*zip(*points, strict=True))
                    sizes = {"from": points[0][0], "to": points[-1][0]}
                    found.append({"name": name, "frequencies": frequencies, "of": field, "slope": slope, **sizes})
        for length in sorted({r["length"] for r in mine}):
            memory = {r["frequencies"]: r["memory"] for r in mine if r["length"] == length and r["memory"]}
            if len(memory) >= 2:
                few, many = min(memory), max(memory)
                ratio = memory[many] / memory[few]
                found.append({"name": name, "length": length, "few": few, "many": many, "memory_ratio": ratio})
    return found


def _describe_growth(item: dict[str, Any]) -> str:
    if "slope" in item:
        what = "time" if item["of"] == "seconds" else "memory"
        grows = f"{what} grows as L^{item['slope']:.2f} from {item['from']:,} to {item['to']:,} tokens"
        return f"{item['name']} R={item['frequencies']}: {grows}"
    ratio = f"memory of R={item['many']} is {item['memory_ratio']:.2f}x that of R={item['few']}"
    return f"{item['name']} L={item['length']:,}: {ratio}"
