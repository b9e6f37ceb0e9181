"""Whether a backend is right on a device: small calls of every form, compared with float64 on the CPU.

`auto` takes a backend besides `chunked` on a device only after it gave right results and gradients there, map by map.
That is found out once for a process. A success is remembered in the user's cache folder, under all that it depends on;
a failure is a warning, and `chunked` computes. KLFORMER_SELF_CHECK=0 switches this off. `klformer doctor` runs the same
forms and tells of each.
"""

import hashlib
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from klformer.errors import FileError
from klformer.files import write_json
from klformer.ops import near
from klformer.ops.feature_maps import FEATURE_MAPS
from klformer.ops.spectral_product.dispatch import BACKENDS, Backend
from klformer.ops.spectral_product.operands import OF_KERNEL, Call, SpectralKernel, Sums, kept_keys
from klformer.ops.spectral_product.state import merged

#: Kernels by name: the map, its constants, and which tensors it has besides frequencies.
KERNELS: Mapping[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "prf": ("prf", {"norm_coefficient": 0.5}, ()),
    "prf simplex": ("prf", {"simplex": True}, ("frequency_bias", "key_bias")),
    "rks": ("rks", {}, ("frequency_bias", "smoothing", "key_bias")),
    "rks pairs": ("rks", {}, ("pair_offset", "smoothing")),
    "elu": ("elu", {}, ()),
}
#: Largest relative error of results and of gradients, root mean square.
TOLERANCES = {
    torch.float64: (1e-9, 1e-8),
    torch.float32: (1e-4, 1e-3),
    torch.bfloat16: (2e-2, 5e-2),
    torch.float16: (5e-3, 2e-2),
}
#: Sizes that differ, and that no block of a GPU divides.
HEADS, LENGTH, DIM, VALUES, FREQUENCIES = 2, 83, 12, 20, 24

Results = dict[str, Tensor]


class NotServedError(Exception):
    """The backend has a reason not to serve a step."""


class Finding(NamedTuple):
    """One form on one device: how far it was off at most, and where; or why it could not be tried."""

    kernel: str
    form: str
    dtype: torch.dtype
    error: float = 0.0
    allowed: float = 0.0
    where: str = ""
    #: Why the backend does not serve it.
    refused: str | None = None
    #: What it raised.
    failed: str | None = None

    @property
    def is_wrong(self) -> bool:
        return self.failed is not None or not self.error <= self.allowed

    def describe(self) -> str:
        """Return one line that says what was found."""
        what = f"{self.kernel}, {self.form}, {str(self.dtype).removeprefix('torch.')}"
        if self.refused is not None:
            return f"{what}: not served, {self.refused}"
        if self.failed is not None:
            return f"{what}: {self.failed}"
        return f"{what}: relative error {self.error:.1e} ({self.where}), allowed {self.allowed:.0e}"


@cache
def is_right(backend: Backend, feature_map: str, device: torch.device) -> bool:
    """Return whether a backend is right on a device, found out once; with a warning if it is not.

    Args:
        backend: One that supports calls there.
        feature_map: Name of the map whose forms are tried.
        device: Where.
    """
    return _is_proven(
        backend.name, feature_map, device, _sources(backend), partial(check, feature_map=feature_map), backend
    )


@cache
def near_is_right(device: torch.device) -> bool:
    """Return whether the kernels for neighbours are right on a device, found out once; with a warning if not.

    Args:
        device: Where.
    """
    kernels = near.near_kernels()
    sources = sorted(Path(str(kernels.__file__)).parent.glob("*.py"))
    return _is_proven("triton", "near", device, sources, check_near, kernels)


def _is_proven(
    name: str, what: str, device: torch.device, sources: list[Path], find: Callable[..., Iterator[Finding]], given: Any
) -> bool:
    """Return whether nothing that is found is wrong; remembered under sources, if there are any."""
    remembered = _memory(name, what, device, sources)
    if sources and remembered.exists():
        return True
    wrong = [finding for finding in find(given, device) if finding.is_wrong]
    if wrong:
        warnings.warn(
            f"backend {name!r} is wrong on {device_name(device)} and is not used there "
            f"({wrong[0].describe()}); the chunked product computes instead. `klformer doctor` says more",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    if sources:
        with suppress(FileError):  # where nothing can be written, the next process checks again
            write_json(remembered, {"backend": name, "device": device_name(device), "map": what})
    return True


def check(
    backend: Backend,
    device: torch.device,
    *,
    feature_map: str | None = None,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    oracle: str = "chunked",
) -> Iterator[Finding]:
    """Yield what is found of a backend, form by form.

    Args:
        backend: What to check.
        device: Where.
        feature_map: Only kernels of this map; all if None.
        dtypes: Of queries, keys and values.
        oracle: Who is right, in float64 on the CPU.
    """
    for kernel, (map_name, _, _) in KERNELS.items():
        if feature_map not in (None, map_name):
            continue
        for form, compute in FORMS.items():
            for dtype in dtypes:
                found = partial(Finding, kernel, form, dtype)
                try:
                    actual = _run(backend, kernel, compute, dtype, device)
                except NotServedError as reason:
                    yield found(refused=str(reason))
                    continue
                except Exception as error:  # whatever it is, it is told and not hidden
                    lines = str(error).strip().splitlines() or [""]
                    yield found(failed=f"{type(error).__name__}: {lines[0]}")
                    continue
                expected = _run(BACKENDS[oracle], kernel, compute, dtype, torch.device("cpu"), exact=True)
                yield found(*_worst(actual, expected, TOLERANCES[dtype]))


def check_near(
    kernels: ModuleType | None, device: torch.device, *, dtypes: tuple[torch.dtype, ...] = (torch.float32,)
) -> Iterator[Finding]:
    """Yield what is found of attention to neighbours, form by form.

    Args:
        kernels: Those for a GPU; None for plain PyTorch.
        device: Where.
        dtypes: Of queries, keys and values.
    """
    for form in NEAR_FORMS:
        for dtype in dtypes:
            found = partial(Finding, "near", form, dtype)
            try:
                actual = _run_near(form, dtype, device, partial(near.attend, kernels=kernels))
            except Exception as error:  # whatever it is, it is told and not hidden
                lines = str(error).strip().splitlines() or [""]
                yield found(failed=f"{type(error).__name__}: {lines[0]}")
                continue
            expected = _run_near(form, dtype, torch.device("cpu"), near.attend_plainly, exact=True)
            yield found(*_worst(actual, expected, TOLERANCES[dtype]))


def _run_near(
    form: str, dtype: torch.dtype, device: torch.device, attend: Callable[..., Any], *, exact: bool = False
) -> Results:
    """Return results and gradients of attention to neighbours, the same numbers everywhere; with `exact` in float64."""
    causal, before, window = NEAR_FORMS[form]
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokens = (3, HEADS, LENGTH)
        sizes = {"q": (*tokens[:2], LENGTH - before, DIM), "k": (*tokens, DIM), "v": (*tokens, VALUES)}
        tensors = {name: torch.randn(size).to(dtype) for name, size in sizes.items()}
        tensors |= {"key_bias": torch.randn(1, HEADS, LENGTH), "scale": torch.rand(HEADS) + 0.5}
        tensors["far"], tensors["far_log_sum"] = torch.randn(*sizes["q"][:3], VALUES), torch.randn(sizes["q"][:3])
        precision = torch.float64 if exact else torch.float32
        tensors = {name: x.to(device, precision).requires_grad_() for name, x in tensors.items()}
        mask = torch.ones(3, 1, LENGTH, dtype=torch.bool, device=device)
        mask[1, :, ::3] = mask[2] = False
        given = dict(tensors)
        given["k"], given["v"] = (given[x].masked_fill(~mask.unsqueeze(-1), math.nan) for x in ("k", "v"))
        layout = near.Layout(window, 0 if causal else window, before)
        results = dict(zip(("result", "log-sum"), attend(list(given.values()), mask, layout), strict=True))
        total = sum(_weighted(name, x) for name, x in results.items())
        found = torch.autograd.grad(cast(Tensor, total), list(tensors.values()))
    return results | {f"gradient of {name}": x for name, x in zip(tensors, found, strict=True)}


def _worst(actual: Results, expected: Results, tolerances: tuple[float, float]) -> tuple[float, float, str]:
    """Return the error that is the largest beside what is allowed, what is allowed, and where it is."""
    errors = []
    for name, right in expected.items():
        allowed = tolerances[name.startswith("gradient")]
        found, right = actual[name].detach().cpu().double(), right.detach()
        none = right == -math.inf  # a query without any key
        error = (found - right).masked_fill(none & (found == right), 0).norm()
        error = float(error / right.masked_fill(none, 0).norm().clamp(min=1e-30))
        errors.append((error if math.isfinite(error) else math.inf, allowed, name))
    return max(errors, key=lambda entry: entry[0] / entry[1])


def _run(
    backend: Backend,
    kernel: str,
    compute: Callable[["_Steps", Call], Results],
    dtype: torch.dtype,
    device: torch.device,
    *,
    exact: bool = False,
) -> Results:
    """Return results and gradients of a form, the same numbers everywhere; with `exact` in float64."""
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tensors = _tensors(kernel, dtype)
        for name, x in tensors.items():
            x = x.double() if exact else x.to(device)
            tensors[name] = x.requires_grad_() if name != "smoothing" else x
        map_name, constants, _ = KERNELS[kernel]
        of_kernel: dict[str, Any] = {name: tensors.get(name) for name in OF_KERNEL}
        # A sequence that is whole, one that is padded with anything, and one without any key.
        mask = torch.ones(3, LENGTH, dtype=torch.bool, device=device)
        mask[1, ::3] = mask[2] = False
        padded = mask[:, None, :, None].logical_not()
        call = Call(
            "product",
            SpectralKernel(FEATURE_MAPS[map_name], **of_kernel, **constants),
            q=tensors["q"],
            k=tensors["k"].masked_fill(padded, math.nan),
            v=tensors["v"].masked_fill(padded, math.inf),
            key_mask=kept_keys(mask, tensors.get("key_bias")),
            key_bias=tensors.get("key_bias"),
        )
        results = compute(_Steps(backend), call)
        total = sum(_weighted(name, x) for name, x in results.items())
        found = torch.autograd.grad(cast(Tensor, total), [x for x in tensors.values() if x.requires_grad])
        names = [name for name, x in tensors.items() if x.requires_grad]
    return results | {f"gradient of {name}": x for name, x in zip(names, found, strict=True)}


def _weighted(name: str, x: Tensor) -> Tensor:
    """Return a number that has a gradient for every result that is a number."""
    generator = torch.Generator().manual_seed(len(name))
    weights = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device, torch.float32)
    return (
        (weights * x.float() if x.dtype != torch.float64 else weights.double() * x).masked_fill(x == -math.inf, 0).sum()
    )


def _tensors(kernel: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a kernel and its sequences, on the CPU."""
    has = KERNELS[kernel][2]
    sequence = (3, HEADS, LENGTH)
    tensors = {name: torch.randn(*sequence, size).to(dtype) for name, size in (("q", DIM), ("k", DIM), ("v", VALUES))}
    if FEATURE_MAPS[KERNELS[kernel][0]].needs_frequencies:
        tensors["omega"] = torch.randn(HEADS, FREQUENCIES, DIM) / 2
    sizes = {"frequency_bias": (1, FREQUENCIES), "key_bias": (1, HEADS, LENGTH), "pair_offset": (HEADS, DIM)}
    tensors |= {name: torch.randn(size) for name, size in sizes.items() if name in has}
    # So much that no mean is held: where it is held there is a kink.
    return tensors | ({"smoothing": torch.full((HEADS,), 2.0)} if "smoothing" in has else {})


class _Steps:
    """The steps of a backend, each asked for only if it is served."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __call__(self, call: Call) -> Any:
        if (reason := self._backend.supports(call)) is not None:
            raise NotServedError(reason)
        return getattr(self._backend, call.step)(call)


def _product(serve: _Steps, call: Call) -> Results:
    out, log_sum = serve(call)
    return {"result": out, "log-sum": log_sum}


def _causal(serve: _Steps, call: Call) -> Results:
    """All tokens, then the state that is left is read."""
    out, log_sum, sums = serve(replace(call, step="causal"))
    return {"result": out, "log-sum": log_sum} | _read(serve, call, sums)


def _continued(serve: _Steps, call: Call) -> Results:
    """A part is absorbed, and the rest goes on from there, all but one token and then this one."""
    sums, found = serve(_part(call, slice(0, 30), "absorb")), Results()
    for name, part in (("rest", slice(30, LENGTH - 1)), ("last", slice(LENGTH - 1, LENGTH))):
        out, log_sum, sums = serve(replace(_part(call, part, "causal"), sums=sums))
        found |= {f"result, {name}": out, f"log-sum, {name}": log_sum}
    return found


def _decoding(serve: _Steps, call: Call) -> Results:
    """Two states are merged, then token after token is absorbed and read."""
    sums, found = serve(_part(call, slice(0, 50), "absorb")), Results()
    for start, stop in ((50, LENGTH - 2), (LENGTH - 2, LENGTH - 1), (LENGTH - 1, LENGTH)):
        sums = merged(sums, serve(_part(call, slice(start, stop), "absorb")))
        found |= {f"{name}, {stop}": x for name, x in _read(serve, _part(call, slice(stop - 1, stop)), sums).items()}
    return found


def _read(serve: _Steps, call: Call, sums: Sums) -> Results:
    out, log_sum = serve(Call("read", call.kernel, q=call.q, sums=sums))
    return {"result, read": out, "log-sum, read": log_sum}


def _part(call: Call, part: slice, step: Any = "product") -> Call:
    """Return the same call for some of the tokens."""
    tensors = call.tensors()
    names = ("k", "v") if step == "absorb" else ("q", "k", "v")
    found: dict[str, Any] = {name: x[:, :, part] for name in names if (x := tensors[name]) is not None}
    found |= {name: x[..., part] for name in ("key_mask", "key_bias") if (x := tensors[name]) is not None}
    return Call(step, call.kernel, **found)


#: What is computed, by name.
FORMS: Mapping[str, Callable[[_Steps, Call], Results]] = {
    "bidirectional": _product,
    "causal": _causal,
    "continued": _continued,
    "decoding": _decoding,
}


#: Of attention to neighbours: whether it is causal, keys before the first query, and keys on a side.
NEAR_FORMS: Mapping[str, tuple[bool, int, int]] = {
    "bidirectional": (False, 0, 5),
    "causal": (True, 0, 40),
    "continued": (True, 30, 7),
}


def device_name(device: torch.device) -> str:
    """Return what a device is called by its maker, or its type."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)


def installed(package: str) -> str | None:
    """Return the version of a package, None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _memory(name: str, what: str, device: torch.device, sources: list[Path]) -> Path:
    """Return the file that says that a backend is right: its name is made of all that this depends on."""
    about: dict[str, Any] = {name: installed(name) for name in ("klformer", "torch", "triton", "pytorch-triton")}
    about |= {"cuda": torch.version.cuda, "hip": torch.version.hip, "backend": name, "map": what}
    about["device"] = device_name(device)
    about["sources"] = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sources]
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return folder / "klformer" / "backends" / f"{name}.json"


def _sources(backend: Backend) -> list[Path]:
    """Return the file that a backend is written in, for one of ours all of its folder; nothing for a class that was
    typed in."""
    module = type(backend).__module__
    path = Path(getattr(sys.modules.get(module), "__file__", None) or "")
    if path.suffix != ".py":
        return []
    return sorted(path.parent.glob("*.py")) if module.startswith("klformer.") else [path]
