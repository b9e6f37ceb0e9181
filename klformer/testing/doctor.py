"""`klformer doctor`: which backends are right on this device, which serve what, and how fast they are. Needs no extra.

Every form of the product (`ops/spectral_product/self_check.py`) is computed by every backend that serves it, and
compared with the quadratic definition in float64 on the CPU: results, log-sums and gradients. So is attention to
neighbours: `near` in plain PyTorch, `near triton` its kernels for a GPU.
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import klformer
from klformer.checks import check_count
from klformer.errors import ArgumentError
from klformer.files import write_json
from klformer.ops.feature_maps import FEATURE_MAPS
from klformer.ops.near import near_kernels
from klformer.ops.spectral_product import BACKENDS, Backend, Call, SpectralKernel, explain_backends
from klformer.ops.spectral_product.self_check import (
    FORMS,
    KERNELS,
    NEAR_FORMS,
    Finding,
    check,
    check_near,
    device_name,
    installed,
)
from klformer.ops.triton.backend import why_not

#: Precisions of queries, keys and values.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Products whose time is taken: map, and whether it is causal.
PRODUCTS = {
    f"{name}{' causal' if causal else ''}": (name, causal) for causal in (False, True) for name in ("prf", "rks")
}
#: Seconds for one time, at most; the first call, which may compile, is not counted.
PATIENCE = 0.3


def parse(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    """Read the arguments of the command.

    Args:
        arguments: After the name of the command.
        prog: What was typed before them.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Check every backend on a device against float64, and time it beside softmax: half a minute. "
        "The exit code is 1 if one is wrong.",
    )
    parser.add_argument("--device", help="where, such as cpu or cuda:1; default: a GPU if torch sees one")
    parser.add_argument("--lengths", type=int, nargs="*", help="tokens of what is timed; none: nothing is timed")
    parser.add_argument("--json", type=Path, help="write all that was found to this file, to be sent with a report")
    return parser.parse_args(list(arguments))


def run(options: argparse.Namespace) -> None:
    """Print what is found, and write it where that was asked for.

    Raises:
        ArgumentError: there is no such device.
        SystemExit: with code 1, a backend is wrong.
    """
    report = examine(_device(options.device), options.lengths)
    print("\n".join(describe(report)))
    if options.json is not None:
        write_json(options.json, report)
        print(f"written to {options.json}")
    if report["wrong"]:
        raise SystemExit(1)


def examine(device: torch.device, lengths: Sequence[int] | None = None) -> dict[str, Any]:
    """Return what is found on a device, as data.

    Args:
        device: Where.
        lengths: Tokens of the sequences that are timed; some that fit the device if None.
    """
    if lengths is None:
        lengths = (1024, 4096, 16384) if device.type == "cuda" else (512, 1024, 2048)
    for length in lengths:
        check_count("lengths", length)
    found = {name: list(check(BACKENDS[name], device, dtypes=DTYPES, oracle="reference")) for name in BACKENDS}
    found["near"] = list(check_near(None, device, dtypes=DTYPES))
    found["near triton"] = list(_near_kernels(device))
    wrong = {name: [finding.describe() for finding in findings if finding.is_wrong] for name, findings in found.items()}
    wrong = {name: lines for name, lines in wrong.items() if lines}
    return {
        "environment": _environment(device),
        "backends": {name: [_as_data(finding) for finding in findings] for name, findings in found.items()},
        "auto": {product: _taken(product, device, wrong) for product in PRODUCTS},
        "times": list(_times(device, lengths, wrong)),
        "wrong": wrong,
    }


def _near_kernels(device: torch.device) -> Iterator[Finding]:
    """Yield what is found of the kernels for neighbours on a GPU, or why there are none."""
    reason = why_not(torch.empty(1, 1, 1, 1, device=device), torch.float32, 1)
    if reason is None:
        yield from check_near(near_kernels(), device, dtypes=DTYPES)
    else:
        yield from (Finding("near", form, dtype, refused=reason) for form in NEAR_FORMS for dtype in DTYPES)


def describe(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a report line by line."""
    about = report["environment"]
    yield f"{about['device']}, {about['system']}, {about['threads']} threads"
    yield ", ".join(f"{name} {about[name] or 'not installed'}" for name in ("klformer", "torch", "triton", "python"))
    yield from ("", "Worst error beside what is allowed; the forms that are served:")
    columns = [*KERNELS, "near"]
    yield from _table(["backend", *columns], [[name, *_cells(x, columns)] for name, x in report["backends"].items()])
    yield from ("", "Not served:")
    for name, found in report["backends"].items():
        for reason in dict.fromkeys(entry["refused"] for entry in found if entry["refused"]):
            yield f"  {name}: {reason}"
    yield from ("", "By itself klformer takes: " + ", ".join(f"{name} for {p}" for p, name in report["auto"].items()))
    lengths = list(dict.fromkeys(entry["length"] for entry in report["times"]))
    if lengths:
        sizes = report["times"][0]["sizes"]
        yield from ("", f"Milliseconds, forward and backward in float32, {sizes}:")
        rows: dict[tuple[str, str], list[str]] = {}
        for entry in report["times"]:
            rows.setdefault((entry["product"], entry["backend"]), []).append(f"{entry['ms']:.1f}")
        yield from _table(
            ["product", "backend", *(f"{length:,}" for length in lengths)], [[*k, *v] for k, v in rows.items()]
        )
    yield ""
    for name, lines in report["wrong"].items():
        yield from (f"WRONG: {name}, {line}" for line in lines)
    served = [name for name, found in report["backends"].items() if any(not entry["refused"] for entry in found)]
    right = [name for name in served if name not in report["wrong"]]
    yield f"Verdict: {', '.join(right)} right on this device" + ("" if right == served else "; the others are not used")


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(f"device {name!r} can't be used: {str(error).splitlines()[0]}") from None
    return torch.device(name)


def _environment(device: torch.device) -> dict[str, Any]:
    about: dict[str, Any] = {"klformer": klformer.__version__, "torch": torch.__version__}
    about |= {"triton": installed("triton") or installed("pytorch-triton"), "python": platform.python_version()}
    about |= {"system": platform.platform(), "device": device_name(device), "threads": torch.get_num_threads()}
    about |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {"capability": f"{properties.major}.{properties.minor}", "bytes": properties.total_memory}
    return about


def _as_data(finding: Finding) -> dict[str, Any]:
    return finding._asdict() | {"dtype": str(finding.dtype), "wrong": finding.is_wrong}


def _cells(found: Sequence[Mapping[str, Any]], kernels: Sequence[str]) -> Iterator[str]:
    """Yield for every kernel the worst error in units of what is allowed, and how many of the forms are served."""
    for kernel in kernels:
        served = [entry for entry in found if entry["kernel"] == kernel and not entry["refused"]]
        if not served:
            yield "-"
            continue
        forms, known = len({entry["form"] for entry in served}), NEAR_FORMS if kernel == "near" else FORMS
        wrong = sum(entry["wrong"] for entry in served)
        worst = max(0.0 if entry["failed"] else entry["error"] / entry["allowed"] for entry in served)
        yield (f"WRONG {wrong}/{len(served)}" if wrong else f"ok {worst:.0%} {forms}/{len(known)}")


def _table(header: list[str], rows: list[list[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in [header, *rows] if i < len(row)) for i in range(len(header))]
    for row in [header, *rows]:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()


def _call(product: str, device: torch.device, length: int) -> tuple[Call, str]:
    """Return a call to be timed, and its sizes in words."""
    heads, dim, frequencies = (8, 64, 128) if device.type == "cuda" else (2, 32, 64)
    feature_map, is_causal = PRODUCTS[product]
    q, k, v = (torch.randn(1, heads, length, dim, device=device, requires_grad=True) for _ in range(3))
    omega = (torch.randn(heads, frequencies, dim, device=device) / dim**0.5).requires_grad_()
    smoothing = torch.ones(1, device=device) if feature_map == "rks" else None
    kernel = SpectralKernel(FEATURE_MAPS[feature_map], omega, smoothing=smoothing)
    return Call("causal" if is_causal else "product", kernel, q=q, k=k, v=v), f"H={heads} D=E={dim} R={frequencies}"


def _taken(product: str, device: torch.device, wrong: Mapping[str, Any]) -> str:
    """Return who computes a product if nobody is asked for."""
    reasons = explain_backends(_call(product, device, 8)[0])
    return next(name for name in reasons if reasons[name] is None and (name not in wrong or name == "chunked"))


def _times(device: torch.device, lengths: Sequence[int], wrong: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the time of softmax and of every backend that is right."""
    for product in PRODUCTS:
        for name in ["softmax", *(name for name in BACKENDS if name not in wrong and name != "reference")]:
            for length in lengths:
                call, sizes = _call(product, device, length)
                if name != "softmax" and BACKENDS[name].supports(call) is not None:
                    break
                ms = 1e3 * _seconds(partial(_attend, call, name), device)
                yield {"product": product, "backend": name, "length": length, "ms": ms, "sizes": sizes}


def _attend(call: Call, name: str) -> None:
    """Compute a product and its gradients."""
    tensors = [x for x in call.tensors().values() if x is not None and x.requires_grad]
    if name == "softmax":
        assert call.q is not None
        assert call.k is not None
        assert call.v is not None
        out = scaled_dot_product_attention(call.q, call.k, call.v, is_causal=call.step == "causal")
        tensors = tensors[:3]
    else:
        backend: Backend = BACKENDS[name]
        out = backend.causal(call)[0] if call.step == "causal" else backend.product(call)[0]
    torch.autograd.grad(out.sum(), tensors)


def _seconds(compute: Callable[[], None], device: torch.device) -> float:
    """Return the median time of some calls after a first one."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    compute()
    wait()
    found: list[float] = []
    while len(found) < 3 or (sum(found) < PATIENCE and len(found) < 50):
        start = time.perf_counter()
        compute()
        wait()
        found.append(time.perf_counter() - start)
        if sum(found) > PATIENCE:
            break
    return median(found)


def main() -> None:
    """Run the command where the laboratory is not installed."""
    run(parse(sys.argv[2:], "klformer doctor"))
