"""Draws sequences inside of a pipeline of Ray Data.

``Sampler`` is a class for ``Dataset.map_batches``: Ray makes one in every actor, where it loads the
model once, and calls it with one batch of rows after another.

    rows = ray.data.read_text("english.txt").map_batches(
        cpsbs.ray.Sampler,
        fn_constructor_kwargs={"model": "en-fr", "k": 5, "temperature": 0.5},
        batch_format="pyarrow",
        batch_size=64,
        compute=ray.data.ActorPoolStrategy(size=4),
        num_cpus=1,
    )

For a file of texts, the commands with ``--engine ray`` need no program.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from cpsbs.designs import DEFAULT_DESIGN, Design, design_named
from cpsbs.extras import required, silence_transformers
from cpsbs.search.beams import Beams
from cpsbs.search.settings import SearchOptions, SearchSettings
from cpsbs.text import load

if TYPE_CHECKING:
    import pyarrow  # type: ignore[import-untyped]

__all__ = ["Sampler"]


class Sampler:
    """Draws K sequences for every row of a table, and adds them as columns.

    A row keeps its columns and gets, as lists over its sequences: ``texts``, ``sequences`` (their
    tokens), ``finished``, ``log_prob``, ``log_inclusion`` and ``log_weight``. What a design does
    not have, such as the weights of beam search, is null.

    What a row gets depends on the seed, the model, the settings and the number of its random
    stream, and not on how Ray divides the rows into blocks, apart from rounding. Without a column
    of numbers, that number is a hash of the text, so that equal texts get equal sequences.

    Args:
        model: an embedded model, a folder on every node, or an id on the Hugging Face hub.
        k: K, the number of sequences to draw for each text.
        design: how the sequences are drawn, by name or as an object.
        column: the column with the texts.
        number: a column with integers that select the random streams of the rows. With 0, 1, 2, …
            rows get the sequences of ``TextModel.beams`` and of ``cpsbs sample``.
        seed: the seed of the random numbers.
        max_length: the largest number of new tokens; by default ``TextModel.usual_length``.
        batch_size: the number of texts to decode at once, after those of a batch of rows were
            sorted by length.
        skip: whether to leave rows that the model cannot take without sequences, and to say why in
            a column ``error``. Otherwise such a row is an error.
        device: as for ``cpsbs.load``.
        dtype: as for ``cpsbs.load``.
        quantize: as for ``cpsbs.load``.
        gguf_file: as for ``cpsbs.load``.
        trust_remote_code: as for ``cpsbs.load``.
        options: ``temperature`` (default 1), ``nucleus``, ``joint`` and ``entropy``: see
            ``cpsbs.search``.

    Attributes:
        added: the columns that a subclass adds, each with the name of its type, such as "float64"
            (see ``pyarrow.type_for_alias``).
        model: the model, a ``cpsbs.TextModel``.
        settings: the settings of the search.
    """

    added: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        model: str | Path = "en-fr",
        k: int = 10,
        design: str | Design = DEFAULT_DESIGN,
        *,
        column: str = "text",
        number: str | None = None,
        seed: int = 0,
        max_length: int | None = None,
        batch_size: int = 64,
        skip: bool = False,
        device: str | None = None,
        dtype: str | None = None,
        quantize: str | None = None,
        gguf_file: str | None = None,
        trust_remote_code: bool = False,
        **options: Unpack[SearchOptions],
    ) -> None:
        if not isinstance(model, str | Path):
            raise ValueError(
                f"model is a {type(model).__name__}; it must be the name of a model, which every "
                "actor loads for itself"
            )
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        self._pyarrow: Any = required("pyarrow", "parquet")
        silence_transformers()
        self.model = load(
            model,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            gguf_file=gguf_file,
            quantize=quantize,
        )
        length = self.model.usual_length if max_length is None else max_length
        self.settings = SearchSettings(k, design_named(design), length, **options)
        self._column, self._number, self._seed = column, number, seed
        self._batch_size, self._skip = batch_size, skip

    def columns(self, beams: Beams) -> dict[str, Any]:
        """Return what one row gets in its new columns.

        A subclass can add columns, such as an estimate from the beam, which it names in ``added``.

        Args:
            beams: the beam of the row's text, one source.
        """
        (entry,) = beams.to_dict()["sources"]
        names = ("sequences", "finished", "log_prob", "log_inclusion", "log_weight")
        return {"texts": self.model.texts(beams)[0], **{name: entry[name] for name in names}}

    def __call__(self, rows: pyarrow.Table) -> pyarrow.Table:
        """Return the rows with their new columns.

        Raises:
            ValueError: if there are no such columns, or a text cannot be used and is not to be
                skipped.
        """
        texts, numbers = self._read(rows)
        wrong = self._unusable(texts)
        usable = [i for i in range(len(texts)) if i not in wrong]
        found: list[dict[str, Any]] = [{}] * len(texts)
        for i, beams in self._beams(texts, numbers, usable):
            found[i] = self.columns(beams)
        return self._with_columns(rows, found, wrong)

    def _read(self, rows: pyarrow.Table) -> tuple[list[str | None], list[int]]:
        """Return the texts, and the numbers of their random streams."""
        if not isinstance(rows, self._pyarrow.Table):
            raise ValueError(
                f"a batch of rows is a {type(rows).__name__}; it must be a table: give "
                'batch_format="pyarrow" to map_batches'
            )
        for name in filter(None, (self._column, self._number)):
            if name not in rows.column_names:
                there = ", ".join(rows.column_names)
                raise ValueError(f"there is no column {name!r}; the columns are {there}")
        texts = rows[self._column].to_pylist()
        if self._number is None:
            return texts, [_number_of(text) for text in texts]
        numbers = rows[self._number].to_pylist()
        for value in numbers:
            if not isinstance(value, int):
                raise ValueError(f"column {self._number!r} has {value!r}; it must have integers")
        return texts, numbers

    def _unusable(self, texts: Sequence[str | None]) -> dict[int, str]:
        """Return what is wrong with the texts that the model cannot take, by row."""
        wrong = {i: "is not a text" for i, text in enumerate(texts) if not isinstance(text, str)}
        some = [(i, text) for i, text in enumerate(texts) if isinstance(text, str)]
        refused = self.model.unusable([text for _, text in some], self.settings.max_length)
        wrong |= {some[j][0]: reason for j, reason in refused.items()}
        if wrong and not self._skip:
            i, reason = min(wrong.items())
            raise ValueError(f"the text {_shortened(texts[i])} {reason}; fix it, or use skip=True")
        return wrong

    def _beams(
        self, texts: Sequence[Any], numbers: Sequence[int], usable: Sequence[int]
    ) -> list[tuple[int, Beams]]:
        """Draw for the usable rows, those of similar length together."""
        order = sorted(usable, key=lambda i: -len(texts[i]))
        batches = [
            order[first : first + self._batch_size]
            for first in range(0, len(order), self._batch_size)
        ]
        drawn = self.model.draw(
            [[texts[i] for i in batch] for batch in batches],
            self.settings,
            seed=self._seed,
            streams=[[numbers[i] for i in batch] for batch in batches],
        )
        found = (beams for batch in drawn for beams in batch)
        return list(zip(order, found, strict=True))

    def _with_columns(
        self, rows: pyarrow.Table, found: Sequence[dict[str, Any]], wrong: dict[int, str]
    ) -> pyarrow.Table:
        types = _types(self._pyarrow)
        types |= {name: self._pyarrow.type_for_alias(kind) for name, kind in self.added.items()}
        for name in {name for row in found for name in row} - types.keys():
            raise ValueError(f"columns returned {name!r}; name it in added, with its type")
        columns = {name: [row.get(name) for row in found] for name in types}
        if self._skip:
            columns["error"] = [wrong.get(i) for i in range(len(found))]
            types["error"] = self._pyarrow.string()
        for name, values in columns.items():
            if name in rows.column_names:
                raise ValueError(f"the rows have a column {name!r} already; rename it")
            rows = rows.append_column(name, self._pyarrow.array(values, types[name]))
        return rows


def _types(pyarrow: Any) -> dict[str, Any]:
    """Return the types of the new columns, which must be the same in every block."""
    numbers = pyarrow.list_(pyarrow.float64())
    return {
        "texts": pyarrow.list_(pyarrow.string()),
        "sequences": pyarrow.list_(pyarrow.list_(pyarrow.int64())),
        "finished": pyarrow.list_(pyarrow.bool_()),
        "log_prob": numbers,
        "log_inclusion": numbers,
        "log_weight": numbers,
    }


def _number_of(text: object) -> int:
    """Return the number of a random stream for a text, the same in every process."""
    digest = hashlib.blake2b(str(text).encode(errors="surrogatepass"), digest_size=7)
    return int.from_bytes(digest.digest(), "big")


def _shortened(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}…"
