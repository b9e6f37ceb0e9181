"""Distil a teacher into the converted model from end to end: its answers are what the student learns.

    scores           KL(teacher || student), tokens that a label asks about weighing more than the others
    hidden states    relative squared error
    layers           the same of what every layer gives, the mean over the layers, in addition
    labels           cross-entropy of what is right, in addition, if it is given a weight

What is trained is the kernels alone, or all weights with the kernels in a group of their own. Before that, kernels can
be aligned: trained on what the layers give, and nothing else.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax, pad

from klformer.attention import AttentionMechanism
from klformer.conversion.fitting import Progress, averages_of, redraw, share_of_rate, take_averages
from klformer.conversion.hosts import Answer, Batch, Host
from klformer.conversion.labels import asked_about
from klformer.conversion.planning import Plan
from klformer.conversion.resume import State, Store

#: Kernels learn so many times faster than other weights.
KERNEL_RATE_FACTOR = 10.0
#: In alignment, of the rate at which they are fitted.
ALIGN_RATE_FACTOR = 0.2
#: What a token weighs that no label asks about, beside one that a label does.
WEIGHT_UNASKED = 0.1
MAX_NORM = 1.0
#: How often progress is reported and the state is saved.
REPORTS = 20


def distil(
    student: Host,
    plan: Plan,
    mechanisms: Mapping[str, AttentionMechanism],
    stage: Literal["align", "distil"] = "distil",
    *,
    progress: Progress | None = None,
    store: Store | None = None,
    before: Mapping[str, Any] | None = None,
) -> None:
    """Train the student on the answers of the plan's teacher, in place; the batches come after those of the fit.

    What a store holds of it is gone on with, and the state is saved there now and then.

    Args:
        mechanisms: The attentions in the student that were converted.
        stage: What is done: kernels are aligned, or the answers are distilled.
        before: What is to be known of the stages before when it is gone on with, for JSON.
    """
    config, teacher = plan.config, plan.teacher
    steps, rate, first_step = config.finetune_steps, config.finetune_learning_rate, config.steps + config.align_steps
    kernel_rate, aligns = rate * KERNEL_RATE_FACTOR, stage == "align"
    if aligns:
        steps, kernel_rate, first_step = config.align_steps, config.learning_rate * ALIGN_RATE_FACTOR, config.steps
    kernels = [p for mechanism in mechanisms.values() for p in mechanism.parameters() if p.requires_grad]
    groups = [{"params": kernels, "peak": kernel_rate}]
    if config.finetune == "all" and not aligns:
        known = {id(p) for p in kernels}
        others = [p for p in student.model.parameters() if p.requires_grad and id(p) not in known]
        groups.append({"params": others, "peak": rate})
    optimiser = torch.optim.Adam([group for group in groups if group["params"]], betas=(0.9, 0.98))
    everything = [p for group in optimiser.param_groups for p in group["params"]]
    every = max(1, steps // REPORTS)
    first = 0
    if store is not None and (state := store.load()) is not None and state.stage == stage:
        first = state.step
        _restore(student.model, optimiser, state.tensors)
    for step in range(first, steps):
        batch = plan.batches.at(first_step + step)
        redraw(mechanisms, config.seed, first_step + step)
        with torch.no_grad():
            right = teacher.run(batch, hidden=True)
        answer = student.run(batch, hidden=True)
        away = loss = hidden_distance(student, batch, answer, right)
        if not aligns:
            away = distance(student, batch, answer, right)
            loss = away + loss
        if (
            config.label_weight
            and not aligns
            and (asked := asked_about(student, batch, answer, causal=plan.causal)) is not None
        ):
            loss = loss + config.label_weight * asked.loss()
        optimiser.zero_grad(set_to_none=True)
        gradients = torch.autograd.grad(loss, everything, allow_unused=True)
        for parameter, gradient in zip(everything, gradients, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(everything, MAX_NORM)
        for group in optimiser.param_groups:
            group["lr"] = group["peak"] * share_of_rate(step, steps)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if store is not None and (step + 1) % every == 0:
            # Weights that are shared are there once.
            weights = {f"model.{name}": value for name, value in _weights_and_buffers(student.model).items()}
            store.save(State(stage, step + 1, weights | averages_of(optimiser), dict(before or {})))
        if progress is not None:
            progress(stage, step + 1, steps, float(away.detach()))


@torch.no_grad()
def _restore(model: nn.Module, optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    for name, value in _weights_and_buffers(model).items():
        value.copy_(tensors[f"model.{name}"])
    take_averages(optimiser, tensors)


def _weights_and_buffers(model: nn.Module) -> dict[str, Tensor]:
    kept = set(model.state_dict())
    return {name: each for name, each in (*model.named_parameters(), *model.named_buffers()) if name in kept}


def distance(host: Host, batch: Batch, answer: Answer, right: Answer) -> Tensor:
    """How far an answer is from the right one, tokens only."""
    weights = _weights(host, batch, answer.values)
    if answer.are_scores:
        ours, theirs = (log_softmax(each.values.float(), -1) for each in (answer, right))
        distances = kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)
        return (distances * weights).sum() / weights.sum()
    return _relative_error(answer.values, right.values, weights)


def hidden_distance(host: Host, batch: Batch, answer: Answer, right: Answer) -> Tensor:
    """How far what the layers gave is from what they should give: relative squared error, the mean over the layers."""
    mask = host.mask(batch)
    errors = []
    for ours, theirs in zip(answer.hidden, right.hidden, strict=True):
        weights = theirs.new_ones(theirs.shape[:-1], dtype=torch.float32)
        if mask is not None and (added := weights.shape[1] - mask.shape[1]) >= 0:
            # What a model adds to a sequence stands before it.
            weights = weights.masked_fill(~pad(mask, (added, 0), value=True), 0)
        errors.append(_relative_error(ours, theirs, weights))
    return torch.stack(errors).mean() if errors else answer.values.new_zeros(())


def _relative_error(values: Tensor, right: Tensor, weights: Tensor) -> Tensor:
    off, size = (values.float() - right.float()).square().sum(-1), right.float().square().sum(-1)
    return (off * weights).sum() / (size * weights).sum()


def _weights(host: Host, batch: Batch, values: Tensor) -> Tensor:
    """What each prediction weighs: (B,) or (B, L)."""
    weights = values.new_ones(values.shape[:-1], dtype=torch.float32)
    labels, mask = host.labels(batch), host.mask(batch)
    if labels is not None and labels.shape == weights.shape and (labels < 0).any():
        weights = torch.where(labels < 0, WEIGHT_UNASKED, 1.0)
    if mask is not None and mask.shape == weights.shape:
        weights = weights.masked_fill(~mask, 0)
    return weights
