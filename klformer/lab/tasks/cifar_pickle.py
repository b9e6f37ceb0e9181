"""The python batches of CIFAR-10, which are pickles, read without letting them run anything.

A pickle can name any function for the reader to call. This reader knows only the names by which arrays of numpy are
stored, and takes them for classes that remember what they were given and do nothing with it.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from klformer.errors import ArgumentError, DataError
from klformer.lab.tasks.files import reading


class _StoredDtype:
    def __init__(self, name: Any, *flags: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like; bytes have none."""


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
    """How Python 3 stores bytes in old pickles."""
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
    """The data, (N, 3072), and the labels of a batch."""
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
