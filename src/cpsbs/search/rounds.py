"""Rounds of draws from one model, none of which finds a sequence that an earlier one has found.

After some rounds the sequences S are held. The next round is a search of what is left, the residual
distribution q (``cpsbs.models.residual``), with any design. Let u be the probability of all that is
not in S. Then

    E f = Σ_{y ∈ S} p(y) f(y) + u · E_q f ,

and the round estimates E_q f without bias, given S. So the weights of all sequences together are
p(y) for those of S, as if they were picked with certainty, and u times the weight that the design
gave for those of the latest round. They are unbiased given S, and hence unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cpsbs.models.base import SequenceModel
from cpsbs.models.residual import ResidualModel
from cpsbs.models.trie import Trie
from cpsbs.randomness import Streams
from cpsbs.search.api import search_models
from cpsbs.search.beams import Beams
from cpsbs.search.recursion import processed
from cpsbs.search.settings import SearchSettings

NOISE = 0.05
"""By how much the log-probability of a sequence may change, for each of its tokens and once more,
when it is computed again: a model in bfloat16 rounds differently in another batch."""


class Rounds:
    """The sequences of a model's sources that were found in several rounds.

    Args:
        model: a model that can be started more than once.
        settings: how the sequences are drawn; ``k`` is that of a round.
    """

    def __init__(self, model: SequenceModel, settings: SearchSettings) -> None:
        self._model, self._settings = model, settings
        self._trie = Trie(model.sources, torch.device(model.device))
        self._parts = list[Beams]()
        self._drawn = list[Tensor]()
        """[B] for each part, which sources it has sequences of."""
        self._latest = torch.full((model.sources,), settings.k, device=model.device)
        self._process = partial(
            processed, temperature=settings.temperature, nucleus=settings.nucleus
        )

    @property
    def log_left(self) -> Tensor:
        """[B] log u, the log of the probability that is not captured; -inf if nothing is left."""
        return self._trie.log_left[: self._model.sources]

    @torch.no_grad()
    def give(self, beams: Beams) -> None:
        """Begin with the sequences of beams that were drawn before; repeats count once.

        Raises:
            ValueError: if they cannot be sequences of this model.
        """
        device = torch.device(self._model.device)
        here: dict[str, Any] = {
            name: x.to(device) for name, x in vars(beams).items() if isinstance(x, Tensor)
        }
        beams = replace(beams, **here)
        source, place = beams.present.nonzero(as_tuple=True)
        residual = self._residual(None)
        residual.start()
        _check_tokens(beams, self._model.vocab_size)
        given = (source, beams.sequences[source, place], beams.lengths[source, place])
        residual.follow(*given)
        path = residual.hold(*given)
        log_prob = self._trie.log_p[path].masked_fill(path < 0, 0.0).sum(-1)
        _check_same(beams, source, place, log_prob)
        last = path.gather(-1, (given[2] - 1)[:, None])[:, 0]
        # Of equal sequences the first one stays.
        order = torch.arange(len(last), device=device)
        first = torch.full((len(self._trie),), len(last), device=device)
        first = first.scatter_reduce(0, last, order, "amin")
        present = beams.present.clone()
        present[source, place] = first[last] == order
        entropy = torch.zeros_like(beams.log_prob)
        entropy[source, place] = self._entropy_along(path)
        self._parts.append(
            replace(beams, present=present, entropy=entropy if self._settings.entropy else None)
        )
        self._drawn.append(torch.ones(len(beams), dtype=torch.bool, device=device))

    def draw(self, k: int, streams: Streams, active: Tensor, hold: bool = True) -> None:
        """Draw K further sequences of the active sources [B].

        Args:
            k: K.
            streams: random numbers that earlier rounds have not used.
            active: [B] the sources to draw from; something must be left of them.
            hold: whether another round, the entropy or ``log_left`` is wanted after this one.
        """
        settings, log_left = self._settings, self.log_left.clone()
        own = replace(
            settings, k=k, temperature=1.0, nucleus=None, entropy=False, path=False
        )  # the residual model has the temperature and the nucleus in its scores
        residual = self._residual(~active)
        (found,) = search_models([residual], own, [streams])
        present = found.present & active[:, None]

        def here(x: Tensor | None, shift: Tensor | None = None) -> Tensor | None:
            if x is None:
                return None
            return torch.where(present, x if shift is None else x + shift, -math.inf)

        log_prob = here(found.log_prob, log_left[:, None])
        assert log_prob is not None
        entropy = None
        if hold:
            source, place = present.nonzero(as_tuple=True)
            given = (source, found.sequences[source, place], found.lengths[source, place])
            with torch.no_grad():
                path = residual.hold(*given)
            if settings.entropy:
                entropy = torch.zeros_like(log_prob)
                entropy[source, place] = self._entropy_along(path)
        self._latest = torch.where(active, k, self._latest)
        self._drawn.append(active)
        self._parts.append(
            replace(
                found,
                sequences=torch.where(present[..., None], found.sequences, found.pad),
                lengths=found.lengths * present,
                finished=found.finished & present,
                present=present,
                log_prob=log_prob,
                log_inclusion=here(found.log_inclusion),
                log_weight=here(found.log_weight, log_left[:, None]),
                entropy=entropy,
            )
        )

    def counts(self) -> Tensor:
        """Return [B] the number of sequences found for each source."""
        return torch.stack([part.present.sum(-1) for part in self._parts]).sum(0)

    def beams(self, label: Mapping[str, Any], k: int | None = None) -> Beams:
        """Return all sequences together, weighted so that they estimate without bias.

        Args:
            label: the value of ``Beams.settings``, to which K is added.
            k: the number of places; by default as many as the largest source needs.
        """
        later = torch.stack(self._drawn).flip(0).cumsum(0).flip(0) - torch.stack(self._drawn).long()
        # Where nothing is left, the latest round has kept everything, with certainty.
        certain = (later > 0) | self.log_left.isneginf()
        k = max(1, int(self.counts().max())) if k is None else k
        design = self._settings.design
        if len(self._parts) == 1 and design.estimates and bool(certain.all()):
            # Nothing was left to draw: the sequences that were given are all there are.
            (given,) = self._parts
            zeros = torch.zeros_like(given.log_prob)
            self._parts = [replace(given, log_inclusion=zeros, log_weight=given.log_prob)]
        whole = _joined(self._parts, certain, k)
        made = {"design": design.name, "made_by": design, "latest": self._latest}
        return replace(whole, **made, settings={**label, "k": k})  # type: ignore[arg-type]

    def _residual(self, resting: Tensor | None) -> ResidualModel:
        model, entropy = self._model, self._settings.entropy
        return ResidualModel(model, self._trie, self._process, resting, entropy)

    def _entropy_along(self, path: Tensor) -> Tensor:
        """Return [s] Σ_t H(p(· | y_<t)) of the sequences with these nodes [s, T]."""
        source = self._trie.source[path[:, :1]]
        before = torch.cat([source, path[:, :-1]], dim=-1)
        return self._trie.entropy[before].masked_fill(path < 0, 0.0).sum(-1)


def _check_tokens(beams: Beams, vocab_size: int) -> None:
    """Refuse sequences that no model with this vocabulary and this maximal length has."""
    here = beams.present
    if not bool(here.any()):
        raise ValueError("beams holds no sequence; draw the first ones by cpsbs.search")
    tokens = beams.sequences[here]
    if bool((beams.lengths[here] < 1).any()):
        raise ValueError("beams holds a sequence without tokens; each must have at least one")
    if int(tokens.max()) >= vocab_size or int(tokens.min()) < 0:
        raise ValueError(
            f"beams holds the token {int(tokens.max())}; the model's tokens are 0 to V - 1 = "
            f"{vocab_size - 1}. Pass beams that were drawn from this model"
        )
    longest = beams.settings["max_length"]
    open_ = here & ~beams.finished & (beams.lengths != longest)
    too_long = here & (beams.lengths > longest)
    if bool((open_ | too_long).any()):
        b, i = (open_ | too_long).nonzero()[0].tolist()
        raise ValueError(
            f"beams holds a sequence of {int(beams.lengths[b, i])} tokens in source {b}; it must "
            f"have ended, or have max_length = {longest} tokens"
        )


def _check_same(beams: Beams, source: Tensor, place: Tensor, log_prob: Tensor) -> None:
    """Refuse sequences whose probability under the model is not the one noted in the beams."""
    noted = beams.log_prob[source, place]
    tolerance = NOISE * (1 + beams.lengths[source, place])
    wrong = ~((noted - log_prob).abs() <= tolerance)
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0, 0])
        b = int(source[i])
        tokens = beams.sequences[b, place[i], : beams.lengths[b, place[i]]].tolist()
        raise ValueError(
            f"beams holds the sequence {tokens} of source {b} with log p = {float(noted[i]):.4g}; "
            f"under this model it is {float(log_prob[i]):.4g}. Pass the model, with the same "
            "sources, from which the beams were drawn"
        )


def _joined(parts: Sequence[Beams], certain: Tensor, k: int) -> Beams:
    """Return the sequences of all parts in K places, the most probable first.

    Args:
        parts: beams of the same sources, without a common sequence.
        certain: [parts, B] where the sequences of a part count as picked with certainty.
        k: K, at least as many as a source has sequences.
    """
    last = parts[-1]

    def together(tensors: Sequence[Tensor | None]) -> Tensor | None:
        there = [x for x in tensors if x is not None]
        return torch.cat(there, dim=1) if len(there) == len(tensors) else None

    def field(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts], dim=1)

    present = field("present")
    log_prob = torch.where(present, field("log_prob"), -math.inf)
    sizes = [flags[:, None].expand(-1, part.k) for flags, part in zip(certain, parts, strict=True)]
    sure = torch.cat(sizes, dim=1)
    rank = log_prob.argsort(dim=-1, descending=True, stable=True)

    def ranked(x: Tensor, empty: float) -> Tensor:
        moved = x.gather(1, rank[(...,) + (None,) * (x.ndim - 2)].expand(-1, -1, *x.shape[2:]))
        room = [0] * (2 * (x.ndim - 2)) + [0, max(0, k - x.shape[1])]
        return pad(moved, room, value=empty)[:, :k]

    def known(name: str, of_sure: Tensor) -> Tensor | None:
        """Return what the design of the latest round may not know."""
        # What an earlier design did not know does not matter: its sequences are certain now.
        each = [getattr(part, name) for part in parts]
        each = [
            part.log_prob if x is None else x for x, part in zip(each[:-1], parts, strict=False)
        ]
        found = together([*each, getattr(last, name)])
        if found is None:
            return None
        return torch.where(present, torch.where(sure, of_sure, found), -math.inf)

    log_inclusion = known("log_inclusion", torch.zeros_like(log_prob))
    log_weight = known("log_weight", log_prob)
    joint = None
    if last.joint_log_inclusion is not None and log_inclusion is not None:
        joint = ranked(_joint(parts, sure, log_inclusion, present), 0.0)
        joint = ranked(joint.transpose(1, 2), 0.0).transpose(1, 2)
    entropy = together([part.entropy for part in parts])
    longest = max(part.sequences.shape[-1] for part in parts)
    tokens = [
        pad(part.sequences, (0, longest - part.sequences.shape[-1]), value=last.pad)
        for part in parts
    ]
    sequences = torch.where(present[..., None], torch.cat(tokens, dim=1), last.pad)
    return replace(
        last,
        sequences=ranked(sequences, last.pad),
        lengths=ranked(field("lengths") * present, 0),
        finished=ranked(field("finished") & present, False),
        present=ranked(present, False),
        log_prob=ranked(log_prob, -math.inf),
        log_inclusion=None if log_inclusion is None else ranked(log_inclusion, -math.inf),
        log_weight=None if log_weight is None else ranked(log_weight, -math.inf),
        joint_log_inclusion=joint,
        entropy=None if entropy is None else ranked(entropy, 0.0),
        path=None,
        trace=None,
    )


def _joint(parts: Sequence[Beams], sure: Tensor, log_inclusion: Tensor, present: Tensor) -> Tensor:
    """Return [B, K, K] the joint inclusion probabilities of all parts.

    Of two sequences one of which is certain, it is the inclusion probability of the other.
    """
    single = torch.where(present, log_inclusion, 0.0)
    pairs = single[:, :, None] + single[:, None, :]
    begin = 0
    for part in parts:
        end = begin + part.k
        if part.joint_log_inclusion is not None:
            drawn = ~sure[:, begin:end] & present[:, begin:end]
            both = drawn[:, :, None] & drawn[:, None, :]
            block = pairs[:, begin:end, begin:end]
            pairs[:, begin:end, begin:end] = torch.where(both, part.joint_log_inclusion, block)
        begin = end
    diagonal = torch.diagonal(pairs, dim1=1, dim2=2)
    diagonal.copy_(single)
    return pairs
