"""Retrieval of Long Range Arena: does one paper cite the other? Two texts of up to 4,000 bytes; id = byte + 1.

Read from `new_aan_pairs.{train,eval,test}.tsv`: label, two ids and two texts, separated by tabs, without a header and
without quoting.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal

import numpy as np

from klformer.errors import DataError
from klformer.lab.data.sequences import ByteRows, Examples, Sequences
from klformer.lab.tasks.base import InputChunk, Task
from klformer.lab.tasks.config import Split
from klformer.lab.tasks.files import first_existing, parse_label, read_tabbed
from klformer.lab.tasks.inputs import chunks_of_rows, rows_of_texts
from klformer.lab.tasks.presets import PAPER_OPTIMISER, Preset, lra_presets, paper_attention

FILES: dict[Split, str] = {
    "train": "new_aan_pairs.train.tsv",
    "validation": "new_aan_pairs.eval.tsv",
    "test": "new_aan_pairs.test.tsv",
}
#: Where the LRA archive puts them, below the folder that it is unpacked in.
_FOLDERS = ("lra_release/lra_release/tsv_data", "lra_release/tsv_data", "tsv_data", ".")


PRESETS = lra_presets(
    paper={
        # The classifier has 512 and 256 hidden units.
        "model": {
            "num_layers": 4, "num_heads": 4, "model_dim": 128, "head_dim": 32, "ffn_dim": 512, "head_hidden_dim": 512,
            "dropout": 0.1, "positions": "sinusoidal",
        },
        "optimiser": {**PAPER_OPTIMISER, "learning_rate": 5e-2},
        "schedule": {"kind": "rsqrt", "warmup_steps": 8000},
        "training": {"batch_size": 32, "max_steps": 5_000},
        "attention": paper_attention(
            gmm_rks=64, fastfood_rks=32, generative_rks=128, gmm_prf=128, fastfood_prf=32, generative_prf=64,
        ),
    },
    laptop={
        # One layer, a convolution over neighbours and the mean of all positions, as for Text; the difference of the
        # papers, without which nothing is learned; and large batches, with which it is learned
        # sooner.
        "data": {"max_len": 256, "train_limit": 16_000, "validation_limit": 1_000, "test_limit": 2_000},
        "model": {"pair_features": "difference", "positions": "learned"},
        "schedule": {"warmup_steps": 20},
        "training": {"batch_size": 64, "max_steps": 200, "evaluate_every": 100, "checkpoint_every": 100},
    },
    workstation={
        "optimiser": {"learning_rate": 4e-3},
        "training": {"batch_size": 16, "max_steps": 1_200, "evaluate_every": 120},
    },
)  # fmt: skip


class Retrieval(Task):
    """Pairs of papers, two classes. The official validation file is used by both protocols.

    A pair may have an empty text, as papers without one are in the corpus; all of its positions are padding.
    `read_inputs` reads pairs of texts in two columns, `text1` and `text2`.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from klformer.lab.tasks import TASKS
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "new_aan_pairs.train.tsv"
        ...     _ = file.write_text("1.0\\tA1\\tA2\\tOn kernels.\\tMore on kernels.\\n")
        ...     task = TASKS["retrieval"](TASKS["retrieval"].data_config(root=folder))
        ...     train = task.load("train")
        >>> train.first.lengths, train.second.lengths, train.targets  # in bytes
        (array([11]), array([16]), array([1]))
    """

    name: ClassVar[str] = "retrieval"
    title: ClassVar[str] = "Retrieval"
    summary: ClassVar[str] = "does one paper cite the other (AAN), from up to 4,000 bytes of each"
    num_classes: int = 2
    chance: ClassVar[float | None] = 0.5
    presets: ClassVar[Mapping[str, Preset]] = PRESETS
    vocab_size: int | None = 257
    is_pair: ClassVar[bool] = True
    default_max_len: ClassVar[int] = 4_000
    official_sizes = MappingProxyType({"train": 147_086, "validation": 18_090, "test": 17_437})

    def location(self) -> str:
        folder = self._found()
        return str(folder) if folder else f"{self.root} (nothing found: {FILES['train']} in {', '.join(_FOLDERS)})"

    def validation_source(self) -> Literal["file", "train", "test"]:
        return "file"

    def _found(self) -> Path | None:
        path = first_existing(self.root / folder / name for folder in _FOLDERS for name in FILES.values())
        return path.parent if path else None

    def read(self, part: Split) -> Examples:
        folder = self._found()
        if folder is None:
            raise DataError(
                f"no {FILES[part]} in any of {', '.join(_FOLDERS)}; unpack the archive of Long Range Arena here",
                file=self.root,
            )
        return read_pairs(folder / FILES[part], self.max_len)

    def read_inputs(self, path: Path, *, keep: Sequence[str], chunk: int) -> Iterator[InputChunk]:
        rows = rows_of_texts(path, ["text1", "text2"], keep, lambda _, text: text.encode()[: self.max_len])

        def sides(cells: list[list[bytes]]) -> tuple[Sequences, Sequences]:
            first, second = (ByteRows.of(side).plus_one() for side in zip(*cells, strict=True))
            return first, second

        return chunks_of_rows(rows, chunk, sides)


def read_pairs(path: Path, max_len: int) -> Examples:
    """Read a file of pairs."""
    first, second, labels = ByteRows(), ByteRows(), []
    for number, fields in read_tabbed(path, ("label", "id", "id", "text", "text")):
        labels.append(parse_label(fields[0].decode("latin-1"), 2, file=path, line=number))
        first.add(fields[3][:max_len])
        second.add(fields[4][:max_len])
    if not labels:
        raise DataError("has no rows", file=path)
    return Examples(first.plus_one(), np.asarray(labels, np.int64), second.plus_one())
