"""`klformer bench sequence`: one step of an encoder whose sequence is in parts; time, memory, and bytes that are said.

One process, or those of torchrun. Every process makes its own part of the sequence at random, forward and backward, and
gradients are averaged once.
"""

import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from klformer.attention import AttentionSpec
from klformer.distributed import average_gradients, parts_of, sequence_parallel
from klformer.distributed.collectives import ProcessParts
from klformer.errors import ArgumentError
from klformer.lab.bench.measure import write_report
from klformer.lab.bench.traffic import model_traffic
from klformer.lab.environment import allocator_variables, describe_machine
from klformer.lab.tables import Table, number
from klformer.memory import MEBIBYTE, peak_memory, reset_peak_memory
from klformer.models import EncoderConfig, TransformerEncoder


@dataclass(frozen=True)
class SequenceBench:
    """Time, memory and traffic of a training step with sequences in parts.

    Example: torchrun --nproc-per-node 2 -m klformer bench sequence --lengths 65536
    """

    lengths: tuple[int, ...] = (65_536,)
    """Tokens of the whole sequence; every process has an equal part."""
    attention: str = "gmm-prf:num_frequencies=128"
    """A kernel attention."""
    causal: bool = False
    """Positions see the past only."""
    num_layers: int = 4
    """Layers."""
    num_heads: int = 4
    """Heads H."""
    model_dim: int = 128
    """Size of a token."""
    ffn_dim: int = 256
    """Hidden size of the feed-forward part."""
    checkpoint_layers: bool = False
    """Compute the inside of layers again in backward, for less memory."""
    repeats: int = 3
    """Steps that are counted, after one to warm up; 0: the first step is the one that counts."""
    interface: str | None = None
    """Count what goes through this network interface as well: lo, in a network namespace of its own."""
    json: Path | None = None
    """Write all figures to this file."""


def run(options: SequenceBench) -> None:
    """Measure; the first process prints the table."""
    mesh = _mesh()
    results = [_measure(options, length, mesh) for length in options.lengths]
    if mesh is None or mesh.get_rank() == 0:
        environment = describe_machine()
        console = Console(width=max(112, Console().width))
        console.print(f"klformer sequence benchmark, {environment['date']}, {environment['machine']}")
        sizes = f"{options.num_layers} layers, H={options.num_heads}, width {options.model_dim}"
        title = f"{options.attention}, {sizes}; traffic in bytes"
        Table.of([step_line(row) | traffic_line(row) for row in results], title).print(console)
        write_report(options.json, environment, {"options": asdict(options), "results": results}, console)
    if mesh is not None:
        dist.destroy_process_group()


def _mesh() -> DeviceMesh | None:
    """Return the processes of torchrun; None for one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("sequence",))


def _measure(options: SequenceBench, length: int, mesh: DeviceMesh | None) -> dict[str, Any]:
    device = "cpu" if mesh is None else mesh.device_type
    count, rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_rank())
    torch.manual_seed(0)
    config = EncoderConfig(
        num_layers=options.num_layers,
        num_heads=options.num_heads,
        model_dim=options.model_dim,
        ffn_dim=options.ffn_dim,
        dropout=0.0,
        attention=AttentionSpec.of(options.attention),
        checkpoint_layers=options.checkpoint_layers,
    )
    model = TransformerEncoder(config, causal=options.causal).to(device)
    predicted = model_traffic(model, batch_size=1)
    if mesh is not None:
        sequence_parallel(model, mesh)
    x = torch.randn(1, len(range(rank, length, count)), options.model_dim, device=device)

    def step() -> float:
        _together(mesh)
        began = time.perf_counter()
        model(x).square().mean().backward()
        if mesh is not None:
            average_gradients(model, mesh)
        model.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    before = reset_peak_memory(device)
    if options.repeats:
        step()
    parts = parts_of(model)
    if isinstance(parts, ProcessParts):
        parts.traffic.clear()
    through = _sent(options.interface)
    times = [step() for _ in range(max(1, options.repeats))]
    _together(mesh)
    steps, peak = len(times), peak_memory(device)
    layers = steps * options.num_layers
    counted = dict(parts.traffic.bytes) if isinstance(parts, ProcessParts) else {}
    largest = _largest(torch.tensor([statistics.median(times), peak, peak - before], dtype=torch.float64), mesh)
    return {
        "length": length,
        "causal": options.causal,
        "processes": count,
        "allocator": allocator_variables(os.environ),
        "seconds": largest[0].item(),
        "peak_bytes": largest[1].item(),
        "peak_bytes_above_start": largest[2].item(),
        "counted_bytes_a_layer": {kind: number / layers for kind, number in counted.items()},
        "predicted_bytes_a_layer": predicted[0].payload if mesh is not None else 0,
        "predicted_bytes_sent_a_step": sum(p.on_the_wire(count, causal=options.causal) for p in predicted)
        + 2 * (count - 1) / count * sum(p.numel() * p.element_size() for p in model.parameters()),
        "interface": options.interface,
        "interface_bytes_a_step": None if through is None else (_known(_sent(options.interface)) - through) / steps,
    }


def _known(number: int | None) -> int:
    assert number is not None
    return number


def _together(mesh: DeviceMesh | None) -> None:
    if mesh is not None:
        dist.barrier()


def _largest(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    if mesh is not None:
        x = x.to(mesh.device_type)
        dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


def _sent(interface: str | None) -> int | None:
    """Return bytes that went out through a network interface so far, as this process's network namespace counts
    them."""
    if interface is None:
        return None
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])
    raise ArgumentError(f"interface: there is no {interface!r} here; `ip link` names them")


def step_line(row: Mapping[str, Any]) -> dict[str, object]:
    """Return what a step took, by heading."""
    return {
        "tokens": number(row["length"], "{:,}"),
        "direction": "causal" if row["causal"] else "bidirectional",
        "processes": row["processes"],
        "s a step": number(row["seconds"]),
        "peak MiB a process": number(row["peak_bytes"] / MEBIBYTE, "{:,.0f}"),
        "above the start": number(row["peak_bytes_above_start"] / MEBIBYTE, "{:,.0f}"),
    }


def traffic_line(row: Mapping[str, Any]) -> dict[str, object]:
    """Return the bytes that processes sent, and those that the formulas predict, by heading: for each layer, and for
    all together through a network interface where that was counted."""
    line: dict[str, object] = {
        "sent a layer": number(sum(row["counted_bytes_a_layer"].values()), "{:,.0f}"),
        "sent a layer, predicted": number(row["predicted_bytes_a_layer"], "{:,.0f}"),
    }
    if row["interface"] is not None:
        through, predicted = row["interface_bytes_a_step"], row["processes"] * row["predicted_bytes_sent_a_step"]
        line[f"through {row['interface']} a step"] = number(through, "{:,.0f}")
        line[f"through {row['interface']} a step, predicted"] = number(predicted, "{:,.0f}")
        line["counted / predicted"] = number(through / predicted if predicted else None)
    return line
