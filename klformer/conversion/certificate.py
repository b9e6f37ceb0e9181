"""What a conversion kept: a model's answers beside those of its teacher, on batches that neither was fitted to."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from klformer.attention.spectral import SpectralAttention
from klformer.conversion.distil import distance
from klformer.conversion.fitting import Progress
from klformer.conversion.hosts import Answer, Batch, Host
from klformer.conversion.labels import asked_about, asked_mask, is_language_model
from klformer.models.pooling import masked_mean


@dataclass(frozen=True)
class LayerErrors:
    """Relative squared errors of the heads of a layer's attention, each with softmax below it.

    Examples:
        >>> from klformer.conversion.certificate import LayerErrors
        >>> errors = LayerErrors(0, "layers.0", "atoms-prf", 64, start=(0.4, 0.6), fitted=(0.1, 0.3))
        >>> errors.mean()
        0.2
    """

    layer: int
    name: str
    attention: str
    num_frequencies: int | None
    start: tuple[float, ...]
    """Before it was fitted."""
    fitted: tuple[float, ...]
    stays_softmax: bool = False

    def mean(self) -> float:
        """Over the heads, after fitting."""
        return sum(self.fitted) / len(self.fitted)


@dataclass(frozen=True)
class Certificate:
    """Figures of a conversion, on held-out batches.

    Examples:
        >>> from klformer.conversion.certificate import Certificate
        >>> certificate = Certificate(
        ...     model="BertForMaskedLM", layers=(), teacher={"accuracy": 0.94}, linear={"accuracy": 0.93}, hybrid=None,
        ...     num_held_out=8, seconds={"fit": 60.0}, processor_seconds=60.0,
        ... )
        >>> print(certificate.table().splitlines()[1])
        accuracy                 0.9400               0.9300
        >>> print(certificate.verdict())
        close to its teacher: try it on your task (accuracy 0.93, the teacher's 0.94)
    """

    model: str
    layers: tuple[LayerErrors, ...]
    teacher: dict[str, float]
    linear: dict[str, float]
    """With all chosen layers converted."""
    hybrid: dict[str, float] | None
    """With those that stay softmax; None if none does."""
    num_held_out: int
    seconds: dict[str, float]
    """Wall time of each part."""
    processor_seconds: float
    notes: tuple[str, ...] = ()
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of attention with a window, what each part gives in place of both: "near alone" and "kernel alone"."""

    def verdict(self) -> str:
        """What the figures say of the model as it is, in a sentence."""
        now, before = self.linear if self.hybrid is None else self.hybrid, self.teacher
        if before.get("perplexity"):
            kept, what = before["perplexity"] / now["perplexity"], "perplexity {now:.4g}, the teacher's {before:.4g}"
        elif before.get("accuracy"):
            kept, what = now["accuracy"] / before["accuracy"], "accuracy {now:.4g}, the teacher's {before:.4g}"
        else:
            kept, what = now.get("agreement", now.get("cosine_mean", 0.0)), "{kept:.1%} like the teacher's answers"
        name = what.split(" ")[0]
        words = next(words for least, words in VERDICTS if kept >= least)
        return f"{words} ({what.format(now=now.get(name, 0), before=before.get(name, 0), kept=kept)})"

    def table(self) -> str:
        """The figures as text, and what they say."""
        columns = {"teacher": self.teacher, "linear": self.linear}
        if self.hybrid is not None:
            columns["with softmax layers"] = self.hybrid
        columns |= self.parts
        names = list(dict.fromkeys(name for column in columns.values() for name in column))
        width = max(map(len, names), default=0)
        lines = ["".join([" " * (width + 2), *(f"{name:>21}" for name in columns)])]
        for name in names:
            cells = (f"{column[name]:>21.4f}" if name in column else " " * 21 for column in columns.values())
            lines.append("".join([f"{name:<{width + 2}}", *cells]))
        wide = max([22, *(len(layer.attention) for layer in self.layers)])
        lines += ["", f"layer  {'attention':<{wide}}        R   error at the start   fitted"]
        for layer in self.layers:
            start = sum(layer.start) / len(layer.start)
            kept = "   stays softmax" if layer.stays_softmax else ""
            count = "" if layer.num_frequencies is None else str(layer.num_frequencies)
            lines.append(
                f"{layer.layer:>5}  {layer.attention:<{wide}}{count:>9}{start:>21.4f}{layer.mean():>9.4f}{kept}"
            )
        return "\n".join([*lines, "", LEGEND, *(f"Note: {note}" for note in self.notes), f"Verdict: {self.verdict()}"])


#: What is said of a model that keeps at least such a share of what its teacher can do.
VERDICTS = (
    (0.99, "as good as its teacher here"),
    (0.95, "close to its teacher: try it on your task"),
    (0.8, "below its teacher: more steps, frequencies or fine-tuning, or keep_softmax, would help"),
    (-math.inf, "far from its teacher, and not to be used as it is"),
)
LEGEND = (
    "distance: KL from the teacher's scores, or relative squared error of hidden states; 0 is the same\n"
    "R: frequencies of the kernel; error: relative squared error of the attention's output, softmax below it"
)


#: Log-gains at which the other part has nothing to say: results are the same as without it, to the last digit.
ALONE = {"near alone": 1e4, "kernel alone": -1e4}


@contextmanager
def alone(mechanisms: Iterable[nn.Module], part: str) -> Iterator[None]:
    """Have one part of attentions with a window do what both do; what is inside sees the others as they are.

    Args:
        mechanisms: Some attentions.
        part: Of `ALONE`.
    """
    gains = [each.near_log_gain for each in mechanisms if isinstance(each, SpectralAttention) and each.window]
    before = [gain.detach().clone() for gain in gains]
    with torch.no_grad():
        try:
            for gain in gains:
                gain.fill_(ALONE[part])
            yield
        finally:
            for gain, value in zip(gains, before, strict=True):
                gain.copy_(value)


@torch.no_grad()
def figures(
    host: Host, teacher: Host, batches: Sequence[Batch], *, causal: bool, progress: Progress | None = None
) -> dict[str, float]:
    """How a model does, by itself and beside its teacher.

    agreement       share of predictions that are the teacher's
    accuracy        share of predictions that are right, where the batches have labels: masked tokens, classes, or the
                    next tokens of a causal model
    perplexity      of a causal model
    cosine_mean     with the teacher's embedding, the mean over the tokens, of models that give hidden states
    cosine_first    the same at the first token (CLS)
    distance        KL from the teacher's scores, or relative squared error of hidden states
    """
    tally = _Tally()
    for number, batch in enumerate(batches, start=1):
        right, answer = teacher.run(batch), host.run(batch)
        if progress is not None:
            progress("measure", number, len(batches), math.nan)
        tally.add("distance", distance(host, batch, answer, right) * len(answer.values), len(answer.values))
        if answer.are_scores:
            _add_scores(tally, host, batch, answer, right, causal=causal)
        else:
            mask = host.mask(batch)
            ours, theirs = answer.values.float(), right.values.float()
            vectors = {"cosine_mean": [masked_mean(x, mask) for x in (ours, theirs)]}
            vectors["cosine_first"] = [ours[:, 0], theirs[:, 0]]
            for name, (a, b) in vectors.items():
                cosines = cosine_similarity(a, b, dim=-1)
                tally.add(name, cosines.sum(), len(cosines))
    values = tally.means()
    if "perplexity" in values:
        values["perplexity"] = math.exp(values["perplexity"])
    if host is teacher:
        values = {name: value for name, value in values.items() if name in ("accuracy", "perplexity")}
    return values


def _add_scores(tally: "_Tally", host: Host, batch: Batch, answer: Answer, right: Answer, *, causal: bool) -> None:
    counted = asked_mask(host, batch, answer, causal=causal)
    same = answer.values.argmax(-1) == right.values.argmax(-1)
    tally.add("agreement", same[counted].sum(), counted.sum())
    asked = asked_about(host, batch, answer, causal=causal)
    if asked is None:
        return
    count = len(asked.right)
    tally.add("accuracy", asked.num_right(), count)
    if is_language_model(answer, causal=causal):
        tally.add("perplexity", asked.loss() * count, count)


class _Tally:
    """Sums and counts by name."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, float] = {}

    def add(self, name: str, total: Tensor, count: Tensor | int) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(total)
        self._counts[name] = self._counts.get(name, 0.0) + float(count)

    def means(self) -> dict[str, float]:
        return {name: total / self._counts[name] for name, total in self._sums.items() if self._counts[name]}
