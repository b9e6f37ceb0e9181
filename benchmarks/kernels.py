"""`bench kernels`: the kernels for GPUs as machine code of real devices, built without one.

Registers and spills are those that the assemblers say: ptxas of the Triton wheel, and LLVM for AMD. A spill is a number
that did not fit into registers and is written to memory, bytes for NVIDIA and registers for AMD.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from klformer.errors import ArgumentError, check_extra
from klformer.lab.bench.measure import write_report
from klformer.lab.environment import describe_machine
from klformer.lab.tables import Table
from klformer.lab.terminal import make_console

_STATES = {"GRADIENT": True, "REVERSE": True}
#: Kernels as they are launched, by name: the file of `klformer/ops/triton`, the function, and its constants. Those that
#: are not named here are as in `ALWAYS`.
KERNELS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "envelope": ("prf", "envelope_kernel", {"SIMPLEX": True}),
    "prf states": ("prf", "states_kernel", {"HAS_A": False}),
    "prf states, backward": ("prf", "states_kernel", _STATES),
    "prf read": ("prf", "attend_kernel", {}),
    "prf causal": ("prf", "attend_kernel", {"CAUSAL": True}),
    "prf gradients of queries": ("prf", "gradients_kernel", {}),
    "prf gradients of keys": ("prf", "gradients_kernel", {"KEYS": True, "SIMPLEX": True}),
    "prf causal, of queries": ("prf", "gradients_kernel", {"PAIRS": True}),
    "prf causal, of keys": ("prf", "gradients_kernel", {"KEYS": True, "PAIRS": True, "SIMPLEX": True}),
    "rks sums": ("rks", "sums_kernel", {"HAS_A": False}),
    "rks sums, backward": ("rks", "sums_kernel", {"GRADIENT": True}),
    "rks read": ("rks", "attend_kernel", {}),
    "rks causal": ("rks", "attend_kernel", {"CAUSAL": True}),
    "rks gradients of queries": ("rks", "gradients_kernel", {}),
    "rks gradients of keys": ("rks", "gradients_kernel", {"KEYS": True}),
    "rks causal, of queries": ("rks", "gradients_kernel", {"PAIRS": True}),
    "rks causal, of keys": ("rks", "gradients_kernel", {"KEYS": True, "PAIRS": True}),
    "rks pairs, sums": ("rks", "sums_kernel", {"PARTS": 2, "HAS_A": False}),
    "rks pairs, read": ("rks", "attend_kernel", {"PARTS": 2}),
    "rks pairs, causal": ("rks", "attend_kernel", {"CAUSAL": True, "PARTS": 2}),
    "rks pairs, gradients of queries": ("rks", "gradients_kernel", {"PARTS": 2}),
    "rks pairs, gradients of keys": ("rks", "gradients_kernel", {"KEYS": True, "PARTS": 2}),
    "rks pairs, causal, of queries": ("rks", "gradients_kernel", {"PAIRS": True, "PARTS": 2}),
    "rks pairs, causal, of keys": ("rks", "gradients_kernel", {"KEYS": True, "PAIRS": True, "PARTS": 2}),
    "near": ("near", "attend_kernel", {}),
    "near, of queries": ("near", "queries_kernel", {}),
    "near, of keys": ("near", "keys_kernel", {}),
}
#: Constants as they are where much is asked for, and forms that are off.
ALWAYS: Mapping[str, Any] = {
    **dict.fromkeys(
        ("HAS_MASK", "HAS_BIAS", "HAS_A", "HAS_LOG", "HAS_0", "HAS_EXACT", "STORE", "SMOOTH", "HAS_FACTOR", "HAS_FAR"),
        True,
    ),
    **dict.fromkeys(("SIMPLEX", "GRADIENT", "REVERSE", "CAUSAL", "KEYS", "PAIRS"), False),
    "PARTS": 1,
}
#: Devices by name: Triton's backend, the architecture, and the threads of a warp.
DEVICES = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
#: Arguments that are numbers and no integers; and the tensors that are stored as queries are.
FLOATS, TOKENS = ("coefficient", "log_r"), ("Q", "K", "V", "X", "Y", "OUT", "D_OUT", "DQ", "DK", "DV")


@dataclass(frozen=True)
class KernelsBench:
    """Registers, spills and shared memory of the kernels for GPUs, compiled without one.

    Example: klformer --plugin benchmarks bench kernels --devices sm_80 --head-dim 64
    """

    devices: tuple[str, ...] = tuple(DEVICES)
    """Devices that are compiled for."""
    kernels: tuple[str, ...] = tuple(KERNELS)
    """Kernels."""
    types: tuple[str, ...] = ("bf16", "fp32")
    """What queries, keys and values are stored in."""
    head_dim: int = 64
    """Size D = E of queries, keys and values."""
    json: Path | None = None
    """Write all figures to this file."""


def run(options: KernelsBench) -> None:
    """Compile, print the table, and write the figures where they were asked for.

    Raises:
        ArgumentError: there is no such device or kernel.
        MissingExtraError: Triton is not installed.
    """
    check_extra("triton", "this benchmark", ["triton"])
    for name, given, known in (("devices", options.devices, DEVICES), ("kernels", options.kernels, KERNELS)):
        if strange := set(given) - set(known):
            raise ArgumentError(f"{name} must be of {', '.join(known)}, got {', '.join(sorted(strange))}")
    console, results = make_console(100), list(compiled(options))
    cells = [{name: str(value) for name, value in row.items()} for row in results]
    replace(Table.of(cells), title=f"D=E={options.head_dim}").print(console)
    write_report(options.json, describe_machine(), {"options": asdict(options), "results": results}, console)


def compiled(options: KernelsBench) -> Iterator[dict[str, Any]]:
    """Yield what every kernel takes on every device."""
    for device in options.devices:
        for stored in options.types:
            for name in options.kernels:
                used = _compile(name, device, stored, options.head_dim)
                yield {"device": device, "type": stored, "kernel": name, **used}


def _blocks(name: str, device: str, stored: str, head_dim: int) -> Any:
    """Return the sizes of blocks that a kernel is launched with."""
    from klformer.ops.triton.launches import Blocks
    from klformer.ops.triton.near_calls import near_blocks

    (module, function, constants), hip = KERNELS[name], device.startswith("gfx")
    if module == "near":
        return near_blocks(head_dim, head_dim, hip=hip)
    causal, cosines = any(constants.get(x) for x in ("CAUSAL", "PAIRS", "GRADIENT")), module == "rks"
    blocks = Blocks.of(head_dim, head_dim, half=stored == "bf16", hip=hip, causal=causal, cosines=cosines)
    if function != "gradients_kernel":
        return blocks
    keys, tight = bool(constants.get("KEYS")), constants.get("PAIRS") or constants.get("PARTS") == 2
    if not cosines:
        tight = keys and (tight or blocks.precision == "tf32x3")
    return blocks.for_gradients(keys=keys, tight=bool(tight))


def _compile(name: str, device: str, stored: str, head_dim: int) -> dict[str, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    (module, function, constants), blocks = KERNELS[name], _blocks(name, device, stored, head_dim)
    stored = "fp32" if module == "near" else stored
    kernel = getattr(import_module(f"klformer.ops.triton.{module}"), function)
    given: dict[str, Any] = {x: value for x, value in ALWAYS.items() if x in kernel.arg_names} | constants
    known = blocks.constants | {"BM": blocks.tokens, "BN": blocks.tokens}
    given |= {x: value for x, value in known.items() if x in kernel.arg_names}
    signature, aligned = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        signature[argument] = "constexpr" if argument in given else _type(argument, stored)
        # What is known at run time, too: tensors begin and rows end at multiples of 16.
        if signature[argument][0] == "*" or argument in ("L", "S", "length", "D", "E") or argument[1:2] == "_":
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=given, attrs=aligned)
    options = {"num_warps": blocks.warps, "num_stages": 1}
    found = triton.compile(source, target=GPUTarget(*DEVICES[device]), options=options)
    used = _of_amd(found.asm["amdgcn"]) if "amdgcn" in found.asm else _of_nvidia(found.asm["ptx"], device)
    return used | {"shared": found.metadata.shared}


def _type(argument: str, stored: str) -> str:
    if argument in FLOATS:
        return "fp32"
    if argument in ("L", "S", "H", "R", "D", "E") or not argument.isupper():
        return "i32"
    return f"*{({'LOST': 'i32', 'MASK': 'i1', 'KEEP': 'i1'} | dict.fromkeys(TOKENS, stored)).get(argument, 'fp32')}"


def _of_nvidia(ptx: str, device: str) -> dict[str, int]:
    import triton

    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.ptx").write_text(ptx)
        target = f"{device}a" if device == "sm_90" else device
        command: Sequence[str | Path] = (assembler, "-v", f"--gpu-name={target}", "kernel.ptx", "-o", "kernel.cubin")
        said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr
    return {"registers": _number(r"Used (\d+) registers", said), "spilt": _number(r"(\d+) bytes spill stores", said)}


def _of_amd(assembly: str) -> dict[str, int]:
    return {
        "registers": _number(r"\.vgpr_count:\s*(\d+)", assembly),
        "spilt": _number(r"\.vgpr_spill_count:\s*(\d+)", assembly),
    }


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return int(found[1])
