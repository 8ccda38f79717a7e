"""Logits processors and stopping criteria of transformers, for rows that come and go.

transformers calls a processor with B·num_beams rows in the order of the sources, and a processor
may rely on that: ``prefix_allowed_tokens_fn`` is told the number of the source, which is the number
of the row divided by ``num_beams``. The search asks a model only about hypotheses that are still
open, so its rows follow no such rule. Every processor is one of four kinds:

- *row-wise*: what becomes of a row depends on that row alone; these see the rows as they are;
- *constrained*: ``prefix_allowed_tokens_fn``, which is asked here for each row and its source;
- *others*, such as the caller's own: these see the layout that transformers would show them, in
  which copies and padding stand in for rows that are not there (``Layout``);
- processors that remember something of each row between calls: these are refused, because rows
  change places at every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ROW_WISE = frozenset(
    f"{name}LogitsProcessor"
    for name in (
        *("MinLength", "MinNewTokensLength", "RepetitionPenalty", "NoRepeatNGram", "SequenceBias"),
        *("NoBadWords", "ForcedBOSToken", "InfNanRemove", "SuppressTokensAtBegin", "Watermark"),
        "SuppressTokens",
    )
) | {
    *("TemperatureLogitsWarper", "TopPLogitsWarper", "TopKLogitsWarper", "TopHLogitsWarper"),
    *("MinPLogitsWarper", "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper"),
    *("ExponentialDecayLengthPenalty", "LogitNormalization"),
    *("StopStringCriteria", "MaxTimeCriteria"),
}
"""Classes of transformers that treat every row by itself."""

ONE_ROW_PER_SOURCE = frozenset(
    {"EncoderNoRepeatNGramLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor"}
)
"""Classes of transformers that look up a row's source. They are shown one row for each source,
whatever ``num_beams`` is, because the second one is wrong for any other number."""

REMEMBERS_ROWS = {
    "ClassifierFreeGuidanceLogitsProcessor": "doubles the batch",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "keeps a KV cache of its own for each row",
    "SynthIDTextWatermarkLogitsProcessor": "keeps a state for each row",
    "WhisperNoSpeechDetection": "runs the model on the whole batch",
    "DiaClassifierFreeGuidanceLogitsProcessor": "doubles the batch",
    "DiaEOSDelayPatternLogitsProcessor": "keeps a state for each row",
}
"""Processors that cannot follow hypotheses which change rows, and why."""


def _transformers_name(processor: Any) -> str:
    """Return the name of the processor's class if transformers defines it, else ""."""
    kind = type(processor)
    return kind.__name__ if kind.__module__.startswith("transformers.") else ""


def refuse_processors(processors: Sequence[Any]) -> None:
    """Refuse processors that remember something of each row between calls."""
    for processor in processors:
        name = _transformers_name(processor)
        if name in REMEMBERS_ROWS:
            raise ValueError(
                f"logits_processor has a {name}, which {REMEMBERS_ROWS[name]}; the hypotheses of "
                "a search change rows at every step, so it cannot be used here; leave it out"
            )


def refuse_criteria(criteria: Sequence[Any]) -> None:
    """Refuse stopping criteria that read scores, which a search does not keep."""
    for criterion in criteria:
        if _transformers_name(criterion) == "ConfidenceCriteria":
            raise ValueError(
                "stopping_criteria has a ConfidenceCriteria, which reads scores; a search keeps "
                "none, so only criteria that read the tokens can be used"
            )


class Layout:
    """Shows rows as transformers' ``generate`` would: ``beams`` rows for each source, in order.

    Where a source has more rows than that, there are several such views, one after the other.
    Where it has fewer, its first row stands in for the others; a source without any row is shown
    as it was last, followed by padding, as in transformers' ``_sample``.
    """

    def __init__(self, sources: int, beams: int, pad: int) -> None:
        self._sources, self._beams, self._pad = sources, beams, pad
        self._latest: Tensor | None = None
        """[sources, tokens] a row of each source, as it was last seen."""

    def apply(
        self,
        call: Callable[[Tensor, Tensor], Tensor],
        ids: Tensor,
        values: Tensor,
        source: Tensor,
        beams: int | None = None,
    ) -> Tensor:
        """Call a function of B·num_beams rows for the rows [rows] of these sources.

        Args:
            call: maps tokens [B·num_beams, t] and values [B·num_beams, ...] to results
                [B·num_beams, ...].
            ids: [rows, t] the tokens.
            values: [rows, ...] what belongs to them; zero is shown for a source without rows.
            source: [rows] their sources, ascending.
            beams: the number of rows for each source; the layout's by default.
        """
        beams = beams or self._beams
        count = torch.bincount(source, minlength=self._sources)
        first = count.cumsum(0) - count
        slot = torch.arange(len(source), device=source.device) - first[source]
        latest = self._followed(ids, first, count)
        results: Tensor | None = None
        for begin in range(0, max(1, int(count.max())), beams):
            # [B, beams] the row that is shown in each place; one that is not there is the first.
            place = begin + torch.arange(beams, device=source.device)
            row = first[:, None] + torch.where(place < count[:, None], place, 0)
            row = row.clamp(max=len(ids) - 1).flatten()
            there = (count > 0).repeat_interleave(beams)
            shown = torch.where(there[:, None], ids[row], latest.repeat_interleave(beams, 0))
            blank = there.view(-1, *[1] * (values.ndim - 1))
            found = call(shown, torch.where(blank, values[row], values.new_zeros(())))
            if results is None:
                results = found.new_empty((len(ids), *found.shape[1:]))
            mine = ((slot >= begin) & (slot < begin + beams)).nonzero()[:, 0]
            results[mine] = found[source[mine] * beams + slot[mine] - begin]
        assert results is not None
        return results

    def _followed(self, ids: Tensor, first: Tensor, count: Tensor) -> Tensor:
        """Return [sources, t] the first row of each source, or the last one seen if it has none."""
        now = ids[first.clamp(max=len(ids) - 1)]
        if self._latest is not None:
            missing = ids.shape[-1] - self._latest.shape[-1]
            padded = torch.nn.functional.pad(self._latest, (0, missing), value=self._pad)
            now = torch.where((count > 0)[:, None], now, padded)
        self._latest = now
        return now


class Processors:
    """The caller's logits processors, in their order.

    Args:
        processors: the processors, in the order in which they apply.
        layout: shows rows to processors that may rely on their order.
        ended: maps rows [rows, t] to whether each [rows] has ended; ``prefix_allowed_tokens_fn`` is
            not called for those.
    """

    def __init__(
        self, processors: Sequence[Any], layout: Layout, ended: Callable[[Tensor], Tensor]
    ) -> None:
        refuse_processors(processors)
        self._processors, self._layout, self._ended = processors, layout, ended

    def __len__(self) -> int:
        return len(self._processors)

    def without_any(self) -> Processors:
        """Return an empty list of processors with the same layout."""
        return Processors([], self._layout, self._ended)

    def __call__(self, ids: Tensor, scores: Tensor, source: Tensor) -> Tensor:
        """Return the processed scores [rows, V], given tokens [rows, t] and sources [rows]."""
        for processor in self._processors:
            name = _transformers_name(processor)
            if name in ROW_WISE:
                scores = processor(ids, scores)
            elif name == "PrefixConstrainedLogitsProcessor":
                scores = self._constrained(processor, ids, scores, source)
            else:
                beams = 1 if name in ONE_ROW_PER_SOURCE else None
                scores = self._layout.apply(_checked(processor), ids, scores, source, beams)
        return scores

    def _constrained(self, processor: Any, ids: Tensor, scores: Tensor, source: Tensor) -> Tensor:
        """Return the scores, with -inf for tokens that are not allowed."""
        allowed = torch.full_like(scores, -math.inf)
        ended = self._ended(ids).tolist()
        for row, number in enumerate(source.tolist()):
            if ended[row]:
                allowed[row] = 0.0
                continue
            tokens = processor._prefix_allowed_tokens_fn(number, ids[row])
            if len(tokens) == 0:
                raise ValueError(
                    f"prefix_allowed_tokens_fn allows no token for source {number} after the "
                    f"tokens {ids[row].tolist()}; it must always allow one, such as the end token"
                )
            allowed[row, tokens] = 0.0
        return scores + allowed


def _checked(processor: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the processor with a check of the shape of its result."""

    def call(ids: Tensor, scores: Tensor) -> Tensor:
        found = processor(ids, scores)
        if not isinstance(found, Tensor) or found.shape != scores.shape:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"the logits processor {type(processor).__name__} returned {shape}; "
                f"it must return scores of the shape that it was given, {list(scores.shape)}"
            )
        return found

    return call


class Criteria:
    """The caller's stopping criteria, which see tokens but no scores."""

    def __init__(self, criteria: Sequence[Any], layout: Layout) -> None:
        refuse_criteria(criteria)
        self._criteria, self._layout = criteria, layout

    def __len__(self) -> int:
        return len(self._criteria)

    def __call__(self, ids: Tensor, source: Tensor) -> Tensor:
        """Return [rows] whether a criterion ends the tokens [rows, t] of the sources [rows]."""
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for criterion in self._criteria:
            call = _without_scores(criterion)
            if _transformers_name(criterion) in ROW_WISE:
                ended |= call(ids, ended)
            else:
                ended |= self._layout.apply(call, ids, ended, source)
        return ended


def _without_scores(criterion: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the criterion as a function that maps rows to a boolean for each."""

    def call(ids: Tensor, _: Tensor) -> Tensor:
        name = getattr(criterion, "__name__", type(criterion).__name__)
        try:
            found = torch.as_tensor(criterion(ids, None), device=ids.device)
        except Exception as error:
            raise ValueError(
                f"the stopping criterion {name} failed ({type(error).__name__}: {error}); it is "
                "called with the tokens and with scores=None, because a search keeps no scores"
            ) from error
        if found.shape not in (torch.Size(), torch.Size([len(ids)])):
            raise ValueError(
                f"the stopping criterion {name} returned the shape {list(found.shape)}; it must "
                f"return one boolean, or one for each of the {len(ids)} rows"
            )
        return found.to(torch.bool).expand(len(ids))

    return call
