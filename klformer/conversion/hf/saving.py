"""Converted models of transformers as folders: transformers' own files, with a section `klformer` in the config."""

import json
import shutil
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from klformer.conversion.hf.classes import converted, read_config
from klformer.errors import FileError
from klformer.files import read_json, write_text, writing

#: Where sentence-transformers lists the modules of a model, and what else it keeps beside the encoder.
MODULES, SETTINGS = "modules.json", ("sentence_*_config.json", "config_sentence_transformers.json")


def save_folder(model: nn.Module, folder: Path, tokenizer: Any) -> None:
    """Write a model as a folder of transformers; pooling and the like of sentence-transformers come with it."""
    assert isinstance(model, PreTrainedModel)
    with writing(folder):
        model.save_pretrained(str(folder))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
    if (made_of := Path(model.name_or_path or "")).is_dir():
        _copy_modules(made_of, folder)


def encoder_folder(folder: Path) -> Path:
    """Return where a folder has its encoder: in itself, or where sentence-transformers has the first module."""
    modules = modules_of(folder)
    return folder / modules[0]["path"] if modules and not (folder / "config.json").exists() else folder


def modules_of(folder: Path) -> list[dict[str, str]]:
    """The modules that sentence-transformers lists; none if the folder is not one of its."""
    file = folder / MODULES
    if not file.exists():
        return []
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
        if any(each["path"] != Path(each["path"] or "_").name and each["path"] for each in modules):
            raise ValueError("its paths must be names of folders beside it")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileError(f"can't read {file}: {error}") from error
    return list(modules)


def _copy_modules(source: Path, folder: Path) -> None:
    """Copy the modules after the encoder, if the encoder at `source` is one of sentence-transformers."""
    root = source if (source / MODULES).exists() else source.parent
    if not (modules := modules_of(root)) or root / modules[0]["path"] != source or folder.resolve() == root.resolve():
        return
    with writing(folder):
        for file in (file for place in {root, source} for pattern in SETTINGS for file in place.glob(pattern)):
            shutil.copyfile(file, folder / file.name)
        for module in modules[1:]:
            if (root / module["path"]).is_dir() and module["path"]:
                shutil.copytree(root / module["path"], folder / module["path"], dirs_exist_ok=True)
    modules[0] = modules[0] | {"path": ""}
    write_text(folder / MODULES, json.dumps(modules, indent=2) + "\n")


def load_folder(folder: Path) -> PreTrainedModel:
    """The model of a folder, in evaluation mode.

    Raises:
        FileError: the folder does not hold a converted model, or not all of it.
    """
    content = read_json(folder / "config.json")
    config = read_config(content, name_or_path=str(folder))
    kind = getattr(transformers, (content.get("architectures") or [""])[0], None)
    if kind is None:
        raise FileError(f"{folder / 'config.json'}: architectures must name a class of transformers")
    try:
        model, found = converted(kind).from_pretrained(str(folder), config=config, output_loading_info=True)
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise FileError(f"{folder} does not hold the weights of the model in its config: {error}") from error
    if wrong := [name for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in found[kind]]:
        raise FileError(f"{folder} does not hold the weights of the model in its config: {wrong[0]}")
    return model
