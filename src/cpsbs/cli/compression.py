"""Compressed input and output: ``.gz`` and ``.zst``, by the ending of a file's name."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import IO, Any, cast

from cpsbs.extras import required

CHUNK = 2**16
"""The number of compressed bytes that are read at a time."""

COMPRESSED = (".gz", ".zst")


def ending(file: Path) -> str:
    """Return the ending of a name in lower case, without that of the compression."""
    inner = Path(file.stem) if is_compressed(file) else file
    return inner.suffix.lower()


def is_compressed(file: Path) -> bool:
    """Return whether the name has the ending of a compressed file."""
    return file.suffix.lower() in COMPRESSED


def check_available(file: Path) -> None:
    """Raise an ImportError if the package that this file needs is missing."""
    if file.suffix.lower() == ".zst":
        _zstandard()


def decompressed(raw: IO[bytes], file: Path) -> IO[bytes]:
    """Return the content of an open file, decompressed if its name says so.

    Damaged content raises a ``ValueError`` when it is read.
    """
    if not is_compressed(file):
        return raw
    if file.suffix.lower() == ".gz":
        new: Callable[[], Any] = lambda: zlib.decompressobj(16 + zlib.MAX_WBITS)  # noqa: E731
    else:
        new = _zstandard_decompressor()
    return io.BufferedReader(cast(io.RawIOBase, _Decompressed(raw, new)), CHUNK)


def compressing(raw: IO[bytes], file: Path) -> IO[bytes]:
    """Return a file to write to; what is written goes compressed to ``raw``, which stays open.

    The same content gives the same bytes: neither time nor name are noted in the file.
    """
    if file.suffix.lower() == ".gz":
        return cast(IO[bytes], gzip.GzipFile("", "wb", fileobj=raw, mtime=0))
    library = _zstandard()
    if hasattr(library, "ZstdFile"):
        return cast(IO[bytes], library.ZstdFile(raw, "wb"))
    writer = library.ZstdCompressor().stream_writer(raw, closefd=False)
    return cast(IO[bytes], io.BufferedWriter(writer, CHUNK))


def _zstandard() -> Any:
    """Return Python's own module, which it has from version 3.14 on, or the package."""
    try:
        return import_module("compression.zstd")
    except ImportError:
        return required("zstandard", "zst")


def _zstandard_decompressor() -> Callable[[], Any]:
    """Return a function that makes an object to decompress one frame."""
    library = _zstandard()
    if hasattr(library, "ZstdFile"):
        return cast(Callable[[], Any], library.ZstdDecompressor)
    return cast(Callable[[], Any], library.ZstdDecompressor().decompressobj)


class _Decompressed(io.RawIOBase):
    """Decompresses one member or frame after another.

    The readers of gzip and zstandard would do, but for damaged files: each has errors of its own,
    and that of zstandard takes a file that was cut short for a complete one.
    """

    def __init__(self, raw: IO[bytes], new: Callable[[], Any]) -> None:
        self._raw, self._new = raw, new
        self._current: Any = None
        self._compressed, self._content = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            if not self._compressed:
                self._compressed = self._raw.read(CHUNK)
            if not self._compressed:
                if self._current is not None:
                    raise ValueError("its compressed content is cut short")
                return 0
            self._content = memoryview(self._decompress())
        count = min(len(buffer), len(self._content))
        buffer[:count], self._content = self._content[:count], self._content[count:]
        return count

    def _decompress(self) -> bytes:
        if self._current is None:
            self._compressed = self._compressed.lstrip(b"\0")  # some programs fill up with zeros
            if not self._compressed:
                return b""
            self._current = self._new()
        try:
            found: bytes = self._current.decompress(self._compressed)
        except Exception as error:  # each library has an error class of its own
            raise ValueError(f"its compressed content is damaged: {error}") from error
        self._compressed = b""
        if self._current.eof:
            self._compressed, self._current = self._current.unused_data, None
        return found
