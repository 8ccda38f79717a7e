"""Beams as plain data: dictionaries, rows, a data frame, and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cpsbs.extras import required

if TYPE_CHECKING:
    import pandas
    from torch import Tensor

    from cpsbs.search.beams import Beams

COLUMNS = ["source", "rank", "text", "tokens", "p", "pi", "weight", "length", "finished"]
"""The keys of ``Beams.to_rows`` and the columns of ``Beams.to_pandas``."""


def as_dict(beams: Beams) -> dict[str, Any]:
    """Return plain lists and numbers; see ``Beams.to_dict``."""
    sources = []
    for b in range(len(beams)):
        here = beams.present[b]
        entry: dict[str, Any] = {"sequences": beams.tokens(b)}
        for name in ("finished", "log_prob", "log_inclusion", "log_weight"):
            value: Tensor | None = getattr(beams, name)
            entry[name] = None if value is None else value[b][here].tolist()
        if beams.joint_log_inclusion is not None:
            entry["joint_log_inclusion"] = beams.joint_log_inclusion[b][here][:, here].tolist()
        sources.append(entry)
    settings = dict(beams.settings)
    return {"design": beams.design, "k": beams.k, "settings": settings, "sources": sources}


def as_rows(beams: Beams, texts: Sequence[Sequence[str]] | None) -> list[dict[str, Any]]:
    """Return one dictionary for each sequence; see ``Beams.to_rows``."""
    if texts is not None and len(texts) != len(beams):
        raise ValueError(
            f"texts has {len(texts)} entries; it must have one list for each of the "
            f"{len(beams)} sources, as TextModel.texts(beams) returns them"
        )
    given: Sequence[Sequence[str] | None] = [None] * len(beams) if texts is None else texts
    sources = as_dict(beams)["sources"]
    pairs = enumerate(zip(sources, given, strict=True))
    return [row for b, (entry, own) in pairs for row in sequence_rows(b, entry, own)]


def as_pandas(beams: Beams, texts: Sequence[Sequence[str]] | None) -> pandas.DataFrame:
    """Return a data frame with a row for each sequence; see ``Beams.to_pandas``."""
    frame = required("pandas", "pandas").DataFrame
    found: pandas.DataFrame = frame(as_rows(beams, texts), columns=COLUMNS)
    return found


def as_json(beams: Beams) -> str:
    """Return ``as_dict`` as JSON; see ``Beams.to_json``."""
    return json.dumps(finite_json(as_dict(beams)), allow_nan=False)


def sequence_rows(
    source: int, entry: Mapping[str, Any], texts: Sequence[str] | None
) -> list[dict[str, Any]]:
    """Return one dictionary for each sequence of a source; see ``Beams.to_rows``.

    Args:
        source: the number of the source.
        entry: its entry under "sources" in ``Beams.to_dict``.
        texts: the texts of its sequences, if they are known.
    """
    sequences = entry["sequences"]
    shown: Sequence[str | None] = [None] * len(sequences) if texts is None else texts
    if len(shown) != len(sequences):
        raise ValueError(
            f"texts[{source}] has {len(shown)} entries; it must have one for each of the "
            f"{len(sequences)} sequences of source {source}"
        )
    rows = []
    for rank, tokens in enumerate(sequences):
        p, pi, weight = (
            None if entry[name] is None else math.exp(entry[name][rank])
            for name in ("log_prob", "log_inclusion", "log_weight")
        )
        values = (source, rank, shown[rank], tokens, p, pi, weight, len(tokens))
        rows.append(dict(zip(COLUMNS, (*values, entry["finished"][rank]), strict=True)))
    return rows


def finite_json(value: Any) -> Any:
    """Return the value with None for every number that JSON cannot express."""
    if isinstance(value, dict):
        return {name: finite_json(v) for name, v in value.items()}
    if isinstance(value, list):
        return [finite_json(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
