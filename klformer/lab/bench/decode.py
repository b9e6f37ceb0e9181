"""`klformer bench decode`: tokens per second of step-by-step decoding at several positions.

One attention by itself, B sequences, one token a step. A kernel's state has one size at every position; a softmax cache
is as long as what came before. That cache is given every advantage: its memory is there from the start, and a step
writes one row and reads the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from klformer.attention import attention_capabilities, attention_options, build_attention
from klformer.errors import ArgumentError
from klformer.lab.bench.measure import Heads, both_times, spread, write_report
from klformer.lab.environment import describe_machine
from klformer.lab.tables import Table, interval
from klformer.lab.terminal import make_console

SOFTMAX = "softmax, preallocated cache"
CAPTION = "median (lowest to highest) of rounds; a kernel's step costs the same at every position"


@dataclass(frozen=True, kw_only=True)
class DecodeBench(Heads):
    """Tokens per second of decoding: prepared (in place), step by step (a new state each), and a softmax cache.

    Example: klformer bench decode --attentions gmm-prf gmm-rks --positions 1024 8192 65536
    """

    attentions: tuple[str, ...] = ("gmm-prf", "gmm-rks", "fastfood-prf", "atoms-prf", "linear-elu")
    """Attentions that can decode."""
    batch_sizes: tuple[int, ...] = (1, 32)
    """Sequences B that are decoded together."""
    positions: tuple[int, ...] = (1024, 8192, 65536)
    """Tokens that came before; only softmax's time depends on it."""
    steps: int = 20
    """Steps that a round takes the time of."""
    repeats: int = 5
    """Rounds that are counted, after one to warm up."""
    memory_limit: float = 4.0
    """GiB that a softmax cache may take; larger ones are left out."""
    json: Path | None = None
    """Write all figures to this file."""


@torch.no_grad()
def run(options: DecodeBench) -> None:
    """Measure, print the table, and write the figures where they were asked for."""
    for name in options.attentions:
        if not attention_capabilities(name).decoding:
            raise ArgumentError(f"attentions: {name!r} can't decode step by step")
    console = make_console(140)
    environment = describe_machine()
    console.print(f"klformer decoding benchmark, {environment['date']}, {environment['machine']}")
    results = []
    for batch in options.batch_sizes:
        subjects = _subjects(options, batch)
        with console.status(f"B={batch}"):
            times = both_times(subjects, repeats=options.repeats)
        for name, (wall, processor) in times.items():
            results.append(
                {
                    "name": name,
                    "batch": batch,
                    "tokens_per_second": spread([options.steps * batch / seconds for seconds in wall]),
                    "processor_microseconds_a_step": spread([1e6 * seconds / options.steps for seconds in processor]),
                }
            )
    shape = f"H={options.heads} D=E={options.head_dim} R={options.num_frequencies}"
    title = f"decoding, one attention, {shape}, default allocator"
    replace(decoding_table(results), title=title, notes=(CAPTION,)).print(console)
    write_report(options.json, environment, {"options": asdict(options), "results": results}, console)


def _subjects(options: DecodeBench, batch: int) -> dict[str, Callable[[], object]]:
    """Return rounds of steps by name. Every step has tokens of its own: a state is not rescaled for one that it has
    seen."""
    shape = (options.steps, 3, batch, options.heads, 1, options.head_dim)
    tokens = [tuple(token) for token in torch.randn(shape)]
    subjects: dict[str, Callable[[], object]] = {}
    for name in options.attentions:
        chosen = {"num_frequencies": options.num_frequencies} if "num_frequencies" in attention_options(name) else {}
        mechanism = build_attention(name, num_heads=options.heads, head_dim=options.head_dim, **chosen).eval()
        for label, state in (("prepared", mechanism.prepare_decoding(batch)), ("step", mechanism.initial_state(batch))):

            def steps(mechanism: Any = mechanism, state: Any = state) -> None:
                for q, k, v in tokens:
                    _, state = mechanism.step(q, k, v, state)

            subjects[f"{name}, {label}"] = steps
    for position in options.positions:
        if 8 * batch * options.heads * position * options.head_dim <= options.memory_limit * 2**30:
            subjects[f"{SOFTMAX}, {position:,}"] = _cached_softmax(options, batch, position, tokens)
    return subjects


def _cached_softmax(
    options: DecodeBench, batch: int, position: int, tokens: Sequence[tuple[torch.Tensor, ...]]
) -> Callable[[], None]:
    """Return steps at a position, with a cache whose memory is there from the start."""
    room = (batch, options.heads, position + options.steps, options.head_dim)
    keys, values = torch.zeros(room), torch.zeros(room)

    def steps() -> None:
        for index, (q, k, v) in enumerate(tokens, start=position):
            keys[:, :, index : index + 1], values[:, :, index : index + 1] = k, v
            scaled_dot_product_attention(q, keys[:, :, : index + 1], values[:, :, : index + 1])

    return steps


def decoding_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return a line for each subject, with tokens a second and the time of a step for each number of sequences."""
    found = {(row["name"], row["batch"]): row for row in results}
    lines = []
    for name in dict.fromkeys(name for name, _ in found):
        line: dict[str, object] = {"": name}
        for batch in dict.fromkeys(batch for _, batch in found):
            row = found.get((name, batch), {})
            line[f"B={batch}: tokens / s"] = interval(row.get("tokens_per_second"), "{:,.0f}")
            line[f"B={batch}: processor µs a step"] = interval(row.get("processor_microseconds_a_step"), "{:,.0f}")
        lines.append(line)
    return Table.of(lines)
