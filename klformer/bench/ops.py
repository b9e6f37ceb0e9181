"""`python -m klformer.bench ops`: the fused product against materialised features, softmax and its own floor."""

import json
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from klformer.bench.measure import MEBIBYTE, extra_peak_memory, in_own_process, log_log_slope, median_times
from klformer.bench.subjects import ATTENTIONS, Operands, Sizes, forward_and_backward, matrix_products

CAPTION = (
    "materialised, softmax: their time / ours (higher is better). matrix products, bidirectional: our time / theirs;\n"
    "the first is the floor, the product's own matrix products alone. extra MiB: peak above the operands."
)


@dataclass(frozen=True)
class OpsBench:
    """Time of forward and backward, interleaved and as medians, and extra peak memory, each in a process of its own.

    Example: python -m klformer.bench ops --lengths 2048 16384 --frequencies 128 256 --json ops.json
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
    json: Path | None = None
    """Write all figures to this file."""

    def sizes(self, length: int, frequencies: int) -> Sizes:
        return Sizes(self.batch, self.heads, length, self.head_dim, self.value_dim, frequencies)

    def skips(self, name: str, length: int) -> bool:
        too_long_for_softmax = name == "softmax" and length > self.softmax_up_to
        return too_long_for_softmax or ("materialised" in name and length > self.materialised_up_to)


def run(options: OpsBench) -> None:
    """Measure, print the tables, and write the figures where they were asked for."""
    console = Console(width=max(112, Console().width))
    environment = describe_machine()
    console.print(f"klformer op benchmark, {environment['date']}, {environment['machine']}")
    results = []
    for frequencies in options.frequencies:
        for length in options.lengths:
            results += _measure(options, options.sizes(length, frequencies), console)
        console.print(_table(options, [r for r in results if r["frequencies"] == frequencies], frequencies))
    growth = _growth(results)
    for line in growth:
        console.print(line)
    if options.json is not None:
        report = {"environment": environment, "options": _plain(asdict(options)), "results": results, "growth": growth}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
        console.print(f"figures written to {options.json}")


def measure_memory(name: str, sizes: Sizes) -> None:
    """Print the extra peak memory in bytes; meant to be alone in its process."""
    small = Sizes(**{**asdict(sizes), "length": 256})
    forward_and_backward(name, Operands.random(small))()
    operands = Operands.random(sizes)
    print(extra_peak_memory(forward_and_backward(name, operands)))


def describe_machine() -> dict[str, Any]:
    """Date, machine and versions, to be printed with every figure."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{_processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _measure(options: OpsBench, sizes: Sizes, console: Console) -> list[dict[str, Any]]:
    """Time and memory of every subject at one size."""
    names = [name for name in ATTENTIONS if not options.skips(name, sizes.length)]
    operands = Operands.random(sizes)
    subjects = {name: forward_and_backward(name, operands) for name in names}
    for feature_map in ("rks", "prf"):
        subjects[f"{feature_map} matrix products"] = matrix_products(feature_map, operands)
    with console.status(f"L={sizes.length} R={sizes.frequencies}: time"):
        times = median_times(subjects, repeats=options.repeats)
    results = []
    for name, seconds in times.items():
        memory = None
        if options.memory and name in ATTENTIONS:
            with console.status(f"L={sizes.length} R={sizes.frequencies}: memory of {name}"):
                memory = int(in_own_process(["memory", "--name", name, *_as_arguments(sizes)]))
        results.append({"name": name, **asdict(sizes), "seconds": seconds, "memory": memory})
    return results


def _as_arguments(sizes: Sizes) -> list[str]:
    pairs = [(f"--sizes.{key.replace('_', '-')}", str(value)) for key, value in asdict(sizes).items()]
    return [part for pair in pairs for part in pair]


def _table(options: OpsBench, results: list[dict[str, Any]], frequencies: int) -> Table:
    """One row for each fused product and length, with the ratios to everything else."""
    shape = f"B={options.batch} H={options.heads} D={options.head_dim} E={options.value_dim} R={frequencies}"
    table = Table(title=f"forward + backward of spectral_product, {shape}", caption=CAPTION, caption_justify="left")
    for column in ("L", "kernel"):
        table.add_column(column, no_wrap=True)
    for column in ("ms", "materialised", "softmax", "matrix products", "bidirectional", "extra MiB", "of materialised"):
        table.add_column(column, justify="right")
    for length in options.lengths:
        rows = {r["name"]: r for r in results if r["length"] == length}
        for name in ("rks", "rks causal", "prf", "prf causal"):
            row, kind = rows[name], name.split()[0]
            materialised = rows.get(f"{kind} materialised")
            causal = name.endswith("causal")
            table.add_row(
                f"{length:,}",
                name,
                f"{row['seconds'] * 1e3:,.0f}",
                "" if causal else _ratio(materialised, row, "seconds"),
                _ratio(rows.get("softmax"), row, "seconds"),
                "" if causal else _ratio(row, rows[f"{kind} matrix products"], "seconds"),
                _ratio(row, rows[kind], "seconds") if causal else "",
                "" if row["memory"] is None else f"{row['memory'] / MEBIBYTE:,.0f}",
                _ratio(row, materialised, "memory"),
            )
        table.add_section()
    return table


def _ratio(above: dict[str, Any] | None, below: dict[str, Any] | None, field: str) -> str:
    if above is None or below is None or not above[field] or not below[field]:
        return ""
    return f"{above[field] / below[field]:.2f}x"


def _growth(results: list[dict[str, Any]]) -> list[str]:
    """How time and memory grow with the length (slopes) and memory with the frequencies."""
    lines = []
    for name in ("rks", "rks causal", "prf", "prf causal"):
        mine = [r for r in results if r["name"] == name]
        for frequencies in sorted({r["frequencies"] for r in mine}):
            series = sorted((r for r in mine if r["frequencies"] == frequencies), key=lambda r: r["length"])
            for field in ("seconds", "memory"):
                points = [(r["length"], r[field]) for r in series if r[field]]
                if len(points) >= 3:
                    slope = log_log_slope(*zip(*points, strict=True))
                    first, last = points[0][0], points[-1][0]
                    what = "time" if field == "seconds" else "memory"
                    lines.append(
                        f"{name} R={frequencies}: {what} grows as L^{slope:.2f} from {first:,} to {last:,} tokens"
                    )
        for length in sorted({r["length"] for r in mine}):
            memory = {r["frequencies"]: r["memory"] for r in mine if r["length"] == length and r["memory"]}
            if len(memory) >= 2:
                few, many = min(memory), max(memory)
                lines.append(
                    f"{name} L={length:,}: memory of R={many} is {memory[many] / memory[few]:.2f}x that of R={few}"
                )
    return lines


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
