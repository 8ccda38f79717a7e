"""Holds the texts of a command, a window at a time, and tells which of them the model can take."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from cpsbs.cli.inputs import Line, Lines, read_prompt, refuse_texts
from cpsbs.cli.terminal import print_message
from cpsbs.text import Prompt, TextModel
from cpsbs.windows import windows

REPORTED = 20
"""The maximal number of skipped lines that are reported one by one; all are counted."""


@dataclass(frozen=True)
class Window:
    """Texts that are held in memory and sorted by length together."""

    first: int
    """The number of its first text, counted from 0."""
    end: int
    """The number of the text after its last one."""
    numbers: list[int]
    """The numbers of the texts that the model can take, in their order."""
    digest: str
    """A hash of all texts and references of the input up to the end of the window."""


@dataclass(frozen=True)
class Batch:
    """Texts that are computed together; it holds all that a worker elsewhere needs to know."""

    numbers: list[int]
    """The numbers of the texts, which select their random streams."""
    texts: list[str]
    prompts: list[Prompt]
    """What the texts stand for."""
    references: list[str] | None = None

    @staticmethod
    def alone(text: str, reference: str | None = None) -> Batch:
        """Return a batch of one text."""
        return Batch([0], [text], [text], None if reference is None else [reference])


class Source:
    """The texts of a command, with what they stand for and their references, by their numbers.

    Only the windows that are being worked on are held.

    Args:
        lines: the texts.
        references: the references, if there are any.
        chat: whether texts are conversations.
        skip: whether to skip texts that the model cannot take, instead of refusing them.
        decisive: whether results depend on the references.

    Attributes:
        texts: the texts of these windows.
        prompts: what they stand for.
        references: their references, or None if there are none.
        count: the number of texts that were read.
        skipped: the number of texts that were skipped.
        usable: the number of texts that were not.
    """

    def __init__(
        self,
        lines: Lines,
        references: Lines | None = None,
        chat: bool = False,
        skip: bool = False,
        decisive: bool = True,
    ) -> None:
        self.texts: dict[int, str] = {}
        self.prompts: dict[int, Prompt] = {}
        self.references: dict[int, str] | None = None if references is None else {}
        self.count = self.skipped = self.usable = 0
        self._lines, self._of_references = lines, references
        self._chat, self._skip, self._decisive = chat, skip, decisive
        self._digest = hashlib.sha256()
        self._first_skipped = ""
        self._unreported: list[str] = []

    @property
    def given(self) -> int | None:
        """The number of texts, if they are arguments of the command."""
        return None if self._lines.given is None else len(self._lines.given)

    @property
    def total(self) -> int | None:
        """The number of texts, exactly or nearly, or None if it is not known."""
        return self._lines.total(self.count)

    def windows(
        self, model: TextModel, max_length: int, first_size: int, most: int
    ) -> Iterator[Window]:
        """Read one window after another, each when it is asked for.

        Args:
            model: tells which texts it can take.
            max_length: the largest number of new tokens.
            first_size: the number of texts of the first window.
            most: the largest number of texts of a window.

        Raises:
            ValueError: if a text cannot be used and is not to be skipped, or all texts are to be.
        """
        for lines in windows(self._lines.found, first_size, most):
            first, self.count = self.count, self.count + len(lines)
            unusable = self._hold(first, lines)
            held = [i for i in range(first, self.count) if i in self.texts]
            unusable |= self._refused(model, held, max_length)
            if not self._skip:
                left = f"nothing of texts {first + 1} to {self.count} was computed"
                refuse_texts(unusable, **({"left": left} if first else {}))
            numbers = [i for i in held if i not in unusable]
            self.usable += len(numbers)
            self._report(dict(sorted(unusable.items())))
            window = Window(first, self.count, numbers, self._digest.hexdigest()[:16])
            if numbers:
                yield window
            else:
                self.release(window)
        self._check_ends()

    def batch(self, numbers: list[int]) -> Batch:
        """Return the texts with these numbers, which must be held."""
        return Batch(
            numbers,
            [self.texts[i] for i in numbers],
            [self.prompts[i] for i in numbers],
            None if self.references is None else [self.references[i] for i in numbers],
        )

    def release(self, window: Window) -> None:
        """Forget the texts of a window."""
        for number in range(window.first, window.end):
            self.texts.pop(number, None)
            self.prompts.pop(number, None)
            if self.references is not None:
                self.references.pop(number, None)

    def skipped_lines(self) -> str | None:
        """Return a sentence on the lines that were skipped, or None if there are none."""
        if not self.skipped:
            return None
        return f"{self.skipped} of {self.count} lines were skipped; {self._first_skipped}"

    def _hold(self, first: int, lines: list[Line]) -> dict[int, str]:
        """Hold some texts, and return what is wrong with those that are none."""
        references = self._next_references(first, len(lines))
        unusable = {}
        for number, line in enumerate(lines, first):
            reference = None if references is None else references[number - first]
            told = [str(line), reference if self._decisive else None]
            self._digest.update(json.dumps(told).encode() + b"\n")
            try:
                if isinstance(line, ValueError):
                    raise line
                prompt = read_prompt(number, line, self._chat)
            except ValueError as error:
                if not self._skip:
                    raise
                unusable[number] = f"cannot be read: {error}"
                continue
            self.texts[number], self.prompts[number] = line, prompt
            if self.references is not None and reference is not None:
                self.references[number] = reference
        return unusable

    def _refused(self, model: TextModel, numbers: list[int], max_length: int) -> dict[int, str]:
        """Return what is wrong with the texts that the model cannot take."""
        try:
            found = model.unusable([self.prompts[i] for i in numbers], max_length)
        except ValueError:
            # One by one, to tell which conversation it is that the chat template refuses.
            refused: dict[int, str] = {}
            for i in numbers:
                try:
                    found = model.unusable([self.prompts[i]], max_length)
                except ValueError as error:
                    reason = str(error).replace("texts[0]", f"texts[{i}]")
                    if not self._skip:
                        raise ValueError(reason) from error
                    found = {0: f"cannot be used: {reason}"}
                if found:
                    refused[i] = found[0]
            return refused
        return {numbers[i]: reason for i, reason in found.items()}

    def _next_references(self, first: int, count: int) -> list[str] | None:
        if self._of_references is None:
            return None
        found = [str(reference) for reference in islice(self._of_references.found, count)]
        if len(found) < count:
            raise ValueError(
                f"there are {first + len(found)} references for more texts; give one per text"
            )
        return found

    def _check_ends(self) -> None:
        if self._of_references is not None and next(self._of_references.found, None) is not None:
            raise ValueError(
                f"there are more than {self.count} references for {self.count} texts; give one "
                "per text"
            )
        if not self.usable:
            self.skipped = 0
            number_and_reason = self._first_skipped.removeprefix("line ")
            raise ValueError(
                f"text {number_and_reason}; nothing was computed. --skip leaves no line; fix one "
                "of them"
            )

    def _report(self, unusable: dict[int, str]) -> None:
        """Report skipped lines as they come, once there is a line that is not skipped."""
        for number, reason in unusable.items():
            self.skipped += 1
            line = f"line {number + 1} {reason}"
            self._first_skipped = self._first_skipped or line
            if self.skipped <= REPORTED:
                self._unreported.append(f"{line}; it is skipped")
            elif self.skipped == REPORTED + 1:
                self._unreported.append("further lines that are skipped are counted only")
        if self.usable:
            for message in self._unreported:
                print_message("note", message)
            self._unreported.clear()
