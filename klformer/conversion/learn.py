"""From softmax to kernels that stand in for it: start, fit, and prune where the number of frequencies is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from klformer.attention import AttentionMechanism
from klformer.conversion.batches import Batches
from klformer.conversion.fit import HeadErrors, Loss, Progress, fit, measure, start
from klformer.conversion.hosts import Host
from klformer.conversion.prune import prune
from klformer.conversion.record import SiteRecord
from klformer.conversion.resume import Store


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
        return {
            "records": {name: record.model_dump(mode="json") for name, record in self.records.items()},
            "at_start": {name: error.tolist() for name, error in self.at_start.by_site.items()},
            "fitted": {name: error.tolist() for name, error in self.fitted.by_site.items()},
            "chosen_by": {name: error.tolist() for name, error in self.chosen_by.by_site.items()},
        }

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


def learn_kernels(
    host: Host,
    records: Mapping[str, SiteRecord],
    batches: Batches,
    *,
    steps: int,
    learning_rate: float,
    loss: Loss,
    error_budget: float | None,
    seed: int,
    progress: Progress | None,
    store: Store | None,
) -> Learned:
    """Kernels in the place of softmax at the sites of a host, each learned by itself with softmax below it.

    Args:
        records: The kernels to begin with, by the names of their sites.
        error_budget: If given, kernels get as few atoms as keep their errors within it.
    """
    device = next(host.model.parameters()).device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mechanisms = {name: record.build().to(device) for name, record in records.items()}
    start(host, mechanisms, batches, seed=seed)
    at_start = measure(host, mechanisms, batches.held_out)
    fit(
        host,
        mechanisms,
        batches,
        steps=steps,
        learning_rate=learning_rate,
        loss=loss,
        seed=seed,
        progress=progress,
        store=store,
    )
    final_records = dict(records)
    if error_budget is not None:
        mechanisms, final_records = prune(
            host,
            mechanisms,
            records,
            batches,
            budget=error_budget,
            steps=steps,
            learning_rate=learning_rate,
            loss=loss,
            progress=progress,
        )
    fitted, chosen_by = (measure(host, mechanisms, some) for some in (batches.held_out, batches.choosing))
    return Learned(mechanisms, final_records, at_start, fitted, chosen_by)
