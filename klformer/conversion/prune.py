"""As few atoms in each layer as an error budget allows: start with many, drop those of least weight, fit again.

What an atom weighs is its share of what attention sums up, the mean over the queries:

    share_r(q) = exp(omega_r.q + a_r) K_r / sum over all r of the same,      K_r = sum_j phi_r(k_j)

with phi the features of a key, which sum to one. An atom without weight can be dropped, and nothing changes.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from klformer.attention import AttentionMechanism
from klformer.conversion.batches import Batches
from klformer.conversion.config import ConversionConfig
from klformer.conversion.fitting import START_BATCHES, Progress, fit_layers, measure
from klformer.conversion.hosts import Call, Host
from klformer.conversion.record import SiteRecord
from klformer.conversion.start import atoms_of, kernel_of

#: Atoms at the start, for each dimension of a head; the share that one round leaves; and the least.
START_PER_DIM, LEFT, FEWEST = 4, 0.7, 8
#: The share of the steps that fitting again takes in a round, and the least number.
REFIT_SHARE, MIN_REFIT = 0.2, 20


def prune(
    host: Host,
    mechanisms: Mapping[str, AttentionMechanism],
    records: Mapping[str, SiteRecord],
    batches: Batches,
    config: ConversionConfig,
    *,
    progress: Progress | None = None,
) -> tuple[dict[str, AttentionMechanism], dict[str, SiteRecord]]:
    """Attentions with fewer atoms whose errors on the batches to choose by are within a budget, and their records.

    A layer whose error is above the budget with all its atoms keeps them all. The attentions that are given are left as
    they are.

    Args:
        mechanisms: Attentions that were fitted, by the names of their sites.
        records: How they were built.
        config: With the budget, the largest relative squared error of a layer's output, the mean over its heads. Of the
            steps that the first fit took a round takes a share.
    """
    budget = config.error_budget
    kept, kept_records = dict(mechanisms), dict(records)
    errors = measure(host, kept, batches.choosing)
    undecided = {name for name, error in errors.by_site.items() if float(error.mean()) <= budget}
    again = max(MIN_REFIT, round(REFIT_SHARE * config.steps)) if config.steps else 0
    refit = config.model_copy(update={"steps": again, "seed": 0})
    # Most rounds end before the last: one above the budget is the last of a layer.
    rounds, done, size = max((_rounds(records[name]) for name in undecided), default=0), 0, max(again, 1)

    def report(stage: str, step: int, steps: int, error: float) -> None:
        if progress is not None:
            progress("prune", done + step, rounds * size, error)

    while undecided := {name for name in undecided if _fewer(kept_records[name]) is not None}:
        shares = atom_shares(host, {name: kept[name] for name in undecided}, batches)
        tried_records = {
            name: kept_records[name].having("num_frequencies", _fewer(kept_records[name])) for name in undecided
        }
        tried = {name: without_least(kept[name], tried_records[name], shares[name]) for name in undecided}
        fit_layers(host, tried, batches, refit, progress=report)
        errors = measure(host, tried, batches.choosing)
        undecided = {name for name in undecided if float(errors.by_site[name].mean()) <= budget}
        kept |= {name: tried[name] for name in undecided}
        kept_records |= {name: tried_records[name] for name in undecided}
        done += size
    if done < rounds * size:
        report("prune", rounds * size - done, size, errors.mean())
    return kept, kept_records


def _rounds(record: SiteRecord) -> int:
    """Return how many rounds there are until there are too few atoms for another."""
    fewer = _fewer(record)
    return 0 if fewer is None else 1 + _rounds(record.having("num_frequencies", fewer))


def _fewer(record: SiteRecord) -> int | None:
    """The number of atoms after another round; None if there are too few for one."""
    count = record.num_frequencies
    assert count is not None
    fewer = max(FEWEST, FEWEST * math.floor(LEFT * count / FEWEST))
    return fewer if fewer < count else None


@torch.no_grad()
def atom_shares(host: Host, mechanisms: Mapping[str, AttentionMechanism], batches: Batches) -> dict[str, Tensor]:
    """What each atom of attentions weighs, (H, R), summing to 1 over R, on some of the batches that are fitted to."""
    sums: dict[str, Tensor] = {}
    count = min(START_BATCHES, len(batches.train))

    def weigh(name: str, call: Call) -> Tensor:
        if name in mechanisms:
            sums[name] = sums.get(name, 0) + shares_in_call(mechanisms[name], call)
        return call.softmax()

    with host.watching(weigh):
        for step in range(count):
            host.run(batches.at(step))
    return {name: each / each.sum(-1, keepdim=True) for name, each in sums.items()}


def shares_in_call(mechanism: AttentionMechanism, call: Call) -> Tensor:
    """The sum of the shares over the queries of a call, (H, R)."""
    atoms, kernel = atoms_of(mechanism), kernel_of(mechanism)
    assert atoms is not None
    assert kernel is not None
    omega = kernel.scaled_frequencies().float()  # (H, R, D)
    query_scores, key_scores = (x.float() @ omega.transpose(-1, -2) for x in (call.q, call.k))
    features = key_scores.log_softmax(-1)
    if call.key_mask is not None:
        features = features.masked_fill(~call.key_mask[:, None, :, None], -math.inf)
    masses = features.logsumexp(2, keepdim=True)  # (B, H, 1, R)
    shares = (query_scores + atoms.log_weight.float().unsqueeze(-2) + masses).softmax(-1)
    mask = call.query_mask()
    if mask is not None:
        shares = shares.masked_fill(~mask[:, None, :, None], 0)
    return shares.sum((0, 2))


@torch.no_grad()
def without_least(mechanism: AttentionMechanism, record: SiteRecord, shares: Tensor) -> AttentionMechanism:
    """The attention of a record, with those atoms of another that weigh most, a head its own."""
    fewer = record.build().to(shares.device)
    atoms = atoms_of(fewer)
    assert atoms is not None
    best = shares.topk(atoms.num_frequencies, dim=-1).indices.sort(dim=-1).values  # (H, R)
    state = mechanism.state_dict()
    for name, value in state.items():
        if name.endswith(".omega"):
            state[name] = value.gather(1, best.unsqueeze(-1).expand(-1, -1, value.shape[-1]))
        elif name.endswith(".log_weight"):
            state[name] = value.gather(1, best)
    fewer.load_state_dict(state)
    return fewer
