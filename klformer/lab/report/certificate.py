"""A conversion's certificate as a page for a browser: what was kept, layer by layer, and what it costs."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import BaseLoader, Environment, StrictUndefined

import klformer
from klformer.files import read_json, write_text

TEMPLATE = "certificate.html.j2"
#: What figures are called on the page.
WORDS = {
    "accuracy": "accuracy",
    "agreement": "predictions that are the teacher's",
    "perplexity": "perplexity",
    "cosine_mean": "cosine with the teacher's embedding (mean over tokens)",
    "cosine_first": "cosine with the teacher's embedding (first token)",
    "distance": "distance from the teacher's answers (KL, or squared error of hidden states; 0 is the same)",
}


def write_certificate(folder: Path) -> Path:
    """Write certificate.html beside the certificate.json of a converted model, and say where."""
    certificate = read_json(folder / "certificate.json")
    source = resources.files("klformer.lab.report").joinpath(TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(
        loader=BaseLoader(), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(source).render(
        certificate=certificate,
        verdict=certificate.get("verdict"),
        columns=_columns(certificate),
        layers=[_layer(layer) for layer in certificate["layers"]],
        words=WORDS,
        speed=certificate.get("speed") or [],
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=klformer.__version__,
    )
    target = folder / "certificate.html"
    write_text(target, page)
    return target


def _columns(certificate: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    columns = {"teacher": certificate["teacher"], "linear": certificate["linear"]}
    if certificate["hybrid"] is not None:
        columns["with softmax layers"] = certificate["hybrid"]
    return columns | certificate.get("parts", {})


def _layer(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layer with means over its heads, and its heads in percent of the largest error that is drawn."""
    return {**layer, "start_mean": _mean(layer["start"]), "mean": _mean(layer["fitted"])}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
