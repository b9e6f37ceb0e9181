"""`klformer export`: an encoder in a folder becomes an ONNX file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from klformer.errors import ArgumentError, check_extra
from klformer.lab.cli.command import plain_command


@dataclass(frozen=True)
class Export:
    """Write an encoder of transformers, converted or softmax, as an ONNX file for any number of texts of any length.

    Its inputs are input_ids and attention_mask. Examples:

      klformer export bert-linear --out model.onnx
      klformer export encoder-linear --out model.onnx --pooling mean --unit-length
    """

    folder: tyro.conf.Positional[Path]
    """Folder of the model, as `klformer convert` or transformers writes it."""
    out: Path
    """The file; it must be new."""
    pooling: Literal["none", "mean", "first"] = "none"
    """What is given of a text: scores or hidden states as the model gives them, or an embedding, the mean over the
    tokens or the first token."""
    unit_length: bool = False
    """Give embeddings the length 1."""


def export_encoder(options: Export) -> None:
    """Load, export, and say what is there."""
    check_extra("hf", "export", ["transformers"])
    from klformer.conversion.hf.encoder import TextEncoder
    from klformer.conversion.hf.export import export_onnx
    from klformer.conversion.hf.inputs import load_model

    if options.out.exists():
        raise ArgumentError(f"{options.out} is there already: give another --out")
    model = load_model(options.folder)
    export_onnx(TextEncoder(model, pooling=options.pooling, unit_length=options.unit_length), options.out)
    size = options.out.stat().st_size / 2**20
    print(f"{options.out} has the {type(model).__name__} of {options.folder}, {size:.1f} MiB, for any batch and length")


COMMAND = plain_command(Export, export_encoder)
