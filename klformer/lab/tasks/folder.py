"""Your own images: a folder for each class, png or jpg, of any size; read as patches or as pixels.

    root/CLASS/*.png                                one set, which is split by itself
    root/{train,validation,test}/CLASS/*.jpg        sets of their own; validation and test may be missing

Images are brought to one square size. A patch is a vector of its brightnesses from -1 to 1; a pixel is a token from 0
to 255 in grey, and a vector of three in colour.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from klformer.errors import ArgumentError, DataError
from klformer.files import check_regular
from klformer.lab.data import Examples, InputShape, Sequences
from klformer.lab.data.sequences import AnyArray
from klformer.lab.tasks.base import InputChunk, Knowledge
from klformer.lab.tasks.config import DataConfig, Split
from klformer.lab.tasks.files import entries, is_folder, nothing_usable
from klformer.lab.tasks.inputs import chunks_of_images
from klformer.lab.tasks.own import LabelledTask, OwnFiles
from klformer.lab.tasks.presets import LAPTOP_OWN_DATA, Preset
from klformer.lab.tasks.targets import Classes

SUFFIXES = (".png", ".jpg", ".jpeg")
_LOOKED_FOR = ("CLASS/*.{png,jpg,jpeg}", "train/CLASS/*.{png,jpg,jpeg}")


class FolderData(DataConfig):
    """Where the images are, and what is made of them."""

    size: int = Field(32, ge=1)
    """Side of the square that every image is brought to, in pixels."""

    colour: bool = False
    """Three colours instead of grey."""

    patch: int = Field(4, ge=1)
    """Side of a patch; 1 for pixels."""

    @model_validator(mode="after")
    def _fits(self) -> "FolderData":
        if self.size % self.patch:
            raise ArgumentError(f"data.size must be a multiple of data.patch={self.patch}, got {self.size}")
        return self


class Folder(OwnFiles, LabelledTask):
    """Folders of images: each folder is a class.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> from klformer.lab.tasks import TASKS
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name, grey in (("day", 250), ("night", 5)):
        ...         (Path(folder) / name).mkdir()
        ...         for number in range(10):
        ...             Image.new("L", (40, 30), grey).save(Path(folder) / name / f"{number}.png")
        ...     task = TASKS["folder"](TASKS["folder"].data_config(root=folder, size=16, patch=4))
        ...     train = task.load("train")
        >>> task.class_names(), len(train)
        (('day', 'night'), 16)
        >>> train.first[0].shape  # 16 patches of 4 x 4 pixels
        (16, 16)
    """

    name: ClassVar[str] = "folder"
    title: ClassVar[str] = "Images"
    summary: ClassVar[str] = "your own images: a folder for each class, png or jpg of any size, as patches or pixels"
    presets: ClassVar[Mapping[str, Preset]] = MappingProxyType({"laptop": LAPTOP_OWN_DATA})
    data_config: ClassVar[type[DataConfig]] = FolderData
    row_column: ClassVar[tuple[str, type]] = ("file", str)
    #: Of the default size and patch; otherwise as many as there are.
    default_max_len: ClassVar[int] = 64

    config: FolderData

    def _set_up(self) -> None:
        super()._set_up()
        length = (self.config.size // self.config.patch) ** 2
        self.max_len = min(length, self.config.max_len or length)

    def location(self) -> str:
        return str(self.root) if self._has("train") else f"{self.root} (nothing found: {', '.join(_LOOKED_FOR)})"

    def detail(self) -> str:
        return self.root.name

    def learn(self) -> Knowledge:
        files = self._files("train")
        if not files:
            raise nothing_usable(self.root, _LOOKED_FOR)
        if len(files) < 2:
            only = ", ".join(files)
            raise DataError(f"must have two folders of images or more, one a class, got {only}", file=self.root)
        return {"targets": Classes({name: len(paths) for name, paths in files.items()}).as_json()}

    def shape(self) -> InputShape:
        if self._is_tokens():
            return InputShape(max_len=self.max_len, vocab_size=256)
        return InputShape(max_len=self.max_len, input_dim=self.config.patch**2 * (3 if self.config.colour else 1))

    def _has(self, part: Split) -> bool:
        return bool(self._files(part))

    def read(self, part: Split) -> Examples:
        rows, labels, files = [], [], self._files(part)
        if not files:
            raise nothing_usable(self.root, _LOOKED_FOR)
        for name, paths in files.items():
            if name not in (known := self.class_names() or ()):
                raise DataError(f"is no class of train; those are {', '.join(known)}", file=paths[0].parent)
            rows += [self._sequence(path) for path in paths]
            labels += [self.targets.encode(name)] * len(paths)
        return Examples(Sequences.from_matrix(np.stack(rows)), self.targets.as_array(labels))

    def read_inputs(self, path: Path, *, keep: Sequence[str], chunk: int) -> Iterator[InputChunk]:
        return chunks_of_images(path, keep, chunk, SUFFIXES, self._sequence)

    def _is_tokens(self) -> bool:
        return self.config.patch == 1 and not self.config.colour

    def _files(self, part: Split) -> dict[str, list[Path]]:
        """Return the images of a part by class; nothing if there are none."""
        has_parts = is_folder(self.root / "train")
        if not has_parts and part != "train":
            return {}
        folder = self.root / part if has_parts else self.root
        found = {}
        for entry in entries(folder):
            if is_folder(entry) and (images := [path for path in entries(entry) if _is_image(path)]):
                found[entry.name] = images
        return found

    def _sequence(self, path: Path) -> AnyArray:
        """Read an image as tokens (length,), or as vectors (length, width)."""
        pixels = read_image(path, self.config.size, colour=self.config.colour)
        if self._is_tokens():
            return pixels.reshape(-1)[: self.max_len]
        side, patch = self.config.size // self.config.patch, self.config.patch
        patches = pixels.reshape(side, patch, side, patch, -1).swapaxes(1, 2).reshape(side * side, -1)
        # Half precision tells 256 brightnesses apart, and takes half of the memory.
        return (patches[: self.max_len] / 127.5 - 1).astype(np.float16)


def read_image(path: Path, size: int, *, colour: bool) -> NDArray[np.uint8]:
    """Read an image as a square: (size, size), or (size, size, 3) in colour."""
    # Imported here: only images in files need it.
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(check_regular(path)) as opened:
            image: Any = ImageOps.exif_transpose(opened)
            if image.mode.startswith("I;16"):  # 16 bits a pixel, which Pillow would cut at 255
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            image = image.convert("RGB" if colour else "L")
            if image.size != (size, size):
                image = image.resize((size, size), Image.Resampling.BOX if min(image.size) >= size else None)
            return np.asarray(image)
    except FileNotFoundError as error:
        raise DataError("the file is missing", file=path) from error
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"is not a whole png or jpg image: {error}", file=path) from error


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES
