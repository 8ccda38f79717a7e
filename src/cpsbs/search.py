"""The recursion: Y_0 = {BOS}; Y_t = K of (Y_{t−1} ∘ V), picked by a design; return Y_T.

Everything is written for B sources at once. Which of the model's rows belong to which hypotheses is
the business of ``rows``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cpsbs import kernels
from cpsbs.beams import Beams, Step
from cpsbs.designs import Candidates, Design, Selection, design_named
from cpsbs.models.base import SequenceModel
from cpsbs.polynomials.chunks import beam_chunk_length, read
from cpsbs.randomness import Generators, Streams, fresh_seed, split_seed
from cpsbs.rows import Rows, rows_of


@dataclass(frozen=True)
class _Beam:
    """P hypotheses of each of the b sources that are still open."""

    source: Tensor
    """[b]"""
    tokens: Tensor
    """[b, P, t]"""
    length: Tensor
    """[b, P]"""
    log_prob: Tensor
    """[b, P]"""
    finished: Tensor
    """[b, P]"""
    present: Tensor
    """[b, P]"""
    state: Mapping[str, Tensor]
    log_inclusion: Tensor | None
    """[b, P] along the path"""
    joint: Tensor | None
    """[b, P, P] along the path"""
    entropy: Tensor | None
    """[b, P] along the path"""

    @property
    def open(self) -> Tensor:
        """[b, P] hypotheses that go on."""
        return self.present & ~self.finished

    def of(self, rows: Tensor) -> _Beam:
        """Some of the sources."""

        def some(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[rows]

        return _Beam(
            self.source[rows],
            self.tokens[rows],
            self.length[rows],
            self.log_prob[rows],
            self.finished[rows],
            self.present[rows],
            {name: value[rows] for name, value in self.state.items()},
            some(self.log_inclusion),
            some(self.joint),
            some(self.entropy),
        )


@torch.no_grad()
def search(
    model: SequenceModel,
    k: int,
    design: str | Design = "conditional-poisson",
    *,
    max_length: int,
    temperature: float = 1.0,
    nucleus: float | None = None,
    generator: Generators | int = None,
    joint: bool = False,
    entropy: bool = False,
    path: bool = False,
) -> Beams:
    """Draw K sequences for each of the model's sources.

    Args:
        model: see ``cpsbs.models``.
        k: K ≥ 1.
        design: by name or as an object; see ``cpsbs.designs``.
        max_length: T, the most tokens of a sequence.
        temperature: τ > 0 of the model, p_τ(y_t | ·) ∝ p(y_t | ·)^{1/τ}. The design's annealing is
            another thing.
        nucleus: keep, after each prefix, only the most probable tokens that make up this much of
            the mass (the paper uses 0.99); the rest is as if it had probability zero.
        generator: a seed or a generator, from which every source gets a stream of its own, by its
            number; or a generator for each source. Either way a source's draw does not depend on
            what else is in the batch (but for conditional Poisson with so large a K and so flat a
            distribution that a source of the batch makes more of all candidates be looked at one by
            one).
        joint: keep the joint inclusion probabilities along the path, for error bars.
        entropy: keep Σ_t H(p(· | y_<t)) along the path, for the Rao–Blackwellised entropy.
        path: keep every step.
    """
    chosen = design_named(design)
    check_settings(k, max_length, temperature, nucleus)
    if not hasattr(model, "start"):
        raise ValueError(
            f"model is a {type(model).__name__}, which has no start(); "
            "a model of transformers goes into TransformersModel(model, **inputs)"
        )
    seed = None
    if not isinstance(generator, Sequence):
        # A seed for all, from which each source gets a stream of its own.
        seed = generator if isinstance(generator, int) else fresh_seed(generator)
        generator = split_seed(seed, model.sources, model.device)
    settings = {
        "design": repr(chosen),
        "k": k,
        "temperature": temperature,
        "nucleus": nucleus,
        "max_length": max_length,
        "seed": seed,
        "model": getattr(model, "name", type(model).__name__),
    }
    streams = Streams(generator, model.sources, model.device)
    source = torch.arange(model.sources, device=model.device)
    eos = torch.tensor(model.eos, dtype=torch.int64, device=model.device)
    beam = _first(chosen, k, streams, source, joint, entropy)
    rows = rows_of(model, k, chosen.roots(k), max_length)
    steps: list[Step] = []
    done: list[_Beam] = []
    broken = torch.zeros((), dtype=torch.bool, device=model.device)
    for step in range(max_length):
        last = step + 1 == max_length
        looks = last or rows.looks(step)
        candidates = _candidates(beam, rows.scores(beam.open), temperature, nucleus, k, chosen)
        broken |= ~candidates.log_total.isfinite().all()
        if looks and bool(broken):
            raise ValueError("the model's scores of a prefix are NaN, inf, or all -inf")
        selection = chosen.select(candidates, k, streams, joint)
        parent = candidates.parent_of(selection.index)
        beam = _extended(beam, candidates, selection, parent, rows, eos, model.pad)
        if path:
            steps.append(_step(beam, selection, parent))
        if looks:
            going = beam.open.any(-1)
            left = going.nonzero()[:, 0]
            if rows.worth_dropping(len(left), len(going)):
                done.append(beam.of((~going).nonzero()[:, 0]))
                beam, parent, streams = beam.of(left), parent[left], streams.select(left)
                rows.keep(left)
            if len(left) == 0:
                break
        if not last:
            rows.advance(parent, beam.tokens[..., -1], beam.open)
    done.append(beam)
    return _collected(done, chosen, model.pad, settings, tuple(steps) if path else None)


def check_settings(k: int, max_length: int, temperature: float, nucleus: float | None) -> None:
    """Refuse what no search can have."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k is {k!r}; allowed are integers from 1 on")
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}; it must be at least 1")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; allowed are finite numbers above 0")
    if nucleus is not None and not 0 < nucleus <= 1:
        raise ValueError(f"nucleus is {nucleus}; allowed are numbers above 0, up to 1, and None")


def _first(
    design: Design, k: int, streams: Streams, source: Tensor, joint: bool, entropy: bool
) -> _Beam:
    """The empty sequence, as often as the design wants it."""
    shape = (len(source), design.roots(k))
    zeros = torch.zeros(shape, dtype=torch.float64, device=source.device)
    no = torch.zeros(shape, dtype=torch.bool, device=source.device)
    return _Beam(
        source=source,
        tokens=torch.empty((*shape, 0), dtype=torch.int64, device=source.device),
        length=torch.zeros(shape, dtype=torch.int64, device=source.device),
        log_prob=zeros,
        finished=no,
        present=~no,
        state=design.begin(k, streams, source),
        log_inclusion=zeros,
        joint=zeros[..., None] + zeros[:, None, :] if joint else None,
        entropy=zeros if entropy else None,
    )


def _candidates(
    beam: _Beam,
    scores: Tensor,
    temperature: float,
    nucleus: float | None,
    k: int,
    design: Design,
) -> Candidates:
    """What the open hypotheses can be extended to, and the others as they are."""
    if nucleus is not None:
        scores, temperature = processed(scores, temperature, nucleus), 1.0
    _, parents, tokens = scores.shape
    length = beam_chunk_length(parents, tokens, k, scores.device)
    terms = design.power_sums
    if terms > 1 and kernels.usable(scores.device):
        terms = kernels.POWER_SUMS
    chunks = read(scores, temperature, length, terms)
    log_prob = torch.where(beam.present, beam.log_prob, -math.inf)
    return Candidates(log_prob, chunks, beam.finished, beam.state, beam.log_inclusion)


def processed(scores: Tensor, temperature: float, nucleus: float | None) -> Tensor:
    """A model's scores [..., V], in float32 or float64, scaled and truncated.

    With ``nucleus``, -inf for all but the most probable tokens that make up this mass.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) / temperature
    if nucleus is None or nucleus == 1:
        return scores
    ordered, order = scores.softmax(-1).sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    keep = torch.empty_like(before, dtype=torch.bool).scatter_(-1, order, before < nucleus)
    return scores.masked_fill(~keep, -math.inf)


def _extended(
    beam: _Beam,
    candidates: Candidates,
    selection: Selection,
    parent: Tensor,
    rows: Rows,
    eos: Tensor,
    pad: int,
) -> _Beam:
    """The hypotheses picked."""
    token = selection.index % candidates.shape[-1]
    was_finished = beam.finished.gather(-1, parent)
    token = torch.where(was_finished | ~selection.present, pad, token)
    ended = (token[..., None] == eos).any(-1)
    goes_on = selection.present & ~was_finished & ~ended
    stopped = rows.stops(parent, token, goes_on)
    if stopped is not None:
        ended = ended.masked_scatter(goes_on, stopped)
    before = beam.tokens.gather(1, parent[..., None].expand(-1, -1, beam.tokens.shape[-1]))
    log_inclusion = None
    if selection.log_inclusion is not None and beam.log_inclusion is not None:
        log_inclusion = beam.log_inclusion.gather(-1, parent) + selection.log_inclusion
    joint = None
    if selection.joint_log_inclusion is not None and beam.joint is not None:
        rows = parent[..., None].expand(-1, -1, beam.joint.shape[-1])
        columns = parent[:, None, :].expand(-1, parent.shape[-1], -1)
        joint = beam.joint.gather(1, rows).gather(2, columns) + selection.joint_log_inclusion
    entropy = None
    if beam.entropy is not None:
        entropy = (beam.entropy + candidates.entropy()).gather(-1, parent)
    return _Beam(
        source=beam.source,
        tokens=torch.cat([before, token[..., None]], dim=-1),
        length=(beam.length.gather(-1, parent) + ~was_finished) * selection.present,
        log_prob=torch.where(selection.present, candidates.log_prob_of(selection.index), -math.inf),
        finished=(was_finished | ended) & selection.present,
        present=selection.present,
        state=selection.state,
        log_inclusion=log_inclusion,
        joint=joint,
        entropy=entropy,
    )


def _step(beam: _Beam, selection: Selection, parent: Tensor) -> Step:
    token = beam.tokens[..., -1]
    present, inclusion = selection.present, selection.log_inclusion
    return Step(beam.source, parent, token, present, beam.log_prob, inclusion)


def _collected(
    done: list[_Beam],
    design: Design,
    pad: int,
    settings: Mapping[str, Any],
    path: tuple[Step, ...] | None,
) -> Beams:
    """All sources in their order, the hypotheses of each by probability."""
    longest = max(part.tokens.shape[-1] for part in done)
    order = torch.cat([part.source for part in done]).argsort()

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in done])[order]

    done = [replace(part, tokens=_padded(part.tokens, longest, pad)) for part in done]
    log_prob, present = joined("log_prob"), joined("present")
    known = done[0].log_inclusion is not None
    state = {name: torch.cat([p.state[name] for p in done])[order] for name in done[0].state}
    log_inclusion, log_weight = design.log_weight(
        log_prob, joined("log_inclusion") if known else None, state
    )
    rank = log_prob.argsort(dim=-1, descending=True, stable=True)

    def ranked(x: Tensor) -> Tensor:
        return x.gather(1, rank[(...,) + (None,) * (x.ndim - 2)].expand(-1, -1, *x.shape[2:]))

    def where_present(x: Tensor | None) -> Tensor | None:
        return None if x is None else ranked(torch.where(present, x, -math.inf))

    pairs = None
    if all(part.joint is not None for part in done):
        pairs = ranked(joined("joint"))
        pairs = pairs.gather(2, rank[:, None, :].expand_as(pairs))
    return Beams(
        sequences=ranked(joined("tokens")),
        lengths=ranked(joined("length")),
        finished=ranked(joined("finished")),
        present=ranked(present),
        log_prob=ranked(log_prob),
        log_inclusion=where_present(log_inclusion),
        log_weight=where_present(log_weight),
        design=design.name,
        pad=pad,
        joint_log_inclusion=pairs,
        entropy=None if done[0].entropy is None else ranked(joined("entropy")),
        path=path,
        settings=settings,
    )


def _padded(tokens: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(tokens, (0, length - tokens.shape[-1]), value=value)
