"""An encoder of transformers, converted or not, as an ONNX file that takes any number of texts of any length."""

import logging
import warnings
from pathlib import Path

import torch

from klformer.conversion.hf.encoder import INPUTS, TextEncoder
from klformer.errors import check_extra
from klformer.files import writing


def export_onnx(encoder: TextEncoder, out: Path) -> None:
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
                output_names=["embeddings" if encoder.pooling != "none" else "output"],
                dynamic_shapes=dict.fromkeys(INPUTS, dynamic),
                verbose=False,
            )
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    assert program is not None
    with writing(out):
        program.save(str(out))
