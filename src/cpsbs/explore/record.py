"""What the page reads: a document with the runs of one scene, as plain JSON.

A *scene* is a text with the settings that all runs share; a *run* is one beam of it. Sequences are
listed once in ``outputs``, because p, text and f belong to the sequence and not to the run that
found it; a run refers to them by their number. The steps of a run form a tree of distinct prefixes:
rows with the same prefix, which designs that draw with replacement have, are one node with a count.

Numbers are rounded to seven significant digits, which is more than a screen shows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cpsbs.designs import Design
from cpsbs.explore.pieces import Piece
from cpsbs.explore.scene import Scene
from cpsbs.search.beams import Beams
from cpsbs.search.export import finite_json
from cpsbs.search.path import Step
from cpsbs.text import Prompt

VERSION = 1
"""The version of the format; a page refuses to load other ones."""

ITSELF = -1
"""In the place of a token: a sequence that had ended and was offered, or kept, as it is."""

Record = dict[str, Any]


@dataclass
class Document:
    """Collects the outputs and the runs of one scene, and the tokens that occur in them."""

    model: str
    """The name of the model that draws."""
    prompt: Prompt
    """What the model is given in the place of the scene's text."""
    scene: Scene
    """The text and the settings."""
    ends: tuple[int, ...]
    """The tokens that end a sequence."""
    write: Callable[[Iterable[int]], Mapping[int, Piece]]
    """Says how tokens are written."""
    decode: Callable[[Sequence[Sequence[int]]], list[str]]
    """Maps lists of tokens to texts."""
    outputs: dict[tuple[int, ...], Record] = field(default_factory=dict)
    runs: list[Record] = field(default_factory=list)
    exact: Record | None = None
    """Between which numbers E f certainly lies, by drawing until hardly anything is left."""

    def add_run(
        self,
        beams: Beams,
        design: Design,
        values: Sequence[float],
        estimate: Record | None,
        *,
        prefix: Sequence[int] = (),
        log_prefix: float = 0.0,
    ) -> None:
        """Add the beam of one source.

        Args:
            beams: the beam, with its path if the steps are to be shown.
            design: the design that drew it.
            values: f of its sequences.
            estimate: the estimate of E f from it, if there is one.
            prefix: the tokens that were forced; the beam holds what follows them.
            log_prefix: their log-probability.
        """
        sequences = [(*prefix, *tokens) for tokens in beams.tokens(0)]
        here = beams.present[0]
        log_p = (beams.log_prob[0][here] + log_prefix).tolist()
        pi = _optional(beams.log_inclusion, here)
        weight = _optional(beams.log_weight, here)
        finished = beams.finished[0][here].tolist()
        found: dict[int, Record] = {}
        for place, tokens in enumerate(sequences):
            number = self._output(tokens, log_p[place], finished[place], values[place])
            entry = found.setdefault(number, {"count": 0, "pi": None, "w": None})
            entry["count"] += 1
            if weight is not None:
                # Below a prefix π is given that prefix, and w = p/π stands for a part of its p.
                entry["w"] = (entry["w"] or 0.0) + weight[place] * math.exp(log_prefix)
            if not design.distinct and design.estimates:
                # The expected number of copies of a sequence, in K draws with replacement.
                entry["pi"] = beams.k * math.exp(log_p[place] - log_prefix)
            elif pi is not None:
                entry["pi"] = pi[place]
        self.runs.append(
            {
                "design": repr(design),
                "seed": beams.settings.get("seed"),
                "distinct": design.distinct,
                "estimates": design.estimates,
                "prefix": list(prefix),
                "log_prefix": _rounded(log_prefix),
                "y": list(found),
                "count": [entry["count"] for entry in found.values()],
                "pi": [_rounded(entry["pi"]) for entry in found.values()],
                "w": [_rounded(entry["w"]) for entry in found.values()],
                "steps": None if beams.path is None else steps_of(beams.path, log_prefix),
                "estimate": estimate,
            }
        )

    def _output(self, tokens: tuple[int, ...], log_p: float, finished: bool, value: float) -> int:
        if tokens not in self.outputs:
            self.outputs[tokens] = {
                "number": len(self.outputs),
                "log_p": _rounded(log_p),
                "finished": finished,
                "f": _rounded(value),
            }
        number: int = self.outputs[tokens]["number"]
        return number

    def as_record(self) -> Record:
        """Return the document as plain lists and numbers that JSON can express."""
        texts = self.decode([list(tokens) for tokens in self.outputs])
        outputs = [
            {"tokens": list(tokens), "text": text}
            | {name: entry[name] for name in ("log_p", "finished", "f")}
            for (tokens, entry), text in zip(self.outputs.items(), texts, strict=True)
        ]
        used = {token for tokens in self.outputs for token in tokens}
        for run in self.runs:
            for step in run["steps"] or ():
                used.update(step["token"])
                used.update(step["lost"]["token"])
        record = {
            "format": "cpsbs-explore",
            "version": VERSION,
            "model": self.model,
            "prompt": self.prompt,
            "scene": self.scene.as_record(),
            "pieces": {str(t): p for t, p in self.write(used - {ITSELF}).items()},
            "ends": list(self.ends),
            "outputs": outputs,
            "runs": self.runs,
            "exact": self.exact,
        }
        plain: Record = finite_json(record)
        return plain


def steps_of(path: Sequence[Step], log_prefix: float = 0.0) -> list[Record]:
    """Return the steps of the first source as a tree of distinct prefixes.

    The entries of a step that are lists have one item for each prefix that was kept: the number of
    its ``parent`` among those of the step before, its last ``token`` (``ITSELF`` for a sequence
    that had ended before), ``log_p``, ``pi``, ``count`` and whether it is ``done``. ``pi`` is the
    inclusion probability at this step, given the step before; for designs that may repeat, the
    expected number of copies. ``lost`` has the likeliest candidates that were not kept, and
    ``log_rest``, for each parent, log p of all that is neither kept nor listed there.
    """
    steps: list[Record] = []
    nodes: list[int] | None = None  # the node of every place of the beam before
    done: list[bool] = []
    for step in path:
        sources = step.source.tolist()
        if 0 not in sources:
            break
        record, nodes, done = _step(step, sources.index(0), nodes, done, log_prefix)
        steps.append(record)
    return steps


def _step(
    step: Step, row: int, nodes: list[int] | None, done: list[bool], log_prefix: float
) -> tuple[Record, list[int], list[bool]]:
    """Return one step, the node of each of its places (-1 if empty), and which nodes have ended."""
    offer = step.offer
    offered_tokens, offered_log_p = offer.token[row].tolist(), offer.log_prob[row].tolist()
    if nodes is None:  # all roots are the empty sequence
        nodes, done = [0] * len(offered_tokens), [False]
    copies = Counter(nodes)  # the rows of each node, which all offer the same

    parent, token = step.parent[row].tolist(), step.token[row].tolist()
    log_p, ended = step.log_prob[row].tolist(), step.finished[row].tolist()
    pi = None if step.log_inclusion is None else step.log_inclusion[row].exp().tolist()
    kept: dict[tuple[int, int], Record] = {}
    places: list[int] = []
    for place, present in enumerate(step.present[row].tolist()):
        if not present:
            places.append(-1)
            continue
        node = nodes[parent[place]]
        key = (node, ITSELF if done[node] else token[place])
        if key not in kept:
            expected = None if pi is None else copies[node] * pi[place]
            entry = {"log_p": log_p[place] + log_prefix, "done": ended[place], "pi": expected}
            kept[key] = {"number": len(kept), "count": 0} | entry
        kept[key]["count"] += 1
        places.append(kept[key]["number"])

    offered_pi = None if offer.log_inclusion is None else offer.log_inclusion[row].exp().tolist()
    lost: dict[tuple[int, int], Record] = {}
    rest: dict[int, float] = {}
    for place, node in enumerate(nodes):
        if node < 0 or node in rest:
            continue
        listed = set()
        for i, candidate in enumerate(offered_log_p[place]):
            if candidate == -math.inf:
                continue
            key = (node, ITSELF if done[node] else offered_tokens[place][i])
            listed.add(key)
            if key not in kept:
                expected = None if offered_pi is None else copies[node] * offered_pi[place][i]
                lost[key] = {"log_p": candidate + log_prefix, "pi": expected}
        unlisted = [
            math.exp(entry["log_p"] - log_prefix)
            for key, entry in kept.items()
            if key[0] == node and key not in listed
        ]
        left = math.exp(float(offer.log_rest[row, place])) - math.fsum(unlisted)
        rest[node] = math.log(left) + log_prefix if left > 0 else -math.inf

    record = {
        **_columns(kept),
        "count": [entry["count"] for entry in kept.values()],
        "done": [entry["done"] for entry in kept.values()],
        "lost": _columns(lost),
        "log_rest": [_rounded(rest.get(node)) for node in range(len(done))],
    }
    return record, places, [entry["done"] for entry in kept.values()]


def _columns(entries: Mapping[tuple[int, int], Record]) -> Record:
    """Return the columns that kept and lost candidates share."""
    return {
        "parent": [node for node, _ in entries],
        "token": [token for _, token in entries],
        "log_p": [_rounded(entry["log_p"]) for entry in entries.values()],
        "pi": [_rounded(entry["pi"]) for entry in entries.values()],
    }


def _optional(log_values: Any, here: Any) -> list[float] | None:
    """Return the exponentials of the first source's numbers, or None where there are none."""
    if log_values is None:
        return None
    values: list[float] = log_values[0][here].exp().tolist()
    return values


def _rounded(value: float | None) -> float | None:
    """Return the number to seven significant digits."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")
