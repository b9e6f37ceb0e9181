"""From a folder of transformers and texts to a model, its tokenizer and batches."""

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from klformer.conversion.batches import HELD_OUT_SHARE, MAX_HELD_OUT
from klformer.conversion.hf.interface import NAME
from klformer.conversion.hf.saving import encoder_folder, load_folder
from klformer.conversion.hosts import Batch, ConversionError
from klformer.errors import DataError, FileError
from klformer.files import read_json

#: Share of the tokens that are masked for models that predict masked tokens, as they were trained.
MASKED = 0.15
#: Texts are put into batches with others of about their length, out of so many batches at a time.
SORTED_BATCHES = 50
#: A share of unknown tokens above this, or a vocabulary below such a share of the model's, is worth a warning.
MANY_UNKNOWN, LIKE = 0.05, 0.8


def load_teacher(folder: Path) -> tuple[PreTrainedModel, Any]:
    """The softmax model of a folder and its tokenizer.

    Raises:
        ConversionError: the model is converted already.
        FileError: the folder does not hold both.
    """
    if is_converted(folder):
        raise ConversionError(f"{folder} holds a converted model: give the softmax model that it was made of")
    return load_model(folder), load_tokenizer(folder)


def is_converted(folder: Path) -> bool:
    """Whether the model of a folder is a converted one."""
    return NAME in read_json(encoder_folder(folder) / "config.json")


def load_model(folder: Path) -> PreTrainedModel:
    """Load the model of a folder, converted or softmax, in float32 and evaluation mode.

    A folder of sentence-transformers is read as the encoder that it holds.

    Raises:
        FileError: it does not hold one.
    """
    folder = encoder_folder(folder)
    if is_converted(folder):
        return load_folder(folder)
    kind = getattr(transformers, (read_json(folder / "config.json").get("architectures") or [""])[0], None)
    with _loading(folder):
        model = (kind or transformers.AutoModel).from_pretrained(str(folder), dtype=torch.float32)
    return model.train(False)


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a folder.

    Raises:
        FileError: it does not hold one.
    """
    folder = encoder_folder(folder)
    with _loading(folder):
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    # Without these files transformers makes up a tokenizer that knows no words.
    files = tuple(tokenizer.vocab_files_names.values())
    if files and not any((folder / name).exists() for name in files):
        raise FileError(f"{folder} has no tokenizer ({', '.join(files)}): save that of the model there")
    return tokenizer


@contextmanager
def _loading(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of transformers, safetensors, tokenizers and pickle, each with errors of its own
        reason = str(error).strip().partition("\n")[0]
        raise FileError(f"can't load the model and the tokenizer in {folder}: {reason}") from error


def cautions(model: PreTrainedModel, tokenizer: Any, batches: Sequence[Batch]) -> list[str]:
    """Return what makes figures on these batches doubtful: words that nobody knows, or a vocabulary unlike its own."""
    tokens = torch.cat([batch["input_ids"][batch["attention_mask"].bool()] for batch in batches])
    found, known, size = [], len(tokenizer), len(model.get_input_embeddings().weight)  # type: ignore[arg-type]
    if tokenizer.unk_token_id is not None:
        share = float((tokens == tokenizer.unk_token_id).float().mean())
        if share > MANY_UNKNOWN:
            found.append(f"{share:.0%} of the tokens are {tokenizer.unk_token}: the tokenizer does not know such texts")
    if known < LIKE * size:
        found.append(f"the tokenizer has {known:,} tokens and the model {size:,}: is it the model's?")
    return found


def split_texts(
    texts: Iterable[str], *, count: int, batch_size: int, seed: int
) -> tuple[list[str], list[str], list[str]]:
    """Texts to measure by, to choose by and to learn from, in random order: of the first `count` batches, or as many
    as there are.

    Raises:
        DataError: there are not enough texts for three batches.
    """
    chosen = list(itertools.islice(iter(texts), count * batch_size))
    if len(chosen) < 3 * batch_size:
        raise DataError(f"there must be texts for three batches of {batch_size} at least, got {len(chosen)} texts")
    random.Random(seed).shuffle(chosen)
    held_out = min(MAX_HELD_OUT, max(1, len(chosen) // batch_size // HELD_OUT_SHARE)) * batch_size
    return chosen[:held_out], chosen[held_out : 2 * held_out], chosen[2 * held_out :]


def make_batches(
    texts: Sequence[str],
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    batch_size: int,
    max_length: int,
    seed: int,
    count: int = 1,
) -> list[Batch]:
    """Batches of texts of about the same length, with labels if the model predicts masked tokens.

    Of such a model there are `count` batches at least: all texts again and again, with other tokens masked.

    Raises:
        ConversionError: the tokenizer lacks what the model needs.
    """
    predicts_masked = type(model).__name__.endswith("ForMaskedLM")
    if predicts_masked and tokenizer.mask_token_id is None:
        raise ConversionError(f"{type(model).__name__} predicts masked tokens, and its tokenizer has no mask token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    size = model.get_input_embeddings().get_parameter("weight").shape[0]
    order = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    batches: list[Batch] = []
    while not batches or (predicts_masked and len(batches) < count):
        for group in _groups(texts, batch_size, order):
            given = tokenizer(
                group,
                padding=True,
                truncation=True,
                max_length=max_length,
                return_tensors="pt",
                return_special_tokens_mask=predicts_masked,
            )
            inputs: dict[str, Tensor] = dict(given)
            if (highest := int(inputs["input_ids"].max())) >= size:
                raise ConversionError(f"the tokenizer gives the id {highest}, and the model has {size} tokens")
            batches.append(_masked(inputs, tokenizer.mask_token_id, generator) if predicts_masked else inputs)
    return batches


def _groups(texts: Sequence[str], batch_size: int, order: random.Random) -> list[list[str]]:
    """All texts in whole groups of about the same length, in random order."""
    shuffled = order.sample(texts, len(texts))
    groups: list[list[str]] = []
    for start in range(0, len(shuffled), SORTED_BATCHES * batch_size):
        part = sorted(shuffled[start : start + SORTED_BATCHES * batch_size], key=len)
        groups += [part[first : first + batch_size] for first in range(0, len(part) - batch_size + 1, batch_size)]
    order.shuffle(groups)
    return groups


def longest_input(model: PreTrainedModel) -> int | None:
    """Tokens that a model reads at most; None if nothing limits them."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is None:
        return None
    # Families like RoBERTa count positions from behind that of padding.
    table = next((m for name, m in model.named_modules() if name.endswith("position_embeddings")), None)
    offset = getattr(table, "padding_idx", None)
    return int(positions) - (0 if offset is None else int(offset) + 1)


def _masked(inputs: dict[str, Tensor], mask_token: int, generator: torch.Generator) -> dict[str, Tensor]:
    special = inputs.pop("special_tokens_mask").bool()
    tokens = inputs["input_ids"]
    masked = (torch.rand(tokens.shape, generator=generator) < MASKED) & ~special
    labels = tokens.masked_fill(~masked, -100)
    return {**inputs, "input_ids": tokens.masked_fill(masked, mask_token), "labels": labels}
