"""A pretrained encoder in a folder of transformers, converted or softmax, as the body of a run's model.

What it is made of goes into the run's configuration, its tokenizer into what the run knows of its data, and its weights
into the checkpoints: a run does not need the folder again.
"""

from pathlib import Path
from typing import Any

from torch import nn

from klformer.config import Config
from klformer.errors import ArgumentError, RunError, check_extra
from klformer.lab.data import InputShape
from klformer.lab.tasks.base import Knowledge
from klformer.lab.training.checkpoint import put_weights
from klformer.lab.training.config import OptimiserConfig, ParallelConfig
from klformer.lab.training.encoder_classifier import EncoderClassifier
from klformer.lab.training.objective import Objective
from klformer.models import AttentionSpec, ModelConfig


class PretrainedEncoder(Config):
    """The encoder that a run is built on."""

    folder: Path
    """Where it came from; it is read when the run begins, and never again."""
    architecture: dict[str, Any]
    """The content of its config.json, with as many positions as the run's texts need."""
    attention: AttentionSpec
    """What is in it."""


def read_encoder(folder: Path, max_len: int) -> PretrainedEncoder:
    """Return what the encoder in a folder is made of, for texts of so many tokens.

    Raises:
        FileError: the folder has no encoder.
        ConversionError: the model there is not one, or its positions can't be extended.
    """
    check_extra("hf", "--encoder", ["transformers"])
    from klformer.conversion.hf.encoder import attention_of, read_architecture

    folder = folder.expanduser().absolute()
    architecture = read_architecture(folder, max_len=max_len)
    return PretrainedEncoder(folder=folder, architecture=architecture, attention=attention_of(folder).complete())


def settings_to_build_on(folder: Path, max_len: int) -> tuple[AttentionSpec, dict[str, dict[str, Any]]]:
    """Return the attention of the encoder in a folder, and what replaces the settings of a preset for a run on it.

    Args:
        max_len: The preset's longest sequence.

    Raises:
        FileError: the folder has no encoder.
    """
    check_extra("hf", "--encoder", ["transformers"])
    from klformer.conversion.hf.encoder import attention_of, usual_reading

    folder = folder.expanduser()
    pooling, longest = usual_reading(folder)
    changes: dict[str, dict[str, Any]] = {
        "model": {"pooling": pooling},
        "data": {"max_len": min(max_len, longest or max_len)},
    }
    return attention_of(folder), changes


def build_encoder_classifier(
    encoder: PretrainedEncoder, model: ModelConfig, optimiser: OptimiserConfig, shape: InputShape, objective: Objective
) -> EncoderClassifier:
    """Return an encoder and a head with random weights.

    Raises:
        ArgumentError: the task has no texts, or more than one answer for each.
    """
    check_extra("hf", "a run with an encoder", ["transformers"])
    from klformer.conversion.hf.encoder import TextEncoder, build_encoder

    if shape.vocab_size is None or shape.is_pair or objective.of_positions:
        raise ArgumentError("--encoder is for tasks that ask one thing of each text, like csv, sst2 and mrpc")
    body = build_encoder(encoder.architecture)
    known = body.get_input_embeddings().get_parameter("weight").shape[0]
    if shape.vocab_size > known:
        raise ArgumentError(f"the tokenizer of the encoder has {shape.vocab_size:,} tokens, its model {known:,}")
    return EncoderClassifier(
        TextEncoder(body, pooling="first" if model.pooling == "cls" else "mean"),
        model_dim=body.config.hidden_size,
        hidden_dim=model.head_hidden_dim,
        num_outputs=objective.num_outputs,
        dropout=model.dropout,
        padding=body.config.pad_token_id or 0,
        frozen=not optimiser.encoder_learning_rate,
    )


class EncoderFolder:
    """What a run takes from an encoder: its tokenizer and its weights.

    Args:
        encoder: The encoder.
    """

    def __init__(self, encoder: PretrainedEncoder) -> None:
        from klformer.conversion.hf.encoder import read_tokenizer

        self._encoder = encoder
        tokens = {"kind": "subwords", "tokenizer": read_tokenizer(encoder.folder), "ends": True}
        self.knowledge: Knowledge = {"inputs": {"kind": "text", "tokens": tokens}}

    def check_reads(self, task: str, knowledge: Knowledge) -> None:
        """See that a task reads its texts with the encoder's tokenizer.

        Raises:
            RunError: it does not.
        """
        if knowledge.get("inputs") != self.knowledge["inputs"]:
            raise RunError(
                f"--encoder is for tasks of texts, like csv, sst2 and mrpc; {task} reads its inputs otherwise"
            )

    def give(self, model: nn.Module, max_len: int) -> str:
        """Put the weights into a model; returns what was taken."""
        from klformer.conversion.hf.encoder import load_encoder

        assert isinstance(model, EncoderClassifier)
        body = model.encoder.get_submodule("model")
        weights = load_encoder(self._encoder.folder, max_len=max_len)
        put_weights(body, weights, self._encoder.folder)
        state = "fine-tuned" if any(p.requires_grad for p in body.parameters()) else "frozen"
        numbers = sum(value.numel() for value in weights.values())
        return f"from {self._encoder.folder}: {type(body).__name__} ({numbers:,} numbers, {state}); fresh: norm, head"


def check_settings(
    encoder: PretrainedEncoder,
    attention: AttentionSpec,
    parallel: ParallelConfig,
    objective: str,
    init_from: Path | None,
) -> None:
    """See that nothing is asked for that a run with an encoder does not do.

    Raises:
        ArgumentError: something is.
    """
    if attention != encoder.attention:
        raise ArgumentError(
            f"the attention of {encoder.folder} is {encoder.attention.name}: leave --attention out; `klformer convert` "
            "puts another into an encoder"
        )
    if parallel.sequence > 1 or parallel.shard:
        raise ArgumentError("--encoder does not go with --parallel.sequence or --parallel.shard")
    if objective != "task":
        raise ArgumentError("--encoder is for `klformer train`: pretraining begins with a model of its own")
    if init_from is not None:
        raise ArgumentError("give --encoder or --init-from, not both")
