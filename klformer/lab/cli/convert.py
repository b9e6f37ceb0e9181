"""`klformer convert`: a trained softmax model in a folder becomes a linear one in another."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from pydantic import Field

from klformer.config import Config
from klformer.conversion import ConversionConfig, convert
from klformer.conversion.batches import MAX_HELD_OUT
from klformer.conversion.saving import CERTIFICATE
from klformer.errors import ArgumentError
from klformer.files import read_json, write_json
from klformer.lab.cli.command import plain_command
from klformer.lab.cli.texts import read_texts
from klformer.lab.report.certificate import write_certificate
from klformer.lab.runs.conversion import StageProgress, going_on, speed_beside

#: In the folder of the converted model, as long as it is not there.
STATE = "fit.safetensors"


class Files(Config):
    """What is read and written."""

    model: tyro.conf.Positional[Path]
    """Folder of the model and its tokenizer, as transformers or sentence-transformers writes it."""
    data: Path
    """Texts: a text file with one in each line, a csv, tsv, parquet or Arrow file, or a folder of these."""
    out: Path
    """Folder for the converted model; it must be new."""
    column: str = "text"
    """Column with the texts, of tables."""
    attention: str = "atoms-prf"
    """The attention to put in, with options after a colon, like atoms-prf:num_frequencies=256."""
    batch_size: int = Field(16, ge=1)
    """Texts in a batch."""
    max_length: int = Field(512, ge=1)
    """Tokens of a text that are used."""
    lengths: tuple[int, ...] = ()
    """Numbers of tokens at which time and memory are measured beside softmax."""


class Convert(ConversionConfig, Files):
    """Replace the softmax attention of a trained model of transformers by a kernel that is learned from it.

    The model keeps its weights; the kernels are fitted to its attention on your texts. Interrupted, the same command
    goes on. Examples:

      klformer convert bert --data reviews.txt --out bert-linear
      klformer convert bert --data reviews.csv --column review --out bert-linear --steps 500 --finetune-steps 500
    """


def run(options: Convert) -> None:
    """Load, convert, write, and say what came out."""
    try:
        from klformer.conversion.hf.inputs import cautions, load_teacher, longest_input, make_batches, split_texts
    except ImportError as error:
        raise ArgumentError(f"convert needs transformers: pip install 'klformer[hf]' ({error})") from error
    if (options.out / CERTIFICATE).exists():
        raise ArgumentError(f"{options.out} has a converted model already: give another --out")
    print(f"loading {options.model}", flush=True)
    model, tokenizer = load_teacher(options.model)
    longest = options.max_positions or longest_input(model) or options.max_length
    held_out, choosing, texts = split_texts(
        read_texts(options.data, options.column),
        count=options.all_steps + 2 * MAX_HELD_OUT,
        batch_size=options.batch_size,
        seed=options.seed,
    )
    batches_of = partial(
        make_batches,
        model=model,
        tokenizer=tokenizer,
        batch_size=options.batch_size,
        max_length=min(options.max_length, longest),
        seed=options.seed,
    )
    print(
        f"{type(model).__name__} from {options.model}; {len(texts):,} texts to learn, {len(choosing):,} to choose by, "
        f"{len(held_out):,} to measure by; tokenising them",
        flush=True,
    )
    evaluation = batches_of(held_out)
    notes = cautions(model, tokenizer, evaluation)
    for note in notes:
        print(f"Warning: {note}", file=sys.stderr)
    with going_on(options.out / STATE):
        conversion = convert(
            model,
            batches_of(texts, count=options.all_steps),
            evaluation=evaluation,
            choosing=batches_of(choosing),
            attention=options.attention,
            config=options,
            state_file=options.out / STATE,
            progress=StageProgress(),
        )
    notes += [f"teacher: {options.model}; texts: {options.data}, {len(held_out):,} of them to measure by"]
    if options.max_positions is None:  # or the teacher may not read them
        notes += [speed_beside(model, conversion.model, evaluation)]
    certificate = replace(conversion.certificate, notes=(*conversion.certificate.notes, *notes))
    conversion = replace(conversion, certificate=certificate)
    conversion.save(options.out, tokenizer=tokenizer)
    if options.lengths:
        _measure(options)
    print(certificate.table())
    print(f"the model, certificate.json and {write_certificate(options.out).name} are in {options.out}")


def _measure(options: Convert) -> None:
    """Add time and memory at several lengths to the certificate, each in a process of its own."""
    from klformer.conversion.hf.footprint import footprint

    rows: list[dict[str, Any]] = []
    for tokens in options.lengths:
        softmax, linear = footprint(options.model, tokens), footprint(options.out, tokens)
        seconds = "processor_seconds"
        print(
            f"{tokens:,} tokens: softmax {softmax[seconds]:.3f} s, linear {linear[seconds]:.3f} s of processors "
            f"({softmax[seconds] / linear[seconds]:.1f}x)"
        )
        rows.append({"tokens": tokens, **linear, **{f"teacher_{name}": value for name, value in softmax.items()}})
    file = options.out / CERTIFICATE
    write_json(file, read_json(file) | {"speed": rows})


COMMAND = plain_command(Convert, run)
