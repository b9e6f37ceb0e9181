"""Converted models of transformers as folders: transformers' own files, with a section `klformer` in the config."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn
from transformers import PreTrainedModel

from klformer.conversion.hf.host import switch_off_dropout
from klformer.conversion.hf.interface import NAME
from klformer.conversion.record import FORMAT, SiteRecord, read_records
from klformer.errors import FileError
from klformer.files import read_json, replacing, writing

WEIGHTS = "model.safetensors"


class Tokenizer(Protocol):
    """What can be saved beside a model."""

    def save_pretrained(self, folder: str) -> Any: ...


def save_folder(model: nn.Module, records: Mapping[str, SiteRecord], folder: Path, tokenizer: Tokenizer | None) -> None:
    """Write a model as a folder of transformers."""
    assert isinstance(model, PreTrainedModel)
    model.config.klformer = {
        "format": FORMAT,
        "attentions": {name: record.model_dump(mode="json") for name, record in records.items()},
        # That a model was built without (add_pooling_layer=False) is not in transformers' part of the config.
        "pooler": getattr(model.base_model, "pooler", None) is not None,
    }
    model.config.architectures = [type(model).__name__]
    model.config.dtype = model.dtype
    # The names of the weights are those of the model, not those that transformers has written since its beginnings.
    with replacing(folder / WEIGHTS) as temporary:
        save_model(model, str(temporary), metadata={"format": "pt"})
    with writing(folder):
        model.config.save_pretrained(str(folder))
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(str(folder))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))


def load_folder(folder: Path) -> PreTrainedModel:
    """The model of a folder, in evaluation mode.

    Raises:
        FileError: the folder does not hold a converted model, or not all of it.
    """
    content = read_json(folder / "config.json")
    records = read_records(folder / "config.json", content.get(NAME))
    config = transformers.AutoConfig.from_pretrained(str(folder))
    kind = getattr(transformers, (content.get("architectures") or [""])[0], None)
    if kind is None:
        raise FileError(f"{folder / 'config.json'}: architectures must name a class of transformers")
    model: PreTrainedModel = kind(config)
    if isinstance(dtype := getattr(config, "dtype", None), torch.dtype):
        model.to(dtype=dtype)  # type: ignore[call-arg]
    if content[NAME].get("pooler") is False and getattr(model.base_model, "pooler", None) is not None:
        setattr(model.base_model, "pooler", None)  # noqa: B010 (modules are not typed as optional)
    for name, record in records.items():
        model.get_submodule(name).add_module(NAME, record.build())
    switch_off_dropout(model)
    model.set_attn_implementation(NAME)
    _load_weights(model, folder / WEIGHTS)
    model.train(False)
    return model


def _load_weights(model: PreTrainedModel, file: Path) -> None:
    try:
        load_model(model, file)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise FileError(f"{file} does not hold the weights of the model in its config: {error}") from error
