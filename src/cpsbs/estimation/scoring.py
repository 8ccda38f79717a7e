"""Log-probabilities of given sequences: teacher forcing through the protocol of the search."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cpsbs.models.base import SequenceModel
from cpsbs.search.beams import Beams
from cpsbs.search.recursion import processed


def log_prob(
    model: SequenceModel, beams: Beams, temperature: float = 1.0, nucleus: float | None = None
) -> Tensor:
    """Return [B, K] log p(y) of the beams' sequences under a model of the same sources.

    It is 0 in empty places.
    """
    total = torch.zeros_like(beams.log_prob)
    for here, token, log_p in _steps(model, beams, temperature, nucleus):
        total[here] += log_p.gather(-1, token[:, None])[:, 0]
    return total


def divergence(
    own: SequenceModel, other: SequenceModel, beams: Beams, temperature: float = 1.0
) -> Tensor:
    """Return [B, K] Σ_t KL(p(· | y_<t) ‖ q(· | y_<t)) along the beams' sequences.

    Args:
        own: the model p that was searched, made anew.
        other: the model q.
        beams: the beams.
        temperature: the temperature of ``other``.
    """
    if own is other:
        raise ValueError(
            "own and other are one object; make two, because a model holds the state of one search"
        )
    total = torch.zeros_like(beams.log_prob)
    tau, nucleus = beams.settings["temperature"], beams.settings["nucleus"]
    mine = _steps(own, beams, tau, nucleus)
    for (here, _, log_p), (_, _, log_q) in zip(
        mine, _steps(other, beams, temperature, None), strict=True
    ):
        p = log_p.exp()
        terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
        total[here] += terms.sum(-1)
    return total


@torch.no_grad()
def _steps(
    model: SequenceModel, beams: Beams, temperature: float, nucleus: float | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield which sequences [B, K] take each step, their tokens [rows], and log p [rows, V]."""
    if model.sources != len(beams):
        raise ValueError(
            f"the model has {model.sources} sources; it must have those of the beams, {len(beams)}"
        )
    scores = model.start()
    row = torch.arange(len(beams), device=scores.device)[:, None].expand(beams.log_prob.shape)
    for t in range(beams.sequences.shape[-1]):
        here = beams.present & (beams.lengths > t)
        if t > 0:
            parent = row[here]
            if len(parent) == 0:
                return
            scores = model.advance(parent, beams.sequences[..., t - 1][here])
            row = (here.flatten().cumsum(0) - 1).view(here.shape)
        log_p = processed(scores, temperature, nucleus)[row[here]].to(torch.float64).log_softmax(-1)
        yield here, beams.sequences[..., t][here], log_p
