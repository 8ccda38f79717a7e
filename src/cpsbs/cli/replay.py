"""Reads the results of an earlier run from a partial file, window by window."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from cpsbs.cli.source import Window
from cpsbs.cli.stored import LONGEST, OtherInputError, checked_number, parsed


class Replay:
    """The results in a partial file, read once and in their order.

    Args:
        stored: the partial file, which is closed by ``close``.
        path: its path, for messages.
        begin: where its results begin.
    """

    def __init__(self, stored: IO[bytes], path: Path, begin: int) -> None:
        self._stored, self._path, self._end = stored, path, begin
        self._lines = 1  # the one about the job
        stored.seek(begin)

    def window(
        self, window: Window, mark: str, seen: Callable[[dict[str, Any]], None] | None
    ) -> set[int]:
        """Return the numbers of the results of a window, which are passed to ``seen``.

        Results of the next window can only follow after all of this one.
        """
        done: set[int] = set()
        usable = set(window.numbers)
        while len(done) < len(usable) and (line := self._next()):
            try:
                record = parsed(line)
                number = checked_number(record, mark)
                if number not in usable:
                    raise ValueError("has the number of no text")
                if number in done:
                    raise ValueError(f"is another result of text {number + 1}")
            except OtherInputError as error:
                raise ValueError(
                    f"{self._path} was written by this command for another input: the first "
                    f"{window.end} texts or their references were others. Give the same input to "
                    "resume it, or delete it"
                ) from error
            except ValueError as error:
                raise self._wrong(error) from error
            if seen is not None:
                seen(record)
            done.add(number)
        return done

    def end(self) -> int:
        """Return where the last result ends, after which there may only be half a line."""
        if self._next():
            raise self._wrong(ValueError("has the number of no text"))
        return self._end

    def close(self) -> None:
        """Close the file."""
        self._stored.close()

    def _next(self) -> bytes:
        """Return the next line, or nothing if a crash cut it short or it is not there."""
        line = self._stored.readline(LONGEST + 1)
        if not line.endswith(b"\n") and len(line) <= LONGEST:
            return b""
        self._end += len(line)
        self._lines += 1
        return line

    def _wrong(self, error: ValueError) -> ValueError:
        return ValueError(
            f"{self._path}: line {self._lines} {error}. Remove this line to compute its text "
            "again, or delete the file to start over"
        )
