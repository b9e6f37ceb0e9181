"""Token ids on disk, mapped into memory: a corpus may be larger than memory, and is tokenised once.

    <folder>/<fingerprint>.arrow     one column `ids`, in one piece: a stream of Arrow, as `datasets` reads them

A file is named by the fingerprint of what it was made from, written to a temporary name, synced and renamed: it is
whole or not there, and two processes that make the same one do no harm.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from klformer.errors import FileError
from klformer.files import replacing
from klformer.lab.data.sequences import AnyArray
from klformer.memory import release

#: Bytes that are written, and in memory, at a time.
_PIECE = 1 << 24


class TokenStore:
    """A folder of token ids."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, fingerprint: str, make: Iterable[AnyArray], *, vocab_size: int) -> AnyArray:
        """Return the ids (total,) of a fingerprint, mapped from disk; made and written first if they are not there."""
        path = self.folder / f"{fingerprint}.arrow"
        if not path.exists():
            self._write(path, make, np.dtype(np.uint16) if vocab_size <= 1 << 16 else np.dtype(np.int32))
        return self._map(path)

    def _write(self, path: Path, make: Iterable[AnyArray], dtype: np.dtype[Any]) -> None:
        # Imported here: it takes half a second, and only corpora need it.
        import pyarrow as pa  # type: ignore[import-untyped]

        with replacing(path) as temporary:
            raw = temporary.with_suffix(".raw")
            try:
                # One piece of unknown length: plain numbers first, which are then mapped and copied by Arrow.
                with raw.open("wb") as file:
                    for ids in make:
                        ids.astype(dtype).tofile(file)
                size = raw.stat().st_size // dtype.itemsize
                ids = np.memmap(raw, dtype, mode="r", shape=(size,)) if size else np.zeros(0, dtype)
                schema = pa.schema([("ids", pa.from_numpy_dtype(dtype))])
                with temporary.open("wb") as file:
                    sink = pa.PythonFile(_PieceByPiece(file, ids), mode="w")
                    with pa.ipc.new_stream(sink, schema) as writer:
                        writer.write_batch(pa.record_batch([pa.array(ids)], schema=schema))
                del ids
            finally:
                raw.unlink(missing_ok=True)

    @staticmethod
    def _map(path: Path) -> AnyArray:
        import pyarrow as pa

        try:
            with pa.memory_map(str(path)) as source:
                start = source.read_buffer(1).address
                source.seek(0)
                column = pa.ipc.open_stream(source).read_next_batch().column(0)
                dtype, size = np.dtype(column.type.to_pandas_dtype()), len(column)
                offset = column.buffers()[1].address - start
        except (pa.ArrowException, OSError, StopIteration) as error:
            raise FileError(f"{path} is damaged: {error}; delete it and it is made again") from error
        # Mapped by numpy, whose pages can be let go of (klformer.memory.release), at the place where Arrow has them.
        return np.memmap(path, dtype, mode="r", offset=offset, shape=(size,)) if size else np.zeros(0, dtype)


class _PieceByPiece:
    """A file to which one large buffer is written without ever being in memory as a whole."""

    def __init__(self, file: BinaryIO, source: AnyArray) -> None:
        self._file = file
        self._source = source

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        for start in range(0, len(view), _PIECE):
            self._file.write(view[start : start + _PIECE])
            release(self._source)
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        """Do nothing: whoever opened the file closes it."""
