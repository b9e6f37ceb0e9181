"""Classes of converted models: those of transformers, which have kernels where their config says so.

A saved folder has a model type of its own, so that nothing takes it for a softmax model: `klformer.autoload` tells
transformers which classes read it, and the folder's own module does the same where klformer is not imported. Classes
have the names of those that they are made of, by which transformers finds tokenizers and tasks.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from klformer.attention import AttentionMechanism
from klformer.conversion.hf.cache import cache_for_generation
from klformer.conversion.hf.interface import NAME
from klformer.conversion.hf.positions import place_tokens, takes_places
from klformer.conversion.record import FORMAT, SiteRecord, read_records
from klformer.errors import ArgumentError
from klformer.files import write_text

#: The `model_type` of saved models.
MODEL_TYPE = NAME
#: Where configs, and where attention layers keep the dropout of attention's weights.
CONFIG_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")
LAYER_DROPOUTS = ("dropout", "dropout_prob", "attention_dropout", "attn_dropout")
#: The module in a folder that makes transformers import klformer, given `trust_remote_code=True`.
MODULE = "modeling_klformer"
MODULE_TEXT = '''"""This model's attention is linear: it needs klformer, and imports it (pip install klformer)."""

import klformer
from transformers import CONFIG_MAPPING

KlformerConfig = CONFIG_MAPPING["klformer"]
'''
#: The attention in a saved config: classes of transformers itself refuse it, and say this.
GUARD = (
    "klformer (this model is linear and not for the classes of transformers; pip install 'klformer[hf]', import "
    "klformer, and load it with AutoModel or the Auto class of its task)"
)


def _once(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return cache(function)


class ConvertedConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """What configs of converted models do differently."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        if config_dict.get("model_type") == MODEL_TYPE:
            return read_config(config_dict, **kwargs)
        return super().from_dict(config_dict, **kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what is saved."""
        saved = {"model_type": MODEL_TYPE, "auto_map": {"AutoConfig": f"{MODULE}.KlformerConfig"}}
        return super().to_diff_dict() | saved | {"attn_implementation": GUARD}


class ConvertedModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """What converted models do differently."""

    def __init__(self, config: Any, *others: Any, **named: Any) -> None:
        _check_implementation(config._attn_implementation or NAME)
        config._attn_implementation = NAME
        super().__init__(config, *others, **named)
        if config.klformer.get("pooler") is False and getattr(self.base_model, "pooler", None) is not None:
            setattr(self.base_model, "pooler", None)  # noqa: B010 (modules are not typed as optional)
        with _as_saved():
            for name, record in read_records(Path("config.json"), config.klformer).items():
                _part(self, name).add_module(NAME, record.build())
        become_converted(self)

    def set_attn_implementation(self, attn_implementation: str | dict[str, str], *others: Any, **named: Any) -> None:
        _check_implementation(attn_implementation)
        super().set_attn_implementation(attn_implementation, *others, **named)

    def save_pretrained(self, save_directory: Any, *others: Any, **named: Any) -> None:
        super().save_pretrained(save_directory, *others, **named)
        folder = Path(save_directory)
        write_text(folder / f"{MODULE}.py", MODULE_TEXT)
        for weights in folder.glob("*.safetensors"):  # safetensors writes them for nobody else
            weights.chmod((folder / "config.json").stat().st_mode)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: Any, *others: Any, **named: Any
    ) -> Any:
        if generation_config.use_cache is not False:
            given = model_kwargs.get("past_key_values")
            if (own := cache_for_generation(self, generation_config.cache_implementation, given)) is not None:
                model_kwargs["past_key_values"] = own
                return None
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *others, **named)  # type: ignore[misc]


def convert_class(model: PreTrainedModel, records: Mapping[str, SiteRecord]) -> None:
    """Make a model whose layers have kernels one that is saved and loaded with them."""
    section = {
        "format": FORMAT,
        "family": model.config.model_type,
        "attentions": {name: record.model_dump(mode="json") for name, record in records.items()},
        # That a model was built without (add_pooling_layer=False) is not in transformers' part of the config.
        "pooler": getattr(model.base_model, "pooler", None) is not None,
    }
    model.config.__class__ = converted(type(model.config))
    model.config.klformer = section
    become_converted(model)


def become_converted(model: PreTrainedModel) -> None:
    """Give a model, and the models in it that share its config, classes of converted ones."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part.config is model.config:
            part.__class__ = converted(type(part))
            part._keep_in_fp32_modules_strict = {*(part._keep_in_fp32_modules_strict or ()), NAME}
            if takes_places(part):
                part.register_forward_pre_hook(place_tokens, with_kwargs=True)
    switch_off_dropout(model)


def switch_off_dropout(model: PreTrainedModel) -> None:
    """Without dropout of attention's weights in converted layers: a kernel has none to drop."""
    for key in CONFIG_DROPOUTS:
        if getattr(model.config, key, 0.0):
            setattr(model.config, key, 0.0)
    for layer in model.modules():
        if isinstance(getattr(layer, NAME, None), AttentionMechanism):
            for name in LAYER_DROPOUTS:
                match getattr(layer, name, None):
                    case nn.Dropout() as dropout:
                        dropout.p = 0.0
                    case float():
                        setattr(layer, name, 0.0)


def read_config(content: Mapping[str, Any], **others: Any) -> Any:
    """Return the config of a converted model, as the class of its family, from the content of its file.

    Raises:
        FileError: it is not that of a converted model.
    """
    section = content.get(NAME)
    read_records(Path(others.get("name_or_path") or "") / "config.json", section)
    family = section.get("family", content["model_type"])  # type: ignore[union-attr]
    _tell_auto_classes(CONFIG_MAPPING[family])
    rest = {name: value for name, value in content.items() if name not in ("auto_map", "attn_implementation")}
    return converted(CONFIG_MAPPING[family]).from_dict(rest | {"model_type": family}, **others)


@_once
def converted(kind: Any) -> Any:
    """Return the class of converted models, or of their configs, that a class of transformers becomes."""
    if issubclass(kind, ConvertedModel | ConvertedConfig):
        return kind
    is_model = issubclass(kind, PreTrainedModel)
    members: dict[str, Any] = {"__module__": __name__, "__doc__": kind.__doc__}
    if is_model and kind.config_class is not None:
        members["config_class"] = converted(kind.config_class)
    made = type(kind.__name__, (ConvertedModel if is_model else ConvertedConfig, kind), members)
    if is_model:  # transformers does this when a model is built
        _CAN_RECORD_REGISTRY[str(made)] = kind._can_record_outputs
    return made


@_once
def _tell_auto_classes(config: Any) -> None:
    """Have the Auto classes make converted models of converted configs of a family."""
    for auto in vars(modeling_auto).values():
        models = getattr(auto, "_model_mapping", None)
        if models is not None and config in models:
            found = models[config]
            classes = tuple(map(converted, found)) if isinstance(found, tuple) else converted(found)
            models.register(converted(config), classes, exist_ok=True)


def __getattr__(name: str) -> Any:
    """Return the class of that name, which unpickling asks for."""
    kind = None if name.startswith("_") else getattr(transformers, name, None)
    if isinstance(kind, type) and issubclass(kind, PreTrainedModel | PreTrainedConfig):
        return converted(kind)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _check_implementation(name: str | Mapping[str, str]) -> None:
    if name != NAME:
        raise ArgumentError(
            f"this model was converted: its attention is {NAME!r} and can't be {name!r}; the softmax model is the one "
            "that it was made of"
        )


def _part(model: PreTrainedModel, name: str) -> nn.Module:
    """A layer by the name that it has in the model that was saved, which may have another head, or none."""
    prefix = f"{model.base_model_prefix}."
    known = dict(model.named_modules())
    for tried in (name, name.removeprefix(prefix), prefix + name):
        if tried in known:
            return known[tried]
    raise ArgumentError(f"{type(model).__name__} has no layer {name!r}, which its config says was converted")


@contextmanager
def _as_saved() -> Iterator[None]:
    """Kernels are float32 whatever the model is, and are not what the user's seed decides."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)
