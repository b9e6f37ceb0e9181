"""Fit kernels to softmax attention, all layers in one pass, nothing trained but the kernels.

    loss of a head = sum |kernel's output - softmax's output|^2 / sum |softmax's output|^2, over the tokens of a batch

While a batch runs through the model, every layer's call is fitted on the spot: what is held at a time is one layer of
one batch, however many layers and batches there are.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from klformer.attention import AttentionMechanism
from klformer.conversion.batches import Batches
from klformer.conversion.config import ConversionConfig
from klformer.conversion.hosts import Batch, Call, Host
from klformer.conversion.resume import State, Store
from klformer.conversion.start import KeySample, can_start_from_keys, start_from_keys
from klformer.noise import resample

#: Called with what is done, the step, the number of steps, and the latest error; NaN where there is none.
Progress = Callable[[str, int, int, float], None]

WARM_UP = 10
LAST_SHARE = 0.02
#: Batches that the start is made from.
START_BATCHES = 4
#: Measurements in a fit, the least number of steps between two, and how many without gain end it: less than this share
#: is no gain.
MEASUREMENTS, MIN_STEPS_BETWEEN, PATIENCE, GAIN = 10, 20, 3, 0.005


@dataclass
class HeadErrors:
    """Relative squared errors of the heads of each site, (H,), by the site's name."""

    by_site: dict[str, Tensor] = field(default_factory=dict)

    def mean(self) -> float:
        """Over all heads of all sites."""
        return float(torch.stack([errors.mean() for errors in self.by_site.values()]).mean())


class LayerFit:
    """One attention on its way to what softmax did: its optimiser, and the best that it was."""

    def __init__(self, mechanism: AttentionMechanism, *, learning_rate: float) -> None:
        self.mechanism = mechanism
        parameters = [p for p in mechanism.parameters() if p.requires_grad]
        self._optimiser = torch.optim.Adam(parameters, betas=(0.9, 0.95)) if parameters else None
        self._rate = learning_rate
        self._best = math.inf
        self._best_state = _copy(mechanism)

    def step(self, call: Call, target: Tensor, share: float) -> None:
        """Learn from a call, at a share of the learning rate."""
        if self._optimiser is None:
            return
        with torch.enable_grad():
            off, size = squared_errors(call.attend(self.mechanism), target, call.query_mask())
            loss = (off / size).mean()
            self._optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
        for group in self._optimiser.param_groups:
            group["lr"] = self._rate * share
        self._optimiser.step()

    def note(self, error: float) -> bool:
        """Remember the mechanism as it is if the error is the lowest so far; whether that is a gain."""
        gained = error < self._best * (1 - GAIN)
        if error < self._best:
            self._best, self._best_state = error, _copy(self.mechanism)
        return gained

    def tensors(self) -> dict[str, Tensor]:
        """All that going on from here needs, but for `best`: the parameters now and at their best, and the optimiser's
        averages."""
        found = {f"now.{name}": value for name, value in _copy(self.mechanism).items()}
        found |= {f"best.{name}": value for name, value in self._best_state.items()}
        return found if self._optimiser is None else found | averages_of(self._optimiser)

    @property
    def best(self) -> float:
        """The lowest error so far."""
        return self._best

    def restore(self, tensors: Mapping[str, Tensor], best: float) -> None:
        """Be what `tensors` and `best` said."""
        self._best = best
        self._best_state = _below("best", tensors)
        self.mechanism.load_state_dict(_below("now", tensors))
        if self._optimiser is not None:
            take_averages(self._optimiser, tensors)

    def take_best(self) -> None:
        """Make the mechanism what it was when its error was lowest."""
        self.mechanism.load_state_dict(self._best_state)


def averages_of(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What an optimiser remembers, by names."""
    state = optimiser.state_dict()["state"]
    return {f"adam.{index}.{name}": value for index, each in state.items() for name, value in each.items()}


def take_averages(optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Have an optimiser remember what `averages_of` gave; other names are left alone."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in _below("adam", tensors).items():
        index, _, kind = name.partition(".")
        state.setdefault(int(index), {})[kind] = value
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})


def start(host: Host, mechanisms: Mapping[str, AttentionMechanism], batches: Batches, *, seed: int) -> None:
    """Start those kernels from data that can (`start.py`)."""
    wanted = {name: mechanism for name, mechanism in mechanisms.items() if can_start_from_keys(mechanism)}
    if not wanted:
        return
    generator = torch.Generator().manual_seed(seed)
    count = min(START_BATCHES, len(batches.train))
    samples = {name: KeySample(count, generator) for name in wanted}

    def collect(name: str, call: Call) -> Tensor:
        if name in samples:
            samples[name].add(call)
        return call.softmax()

    with host.watching(collect), torch.no_grad():
        for step in range(count):
            host.run(batches.at(step))
    for name, mechanism in wanted.items():
        start_from_keys(mechanism, samples[name].keys(), generator)


def fit_layers(
    host: Host,
    mechanisms: Mapping[str, AttentionMechanism],
    batches: Batches,
    config: ConversionConfig,
    *,
    progress: Progress | None = None,
    store: Store | None = None,
) -> None:
    """Fit attentions to the softmax of the sites that they are named after; ends early if nothing is gained any more.

    Afterwards every one is what it was when its error on the batches to choose by was lowest. Kernels that redraw their
    frequencies do so in every step. What a store holds is gone on with, and whenever errors are measured, the state is
    saved there.
    """
    steps = config.steps
    fits = {name: LayerFit(each, learning_rate=config.learning_rate) for name, each in mechanisms.items()}
    every = max(MIN_STEPS_BETWEEN, steps // MEASUREMENTS)
    without_gain, first, error = 0, 0, math.nan
    if store is not None and (state := store.load()) is not None and state.stage == "fit":
        first, without_gain = state.step, state.rest["without_gain"]
        for name, layer in fits.items():
            layer.restore(_below(name, state.tensors, mark="|"), state.rest["best"][name])
        error = sum(state.rest["best"].values()) / len(fits)
        if without_gain >= PATIENCE:
            first = steps + 1
    for step in range(first, steps + 1):
        if (step % every == 0 and step > first) or step in (0, steps):
            errors = measure(host, mechanisms, batches.choosing)
            gains = [fits[name].note(float(error.mean())) for name, error in errors.by_site.items()]
            without_gain, error = 0 if any(gains) else without_gain + 1, errors.mean()
            if store is not None:
                store.save(_state(step, without_gain, fits))
        if progress is not None and (step > first or first == 0):
            progress("fit", step, steps, error)
        if without_gain >= PATIENCE:
            break
        if step < steps:
            redraw(mechanisms, config.seed, step)
            _fit_batch(host, fits, batches.at(step), share_of_rate(step, steps))
    for layer in fits.values():
        layer.take_best()


def redraw(mechanisms: Mapping[str, AttentionMechanism], seed: int, step: int) -> None:
    """Draw the frequencies of a step, of those kernels that do not keep theirs."""
    generator = torch.Generator().manual_seed(seed * 1009 + step)
    for mechanism in mechanisms.values():
        resample(mechanism, generator)


def _state(step: int, without_gain: int, fits: Mapping[str, LayerFit]) -> State:
    tensors = {f"{name}|{key}": value for name, layer in fits.items() for key, value in layer.tensors().items()}
    best = {name: layer.best for name, layer in fits.items()}
    return State("fit", step, tensors, {"without_gain": without_gain, "best": best})


def _fit_batch(host: Host, fits: Mapping[str, LayerFit], batch: Batch, share: float) -> None:
    def learn(name: str, call: Call) -> Tensor:
        target = call.softmax()
        if name in fits:
            fits[name].step(call, target, share)
        return target

    with host.watching(learn), torch.no_grad():
        host.run(batch)


def measure(host: Host, mechanisms: Mapping[str, AttentionMechanism], batches: Sequence[Batch]) -> HeadErrors:
    """The errors of attentions in the place of softmax, each by itself: the layers below it are softmax."""
    sums: dict[str, tuple[Tensor, Tensor]] = {}

    def compare(name: str, call: Call) -> Tensor:
        target = call.softmax()
        if name in mechanisms:
            off, size = squared_errors(call.attend(mechanisms[name]), target, call.query_mask())
            before = sums.get(name)
            sums[name] = (off, size) if before is None else (before[0] + off, before[1] + size)
        return target

    with host.watching(compare), torch.no_grad():
        for batch in batches:
            host.run(batch)
    return HeadErrors({name: off / size for name, (off, size) in sums.items()})


def squared_errors(out: Tensor, target: Tensor, query_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of each head, (H,): the squared error of outputs (B, H, L, E), and the square of what they should be."""
    off, size = (out.float() - target.float()).square().sum(-1), target.float().square().sum(-1)
    if query_mask is not None:
        off, size = (x.masked_fill(~query_mask.unsqueeze(1), 0) for x in (off, size))
    return off.sum((0, 2)), size.sum((0, 2)).clamp(min=torch.finfo(torch.float32).tiny)


def share_of_rate(step: int, steps: int) -> float:
    """A short warm-up, then a cosine down to almost nothing."""
    return min(1.0, (step + 1) / WARM_UP) * (
        LAST_SHARE + (1 - LAST_SHARE) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )


def _below(prefix: str, tensors: Mapping[str, Tensor], *, mark: str = ".") -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    start = prefix + mark
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def _copy(mechanism: AttentionMechanism) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in mechanism.state_dict().items()}
