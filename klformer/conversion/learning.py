"""The second step of a conversion: kernels learn to stand in for softmax, each by itself and then all together."""

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from klformer.attention import AttentionMechanism
from klformer.conversion.batches import Batches
from klformer.conversion.certificate import figures
from klformer.conversion.config import ConversionConfig
from klformer.conversion.distil import distil
from klformer.conversion.fitting import HeadErrors, Progress, fit_layers, measure, start
from klformer.conversion.hosts import Host, evaluating
from klformer.conversion.planning import WINDOWS, Plan, host_of
from klformer.conversion.prune import prune
from klformer.conversion.record import SiteRecord
from klformer.conversion.resume import Store
from klformer.conversion.threads import best_threads, threads

#: What a token costs in a layer, in frequencies: without any, and for each key that is seen exactly. Fitted to seconds
#: at 16,384 tokens with heads of 64.
BASE_COST, KEY_COST = 75, 1.5


@dataclass(frozen=True)
class Learned:
    """Kernels by the names of their sites, how they were built, and their errors before and after they were fitted.

    `at_start` and `fitted` are of the batches to measure by; `chosen_by` is after the fit, of those to choose by.
    """

    mechanisms: dict[str, AttentionMechanism]
    records: dict[str, SiteRecord]
    at_start: HeadErrors
    fitted: HeadErrors
    chosen_by: HeadErrors

    def for_json(self) -> dict[str, Any]:
        """All but the parameters."""
        errors = {"at_start": self.at_start, "fitted": self.fitted, "chosen_by": self.chosen_by}
        lists = {key: {name: error.tolist() for name, error in each.by_site.items()} for key, each in errors.items()}
        return {"records": {name: record.model_dump(mode="json") for name, record in self.records.items()}} | lists

    @staticmethod
    def from_json(content: Mapping[str, Any], device: torch.device) -> "Learned":
        """What `for_json` said, with fresh parameters."""
        records = {name: SiteRecord(**record) for name, record in content["records"].items()}
        mechanisms = {name: record.build().to(device) for name, record in records.items()}
        errors = [
            HeadErrors({name: torch.tensor(error) for name, error in content[key].items()})
            for key in ("at_start", "fitted", "chosen_by")
        ]
        return Learned(mechanisms, records, *errors)


@dataclass(frozen=True)
class Fitted:
    """A converted model, of which nobody knows yet what it kept."""

    plan: Plan
    student: Host
    learned: Learned
    kept: frozenset[str]
    """The sites that stay softmax."""
    linear: dict[str, float] | None
    """Figures of the model without those, before fine-tuning; None if there are none."""
    seconds: dict[str, float]
    """Wall time of each part."""
    processor_began: float
    """Time of the processor when it began."""
    is_resumed: bool
    num_threads: int
    """As many as were fastest."""

    @property
    def trained(self) -> dict[str, AttentionMechanism]:
        """The attentions that are in the model."""
        return {name: each for name, each in self.learned.mechanisms.items() if name not in self.kept}


def fit(plan: Plan, *, state_file: str | Path | None = None, progress: Progress | None = None) -> Fitted:
    """Learn the kernels of a plan in a copy of its model: the second step of `klformer.convert`.

    Args:
        plan: What `plan` gave.
        state_file: As in `convert`; it stays there.
        progress: As in `convert`.

    Raises:
        FileError: the state is of another conversion, damaged, or can't be written.

    Examples:
        >>> import torch, klformer
        >>> config = klformer.EncoderConfig(model_dim=16, num_layers=2, num_heads=2, attention="softmax")
        >>> batches = [{"x": torch.randn(2, 12, 16)} for _ in range(3)]
        >>> settings = klformer.ConversionConfig(steps=2, keep_softmax=1)
        >>> plan = klformer.conversion.plan(klformer.TransformerEncoder(config), batches, config=settings)
        >>> fitted = klformer.conversion.fit(plan)
        >>> len(fitted.kept), len(fitted.trained)
        (1, 1)
    """
    batches = plan.batches
    began, processor_began = time.perf_counter(), time.process_time()
    config, student = plan.config, host_of(copy.deepcopy(plan.teacher.model))
    store = None if state_file is None else Store(Path(state_file), _settings(plan))
    resumed = None if store is None else store.load()
    before = resumed.rest if resumed is not None and resumed.stage != "fit" else None
    with evaluating(plan.teacher.model), evaluating(student.model), torch.no_grad():
        num_threads = best_threads(lambda: student.run(batches.at(0)))
    with evaluating(plan.teacher.model), evaluating(student.model), threads(num_threads):
        if before is not None:
            learned = Learned.from_json(before["learned"], next(student.model.parameters()).device)
        else:
            learned = learn_kernels(student, plan, progress, store)
        seconds = {"fit": time.perf_counter() - began}
        student.install(learned.mechanisms)
        kept = frozenset(_stay_softmax(learned.chosen_by, config.keep_softmax))
        linear = before["linear"] if before is not None else None
        if kept and linear is None:
            linear = figures(student, plan.teacher, batches.held_out, causal=plan.causal)
        student.remove(kept)
        fitted = Fitted(
            plan, student, learned, kept, linear, seconds, processor_began, resumed is not None, num_threads
        )
        known: Any = {"progress": progress, "store": store, "before": {"learned": learned.for_json(), "linear": linear}}
        if config.align_steps and (resumed is None or resumed.stage != "distil"):
            distil(student, plan, fitted.trained, "align", **known)
            seconds["align"] = time.perf_counter() - began - sum(seconds.values())
        if config.finetune_steps:
            distil(student, plan, fitted.trained, **known)
            seconds["finetune"] = time.perf_counter() - began - sum(seconds.values())
    return fitted


def _settings(plan: Plan) -> dict[str, Any]:
    """What must be equal for a conversion to be gone on with."""
    settings = plan.config.model_dump(mode="json", include=set(ConversionConfig.model_fields))
    settings |= {"attention": plan.attention.complete().label(), "layers": list(plan.records)}
    return settings | {"batches": plan.batches.fingerprint()}


def learn_kernels(host: Host, plan: Plan, progress: Progress | None, store: Store | None) -> Learned:
    """Return kernels in the place of softmax at the sites of a host, each learned by itself with softmax below it."""
    config, records, batches = plan.config, dict(plan.records), plan.batches
    device = next(host.model.parameters()).device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        mechanisms = {name: record.build().to(device) for name, record in records.items()}
    start(host, mechanisms, batches, seed=config.seed)
    if plan.chooses_windows:
        mechanisms, records = choose_windows(host, mechanisms, records, batches)
    at_start = measure(host, mechanisms, batches.held_out)
    fit_layers(host, mechanisms, batches, config, progress=progress, store=store)
    if plan.is_auto:
        mechanisms, records = prune(host, mechanisms, records, batches, config, progress=progress)
    fitted, chosen_by = (measure(host, mechanisms, some) for some in (batches.held_out, batches.choosing))
    return Learned(mechanisms, records, at_start, fitted, chosen_by)


def choose_windows(
    host: Host, mechanisms: Mapping[str, AttentionMechanism], records: Mapping[str, SiteRecord], batches: Batches
) -> tuple[dict[str, AttentionMechanism], dict[str, SiteRecord]]:
    """Return attentions as they started, each with the window of the least error times cost on the batches to choose
    by, and their records. A window leaves at least half of the longest text to the kernel."""
    longest = max(each.shape[1] for batch in batches.choosing for each in batch.values() if each.dim() > 1)
    best: dict[str, tuple[float, AttentionMechanism, SiteRecord]] = {}
    for window in (each for each in WINDOWS if each == WINDOWS[0] or 4 * each <= longest):
        tried_records = {name: _with_window(record, window) for name, record in records.items()}
        tried = {}
        for name, mechanism in mechanisms.items():
            tried[name] = tried_records[name].build().to(next(mechanism.parameters()).device)
            tried[name].load_state_dict(mechanism.state_dict())
        for name, error in measure(host, tried, batches.choosing).by_site.items():
            cost = BASE_COST + (records[name].num_frequencies or 0) + KEY_COST * 2 * window
            score = float(error.mean()) * cost
            if name not in best or score < best[name][0]:
                best[name] = (score, tried[name], tried_records[name])
    return {name: each[1] for name, each in best.items()}, {name: each[2] for name, each in best.items()}


def _with_window(record: SiteRecord, window: int) -> SiteRecord:
    """The same with another window, if it has one: attention to another sequence does not."""
    return record.having("window", window) if record.attention.options.get("window") else record


def _stay_softmax(errors: HeadErrors, keep: int | float) -> set[str]:
    """The names of the sites that stay softmax: the worst so many, or those with an error above a budget below 1."""
    means = {name: float(error.mean()) for name, error in errors.by_site.items()}
    if 0 < keep < 1:
        return {name for name, error in means.items() if error > keep}
    return set(sorted(means, key=means.__getitem__, reverse=True)[: int(keep)])
