"""Converted models in folders: weights as safetensors, everything else as JSON. Nothing in them is executed."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from klformer.attention import MultiheadAttention
from klformer.conversion.certificate import Certificate
from klformer.conversion.hosts import is_of_transformers
from klformer.conversion.record import FORMAT, SiteRecord, read_records
from klformer.errors import ArgumentError, FileError, check_extra
from klformer.files import read_json, replacing, write_json

CERTIFICATE, ATTENTIONS, WEIGHTS = "certificate.json", "klformer.json", "model.safetensors"


def save(
    model: nn.Module,
    records: Mapping[str, SiteRecord],
    certificate: Certificate,
    folder: Path,
    *,
    tokenizer: Any = None,
) -> None:
    """Write a converted model and its certificate."""
    folder.mkdir(parents=True, exist_ok=True)
    if is_of_transformers(model):
        from klformer.conversion.hf import save_folder

        save_folder(model, folder, tokenizer)
    else:
        if tokenizer is not None:
            raise ArgumentError("tokenizer must be None for a model of klformer, which has none")
        attentions = {name: record.model_dump(mode="json") for name, record in records.items()}
        write_json(folder / ATTENTIONS, {"klformer": {"format": FORMAT, "attentions": attentions}})
        with replacing(folder / WEIGHTS) as temporary:
            save_file({name: value.contiguous() for name, value in model.state_dict().items()}, temporary)
    write_json(folder / CERTIFICATE, asdict(certificate) | {"verdict": certificate.verdict()})


def load_converted(folder: str | Path, *, into: nn.Module | None = None) -> nn.Module:
    """The converted model that `Conversion.save` wrote, bit for bit, in evaluation mode.

    Args:
        folder: Where it is.
        into: For a model of klformer: a model that was built as the teacher was; it is changed in place.

    Raises:
        FileError: the folder does not hold a converted model, or not all of it.

    Examples:
        >>> import torch, klformer
        >>> config = klformer.EncoderConfig(model_dim=16, num_layers=1, num_heads=2, attention="softmax")
        >>> teacher = klformer.TransformerEncoder(config)
        >>> batches = [{"x": torch.randn(2, 12, 16)} for _ in range(10)]
        >>> klformer.convert(teacher, batches, options={"num_frequencies": 8}, steps=2).save("linear")
        >>> model = klformer.load_converted("linear", into=klformer.TransformerEncoder(config))
        >>> model(torch.randn(2, 50, 16)).shape
        torch.Size([2, 50, 16])
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileError(f"there is no folder {folder}")
    if not (folder / ATTENTIONS).exists():
        if into is not None:
            raise ArgumentError("into must be None for a model of transformers, which its folder describes")
        check_extra("hf", f"the model in {folder}", ["transformers"])
        from klformer.conversion.hf import load_folder

        return load_folder(folder)
    if into is None:
        raise ArgumentError(f"{folder} has a model of klformer: give into=, a model that was built as the teacher was")
    file = folder / ATTENTIONS
    for name, record in read_records(file, read_json(file).get("klformer")).items():
        layer = dict(into.named_modules()).get(name)
        if not isinstance(layer, MultiheadAttention):
            raise FileError(f"{file}: the model that is given has no attention called {name!r}")
        layer.mechanism = record.build()
    try:
        into.load_state_dict(load_file(folder / WEIGHTS))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise FileError(f"the weights in {folder} are not those of the model that is given: {error}") from error
    return into.eval()
