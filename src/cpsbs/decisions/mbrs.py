"""Writes decisions as files for the package ``mbrs``, which then decides again by its own metrics.

``mbrs-decode`` reads *hypotheses*, *references* and the log-probabilities of the references, a line
for each. With v the log-probabilities of the references y of a source, it chooses

    argmax_c Σ_y softmax(v)(y) u(c, y) .

For v = log w, where w are the weights of our evidence, that is Σ w(y) u(c, y) / Σ w(y), the
normalised estimate of the expected utility, whose argmax is ours. What its file format asks for, as
read in version 0.1.8:

* Every source has the same number of hypotheses, and of references. Hypotheses are filled up with
  the chosen one again; references with one of log-probability −∞, which has the weight zero.
* White space around a text is removed. Texts that are equal without it are written once.
* Of references with equal text *and* equal log-probability it keeps one alone, so that repeated
  samples would lose their weight. Here every text comes once, with the weights of all that spell it
  together.
* Of candidates that are equally good it chooses any, by ``torch.topk``. Those that are tied with
  ours are therefore left out if it has the same utility; as a rule they differ in nothing but white
  space. The chosen candidate comes first.

It computes in float32: a lead of less than some 1e-7 of the utility may be lost to rounding.
"""

from __future__ import annotations

import math
import os
import secrets
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TIED = 1e-12
"""Leads that are smaller than this, relative to the utility, are nothing but rounding."""

METRICS = {"chrF": "chrf", "BLEU": "bleu"}
"""The names that our utilities have in ``mbrs``, whose values are 100 times ours."""


@dataclass(frozen=True)
class Choice:
    """The candidates and the evidence of one source."""

    candidates: Sequence[str]
    """The candidates, the chosen one first."""
    behind: Sequence[float]
    """By how much the chosen candidate leads each of them."""
    utility: float
    """The expected utility of the chosen candidate."""
    evidence: Sequence[str]
    """The texts of the evidence."""
    weights: Sequence[float]
    """Their weights."""

    @property
    def untied(self) -> list[str]:
        """The chosen candidate, and those that are worse."""
        chosen, *others = self.candidates
        least = TIED * abs(self.utility)
        rows = zip(others, self.behind[1:], strict=True)
        return [chosen, *(text for text, lead in rows if abs(lead) > least)]


@dataclass(frozen=True)
class MbrsFiles:
    """Where files for ``mbrs-decode`` are, and how to call it."""

    hypotheses: Path
    """The candidates of all sources, a line for each."""
    references: Path
    """The texts of the evidence of all sources, a line for each."""
    reference_lprobs: Path
    """The logarithms of the weights of the references, a line for each."""
    sources: Path | None
    """The source texts, a line for each; None if they were not given."""
    num_candidates: int
    """The number of hypotheses of each source."""
    num_references: int
    """The number of references of each source."""
    metric: str | None
    """The name of the utility in ``mbrs``; None if it has no such metric."""

    @property
    def command(self) -> str:
        """The command line that decides, with METRIC to be filled in if ``metric`` is None."""
        words = ["mbrs-decode", str(self.hypotheses), "--num_candidates", str(self.num_candidates)]
        words += ["--references", str(self.references)]
        words += ["--num_references", str(self.num_references)]
        words += ["--reference_lprobs", str(self.reference_lprobs)]
        if self.sources is not None:
            words += ["--source", str(self.sources)]
        return shlex.join([*words, "--metric", self.metric or "METRIC"])


def write_mbrs(
    folder: str | os.PathLike[str],
    choices: Sequence[Choice],
    utility: str,
    sources: Sequence[str] | None = None,
) -> MbrsFiles:
    """Write the files for ``mbrs-decode`` into a folder, which is created if it is not there.

    A file appears under its name only when all of them have been written.

    Args:
        folder: the folder. Files of an earlier export are replaced.
        choices: the candidates and the evidence of every source.
        utility: the name of the utility.
        sources: the source texts, for metrics that need them.

    Raises:
        ValueError: if a text has a line break inside or is not valid Unicode, if no evidence of a
            source has a weight, or if there are not as many sources as decisions.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder is {str(folder)!r}, which is a file; it must be a folder")
    if sources is not None and len(sources) != len(choices):
        raise ValueError(
            f"sources has {len(sources)} texts for {len(choices)} decisions; there must be one for "
            "each"
        )
    metric = METRICS.get(utility)
    hypotheses = []
    for b, own in enumerate(choices):
        texts = own.candidates if metric is None else own.untied
        hypotheses.append(list(dict.fromkeys(_line(text, "candidates", b) for text in texts)))
    references = [_merged(own, b) for b, own in enumerate(choices)]
    candidates = max(map(len, hypotheses))
    evidence = max(map(len, references))
    hypotheses = [own + own[:1] * (candidates - len(own)) for own in hypotheses]
    references = [own + [(own[0][0], -math.inf)] * (evidence - len(own)) for own in references]
    content = {
        "hypotheses.txt": [text for own in hypotheses for text in own],
        "references.txt": [text for own in references for text, _ in own],
        "reference_lprobs.txt": [repr(value) for own in references for _, value in own],
    }
    if sources is not None:
        content["sources.txt"] = [_line(text, "sources", b) for b, text in enumerate(sources)]
    _write(folder, content)
    return MbrsFiles(
        hypotheses=folder / "hypotheses.txt",
        references=folder / "references.txt",
        reference_lprobs=folder / "reference_lprobs.txt",
        sources=None if sources is None else folder / "sources.txt",
        num_candidates=candidates,
        num_references=evidence,
        metric=metric,
    )


def _line(text: str, role: str, source: int) -> str:
    """Return a text as ``mbrs`` reads it, if it fits on a line."""
    found = text.strip()
    if "\n" in found or "\r" in found:
        raise ValueError(
            f"{role} of source {source} have the text {text!r:.80}; for mbrs every text must be on "
            "one line. Replace line breaks in decode, or in the texts"
        )
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{role} of source {source} have the text {text!r:.80}; it must be valid Unicode, "
            "without half a surrogate pair"
        ) from error
    return found


def _merged(own: Choice, source: int) -> list[tuple[str, float]]:
    """Return the distinct texts of the evidence, with the logarithms of their total weights."""
    weights: dict[str, list[float]] = {}
    for text, weight in zip(own.evidence, own.weights, strict=True):
        if weight > 0:
            weights.setdefault(_line(text, "evidence", source), []).append(weight)
    if not weights:
        raise ValueError(
            f"the evidence of source {source} has no weight above 0, so that mbrs could not "
            "normalise its weights; draw more evidence"
        )
    return [(text, math.log(math.fsum(every))) for text, every in weights.items()]


def _write(folder: Path, content: dict[str, list[str]]) -> None:
    """Write lines to files, which replace older ones when all have been written."""
    folder.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(8)
    temporary = {name: folder / f".cpsbs-{token}-{name}" for name in content}
    try:
        for name, lines in content.items():
            _write_lines(temporary[name], lines)
        for name, written in temporary.items():
            os.replace(written, folder / name)
    except BaseException:
        for written in temporary.values():
            with suppress(OSError):
                written.unlink(missing_ok=True)
        raise


def _write_lines(file: Path, lines: Iterable[str]) -> None:
    with file.open("x", encoding="utf-8", newline="\n") as out:
        out.writelines(f"{line}\n" for line in lines)
        out.flush()
        os.fsync(out.fileno())
