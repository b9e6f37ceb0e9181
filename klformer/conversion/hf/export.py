"""An encoder of transformers, converted or not, as an ONNX file that takes any number of texts of any length."""

import logging
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from klformer.conversion.hosts import ConversionError
from klformer.errors import ArgumentError, check_extra
from klformer.files import writing
from klformer.models.pooling import masked_mean

Pooling = Literal["none", "mean", "first"]
#: What a file takes, (batch, length) each.
INPUTS = ("input_ids", "attention_mask")


class ExportedEncoder(nn.Module):
    """What a file computes.

    Args:
        model: An encoder.
        pooling: "none" for what the model gives; "mean" over the tokens or the "first" token of its hidden states.
        unit_length: Whether pooled embeddings have length 1.

    Raises:
        ConversionError: the model is not one that reads texts and gives them back at once.
    """

    def __init__(self, model: PreTrainedModel, *, pooling: Pooling = "none", unit_length: bool = False) -> None:
        super().__init__()
        kind = type(model).__name__
        if model.main_input_name != INPUTS[0]:
            raise ConversionError(f"{kind} reads {model.main_input_name}: only encoders of texts are exported")
        if model.can_generate():
            raise ConversionError(f"{kind} generates, with a state that ONNX does not keep: only encoders are exported")
        if unit_length and pooling == "none":
            raise ArgumentError("embeddings of length 1 must be pooled: pooling must be 'mean' or 'first', got 'none'")
        self.model = model if pooling == "none" else model.base_model
        self._pooling, self._unit_length = pooling, unit_length

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Scores, hidden states (B, L, model_dim) or embeddings (B, model_dim)."""
        answer: Any = self.model(input_ids=input_ids, attention_mask=attention_mask)
        if self._pooling == "none":
            return answer.logits if "logits" in answer else answer.last_hidden_state
        hidden = answer.last_hidden_state
        pooled = hidden[:, 0] if self._pooling == "first" else masked_mean(hidden, attention_mask.bool())
        return normalize(pooled, dim=-1) if self._unit_length else pooled


def export_onnx(encoder: ExportedEncoder, out: Path) -> None:
    """Write an encoder as an ONNX file with the inputs `input_ids` and `attention_mask`.

    Raises:
        FileError: the file can't be written.
        MissingExtraError: the exporter is not installed.
    """
    check_extra("onnx", "export", ["onnx", "onnxscript"])
    tokens = torch.ones(2, 9, dtype=torch.long)
    mask = tokens.clone()
    mask[1, 6:] = 0  # nothing may be taken for granted of padding
    dynamic = dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter's own
            program = torch.onnx.export(
                encoder.eval(),
                (tokens, mask),
                dynamo=True,
                input_names=INPUTS,
                output_names=["embeddings" if encoder._pooling != "none" else "output"],
                dynamic_shapes=dict.fromkeys(INPUTS, dynamic),
                verbose=False,
            )
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    assert program is not None
    with writing(out):
        program.save(str(out))
