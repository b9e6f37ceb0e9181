"""Image of Long Range Arena: CIFAR-10 in grey, read as a sequence of 1,024 pixels; id = brightness.

Its pickles are read by an unpickler that makes nothing but the arrays of such a batch: a pickle can run any code.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from klformer.errors import ArgumentError, DataError
from klformer.files import check_regular
from klformer.lab.data.sequences import Examples, Sequences
from klformer.lab.tasks.base import InputChunk, Task
from klformer.lab.tasks.config import Split
from klformer.lab.tasks.files import Source, entries, exists, hub_or_nothing, is_folder, reading
from klformer.lab.tasks.inputs import chunks_of_images
from klformer.lab.tasks.presets import ANY, LAPTOP_ATTENTION, PAPER_OPTIMISER, Preset, lra_presets, paper_attention


class _StoredDtype:
    def __init__(self, name: Any, *flags: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and the like; bytes have none."""


class _StoredArray:
    def __init__(self, *arguments: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> NDArray[np.uint8]:
        """Raises ValueError unless it is an array of bytes in C or Fortran order."""
        try:
            _, shape, dtype, is_fortran, content = self.state
        except (TypeError, ValueError) as error:
            raise ArgumentError("the array has no state") from error
        if getattr(dtype, "name", None) not in ("u1", b"u1") or not isinstance(content, bytes):
            raise ArgumentError("the array must hold bytes (uint8)")
        return np.frombuffer(content, np.uint8).reshape(shape, order="F" if is_fortran else "C")


def _encode(text: str, encoding: str) -> bytes:
    """Undo how Python 3 stores bytes in old pickles."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes encoded as {encoding!r}")
    return text.encode("latin-1")


class _BatchUnpickler(pickle.Unpickler):
    _ALLOWED: dict[tuple[str, str], Any] = {  # noqa: RUF012 - never changed
        ("numpy.core.multiarray", "_reconstruct"): _StoredArray,
        ("numpy._core.multiarray", "_reconstruct"): _StoredArray,
        ("numpy", "ndarray"): _StoredArray,
        ("numpy", "dtype"): _StoredDtype,
        ("_codecs", "encode"): _encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch of CIFAR-10 needs")
        return self._ALLOWED[module, name]


def read_python_batch(path: Path) -> tuple[NDArray[np.uint8], list[Any]]:
    """Read the data, (N, 3072), and the labels of a batch."""
    with reading(path), path.open("rb") as file:
        try:
            batch = _BatchUnpickler(file, encoding="bytes").load()
            data, labels = batch[b"data"].array(), list(batch[b"labels"])
        except OSError:
            raise
        except Exception as error:
            # A damaged pickle makes the unpickler raise nearly anything.
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"is not a python batch of CIFAR-10: {reason}", file=path) from error
    return data, labels


_HUB_NAME = "uoft-cs/cifar10"
_LOOKED_FOR = ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar10_gray/*.npy", "{train,test}/CLASS/*.png")
_SIDE = 32
_PIXELS = _SIDE * _SIDE
_NUM_CLASSES = 10
_BATCHES: dict[str, list[str]] = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]


def to_grey(rgb: Pixels) -> Pixels:
    """Compute 0.2989 R + 0.5870 G + 0.1140 B as whole numbers, (..., 3) -> (...).

    In the arithmetic of tf.image.rgb_to_grayscale, which LRA uses: to [0, 1], and back by 255.5, cut to whole numbers.
    """
    weights = np.array([0.2989, 0.5870, 0.1140], np.float32)
    grey = (rgb.astype(np.float32) * np.float32(1 / 255)) @ weights
    return (grey * np.float32(255.5)).astype(np.uint8)


def read_batches(folder: Path, part: Split) -> tuple[Pixels, Labels]:
    """Read the official files: python batches, or binary ones (one byte of label and 3,072 of pixels an image)."""
    is_binary = not any(exists(folder / name) for names in _BATCHES.values() for name in names)
    pixels: list[Pixels] = []
    labels: list[Labels] = []
    for name in _BATCHES[part]:
        path = folder / (f"{name}.bin" if is_binary else name)
        planes, batch_labels = _read_binary_batch(path) if is_binary else read_python_batch(path)
        if planes.ndim != 2 or planes.shape[1] != 3 * _PIXELS or not len(planes) == len(batch_labels) > 0:
            raise DataError(
                f"must have a label and {3 * _PIXELS} bytes for every image, got data of shape {planes.shape} and "
                f"{len(batch_labels)} labels",
                file=path,
            )
        if pixels and len(planes) != len(pixels[0]):
            raise DataError(f"has {len(planes)} images where the first batch has {len(pixels[0])}", file=path)
        pixels.append(to_grey(planes.reshape(-1, 3, _PIXELS).transpose(0, 2, 1)))
        labels.append(_checked(batch_labels, path))
    return np.concatenate(pixels), np.concatenate(labels)


def _read_binary_batch(path: Path) -> tuple[Pixels, Pixels]:
    record = 1 + 3 * _PIXELS
    with reading(path):
        content = np.fromfile(path, np.uint8)
    if content.size == 0 or content.size % record:
        raise DataError(f"has {content.size} bytes, which is no multiple of {record}: the file is cut", file=path)
    rows = content.reshape(-1, record)
    return rows[:, 1:], rows[:, 0]


def read_arrays(folder: Path, part: Split) -> tuple[Pixels, Labels]:
    """Read `{train,test}_{x,y}.npy`: grey images (N, 32, 32) and labels (N,), both uint8."""
    path = folder / f"{part}_x.npy"
    images, labels = _read_array(path), _read_array(folder / f"{part}_y.npy")
    if images.dtype != np.uint8 or images.shape[1:] != (_SIDE, _SIDE) or labels.shape != images.shape[:1]:
        raise DataError(
            f"must be uint8 (N, 32, 32) with N labels, got {images.dtype} {images.shape} and {labels.shape}", file=path
        )
    if not len(images):
        raise DataError("has no images", file=path)
    return images.reshape(-1, _PIXELS), _checked(labels, path)


def _read_array(path: Path) -> NDArray[Any]:
    with reading(path):
        try:
            array: NDArray[Any] = np.load(path, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise DataError(f"is not a whole numpy array: {error}", file=path) from error
    return array


def read_png_folders(folder: Path, part: Split) -> tuple[Pixels, Labels]:
    """Read `{train,test}/CLASS/*.png`: ten folders of images, of the same names in both, classes in their order."""
    # A class has one number in train and test: the names must be the same.
    train, test = (_class_folders(folder / name) for name in ("train", "test"))
    if train != test:
        missing, extra = (", ".join(sorted(names)) for names in (set(train) - set(test), set(test) - set(train)))
        raise DataError(
            f"must hold folders of the same names as train; missing: {missing}; extra: {extra}", file=folder / "test"
        )
    pixels, labels = [], []
    for label, name in enumerate(train):
        paths = _pngs(folder / part / name)
        if not paths:
            raise DataError("has no images (*.png)", file=folder / part / name)
        pixels += [read_png(path) for path in paths]
        labels += [label] * len(paths)
    return np.stack(pixels), np.asarray(labels, np.int64)


def _class_folders(folder: Path) -> list[str]:
    names = [path.name for path in entries(folder) if is_folder(path)]
    if len(names) != _NUM_CLASSES:
        raise DataError(f"must hold {_NUM_CLASSES} folders, one a class, got {len(names)}", file=folder)
    return names


def read_png(path: Path) -> Pixels:
    """Read the pixels of a file, in grey."""
    # Imported here: only images in files need it.
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(check_regular(path)) as image:
            rgb = np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise DataError(f"is not a whole png image: {error}", file=path) from error
    if rgb.shape != (_SIDE, _SIDE, 3):
        raise DataError(f"must be {_SIDE} x {_SIDE} pixels, got {rgb.shape[1]} x {rgb.shape[0]}", file=path)
    return to_grey(rgb).reshape(_PIXELS)


PRESETS = lra_presets(
    paper={
        "model": {
            "num_layers": 1, "num_heads": 8, "model_dim": 128, "head_dim": 8, "ffn_dim": 128, "head_hidden_dim": 128,
            "dropout": 0.3, "positions": "learned",
        },
        "optimiser": {**PAPER_OPTIMISER, "learning_rate": 5e-4, "weight_decay": 0.0},
        "schedule": {"kind": "cosine", "warmup_steps": 175},
        "training": {"batch_size": 256, "max_epochs": 200},
        "attention": paper_attention(
            gmm_rks=128, fastfood_rks=8, generative_rks=128, gmm_prf=128, fastfood_prf=8, generative_prf=8,
        ),
    },
    laptop={
        # Small, and with positions that need not be learned: pixels are many, and width matters less than steps. Grey
        # values are amounts and start so, and the convolution reaches one row up and one down: with both all attentions
        # learn much sooner.
        "data": {"train_limit": 10_000, "validation_limit": 500, "test_limit": 2_000},
        "model": {
            "model_dim": 32, "head_dim": 8, "positions": "sinusoidal", "convolution_width": 65,
            "token_start": "ordered",
        },
        "optimiser": {"weight_decay": 0.0},
        "schedule": {"warmup_steps": 50},
        "training": {"batch_size": 16, "max_steps": 300, "evaluate_every": 150, "checkpoint_every": 150},
        # Four for each dimension of a head, as in the other tasks.
        "attention": {ANY: {"num_frequencies": 32}},
    },
    workstation={
        "model": {"model_dim": 64, "head_dim": 16},
        "optimiser": {"learning_rate": 4e-3},
        "training": {"batch_size": 32, "max_steps": 4_000, "evaluate_every": 400},
        "attention": LAPTOP_ATTENTION,
    },
)  # fmt: skip


class Image(Task):
    """CIFAR-10, ten classes.

    Read from the official batches (python or binary), from arrays or from a folder of png images, each in the root or
    the root itself; where no root is given, else from the hub. No validation set comes with it: a random tenth of train
    is held out under "lra" (45,000 and 5,000), and `holdout_fraction` of it under "holdout".

    `read_inputs` reads png images of 32 x 32 pixels.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import numpy as np
        >>> from klformer.lab.tasks import TASKS
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for part, size in (("train", 40), ("test", 10)):
        ...         np.save(Path(folder) / f"{part}_x.npy", np.zeros((size, 32, 32), np.uint8))
        ...         np.save(Path(folder) / f"{part}_y.npy", np.arange(size) % 10)
        ...     task = TASKS["image"](TASKS["image"].data_config(root=folder))
        ...     sizes = len(task.load("train")), len(task.load("validation")), len(task.load("test"))
        >>> sizes, task.shape().vocab_size, task.max_len
        ((36, 4, 10), 256, 1024)
    """

    name: ClassVar[str] = "image"
    title: ClassVar[str] = "Image"
    summary: ClassVar[str] = "class of a grey CIFAR-10 image from its 1,024 pixels"
    num_classes: int = _NUM_CLASSES
    chance: ClassVar[float | None] = 0.1
    presets: ClassVar[Mapping[str, Preset]] = PRESETS
    vocab_size: int | None = 256
    default_max_len: ClassVar[int] = _PIXELS
    row_column: ClassVar[tuple[str, type]] = ("file", str)
    official_sizes = MappingProxyType({"train": 50_000, "test": 10_000})

    def location(self) -> str:
        return self._source().where

    def validation_source(self) -> Literal["file", "train", "test"]:
        return "train"

    def _holdout_fraction(self) -> float:
        return 0.1 if self.config.protocol == "lra" else super()._holdout_fraction()

    def read(self, part: Split) -> Examples:
        return self._source().read(part)

    def _source(self) -> Source:
        names = [f"{name}{suffix}" for name in ("data_batch_1", "test_batch") for suffix in ("", ".bin")]
        for folder in (self.root / "cifar-10-batches-py", self.root / "cifar-10-batches-bin", self.root):
            if any(exists(folder / name) for name in names):
                return self._files(folder, read_batches)
        for folder in (self.root / "cifar10_gray", self.root):
            if exists(folder / "train_x.npy") or exists(folder / "test_x.npy"):
                return self._files(folder, read_arrays)
        for folder in (self.root / "cifar10", self.root):
            if any(_pngs(path) for part in ("train", "test") for path in entries(folder / part)):
                return self._files(folder, read_png_folders)
        return hub_or_nothing(self.config, _HUB_NAME, _LOOKED_FOR, self._of_hub)

    def _files(self, folder: Path, read: Callable[[Path, Split], tuple[Pixels, Labels]]) -> Source:
        return Source(str(folder), lambda part: self._examples(*read(folder, part)))

    def _of_hub(self, rows: Any) -> Examples:
        pixels = [to_grey(np.asarray(image.convert("RGB"))).reshape(_PIXELS) for image in rows["img"]]
        return self._examples(np.stack(pixels), np.asarray(rows["label"], np.int64))

    def _examples(self, pixels: Pixels, labels: Labels) -> Examples:
        return Examples(Sequences.from_matrix(np.ascontiguousarray(pixels[:, : self.max_len])), labels)

    def read_inputs(self, path: Path, *, keep: Sequence[str], chunk: int) -> Iterator[InputChunk]:
        return chunks_of_images(path, keep, chunk, (".png",), lambda one: read_png(one)[: self.max_len])


def _pngs(folder: Path) -> list[Path]:
    return [path for path in entries(folder) if path.suffix == ".png"]


def _checked(labels: Sequence[Any] | NDArray[Any], path: Path) -> Labels:
    """Return labels as int64. Raises DataError if one is not a whole number from 0 to 9."""
    for index, label in enumerate(labels):
        if not isinstance(label, (int, np.integer)) or not 0 <= label < _NUM_CLASSES:
            raise DataError(
                f"image {index} has the label {label!r}, which must be a whole number from 0 to 9", file=path
            )
    return np.asarray(labels, np.int64)
