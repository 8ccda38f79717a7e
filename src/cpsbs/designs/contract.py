"""A check for designs: does one keep the promises that the search relies on?

For people who write their own; our tests run it on every design we ship.
"""

from __future__ import annotations

import math

import torch

from cpsbs.designs.base import Candidates, Design, Selection
from cpsbs.randomness import Streams
from cpsbs.scores.reading import read

DRAWS = 4000
SIGMAS = 5.0


def check_design(design: Design, k: int = 3, seed: int = 0) -> None:
    """Run a design on small sets of candidates, many times over.

    Checked are: K indices within range and, if the design says so, distinct; places left empty only
    where there are fewer than K candidates; candidates of probability zero never picked. If it
    reports inclusion probabilities: that they are the same in every draw, sum to K over all
    candidates, and agree with how often candidates are picked (within 5 standard deviations, so a
    false alarm has a chance of about 1e-5).

    Raises:
        ValueError: naming the promise that is broken.
    """
    generator = torch.Generator().manual_seed(seed)
    for parents, tokens in ((1, 8), (k, 5), (1, max(1, k - 1))):
        if design.roots(k) != 1:
            parents = design.roots(k)
        candidates = _example(design, parents, tokens, k, generator)
        streams = Streams(generator, DRAWS, torch.device("cpu"))
        selection = design.select(candidates, k, streams)
        _check_selection(design, candidates, selection, k)
        if selection.log_inclusion is not None:
            _check_inclusion(candidates, selection, k)


def _example(
    design: Design, parents: int, tokens: int, k: int, generator: torch.Generator
) -> Candidates:
    """The same candidates for many sources; where there is room, one of them impossible."""
    log_prob = torch.randn(parents, generator=generator, device="cpu").double().log_softmax(-1)
    scores = 2 * torch.randn((parents, tokens), generator=generator, device="cpu").double()
    if tokens > k:
        scores[0, 0] = -math.inf
    streams = Streams(generator, DRAWS, torch.device("cpu"))
    return Candidates(
        log_prob=log_prob.expand(DRAWS, parents),
        chunks=read(scores.expand(DRAWS, parents, tokens), 1.0, tokens, design.power_sums),
        finished=torch.zeros((DRAWS, parents), dtype=torch.bool, device="cpu"),
        state={
            name: value if value.shape[-1] == parents else value.expand(DRAWS, parents).clone()
            for name, value in design.begin(k, streams, torch.arange(DRAWS, device="cpu")).items()
        },
        log_inclusion=torch.zeros((DRAWS, parents), dtype=torch.float64, device="cpu"),
    )


def _check_selection(design: Design, candidates: Candidates, selection: Selection, k: int) -> None:
    index, present = selection.index, selection.present
    possible = candidates.chunks.scores[0].flatten() > -math.inf
    if index.shape != (DRAWS, k) or present.shape != (DRAWS, k):
        raise ValueError(f"{design.name} returned the shape {list(index.shape)}; it must be [B, K]")
    if int(index.min()) < 0 or int(index.max()) >= len(possible):
        raise ValueError(f"{design.name} returned an index outside 0…P·V − 1")
    expected = min(k, int(possible.sum())) if design.distinct else k
    if not bool((present.sum(-1) == expected).all()):
        raise ValueError(f"{design.name} filled another number of places than {expected}")
    if not bool(possible[index[present]].all()):
        raise ValueError(f"{design.name} picked a candidate of probability zero")
    if design.distinct:
        for row, here in zip(index[:50], present[:50], strict=True):
            if len(set(row[here].tolist())) < int(here.sum()):
                raise ValueError(f"{design.name} picked a candidate twice but claims not to")


def _check_inclusion(candidates: Candidates, selection: Selection, k: int) -> None:
    assert selection.log_inclusion is not None
    n = candidates.chunks.scores[0].numel()
    here = selection.present
    index, pi = selection.index[here], selection.log_inclusion[here].exp()
    times = torch.bincount(index, minlength=n).double()
    mean = torch.zeros(n, dtype=torch.float64, device="cpu").index_add_(0, index, pi) / times.clamp(
        min=1
    )
    spread = float((pi - mean[index]).abs().max())
    if spread > 1e-9:
        raise ValueError(f"the inclusion probability of a candidate varies by {spread}")
    seen = times > 0
    expected = min(k, int((candidates.chunks.scores[0] > -math.inf).sum()))
    # Candidates that never came up may hold what is missing, but not much of it.
    missing = expected - float(mean.sum())
    if missing < -1e-6 or missing > 20 / DRAWS * int((~seen).sum()) + 1e-6:
        total = float(mean.sum())
        raise ValueError(f"inclusion probabilities sum to {total}; they must sum to {expected}")
    error = (DRAWS * mean * (1 - mean)).clamp(min=1e-12).sqrt()
    off = ((times - DRAWS * mean).abs() - 1e-6)[seen] / error[seen]
    if float(off.max()) > SIGMAS:
        raise ValueError(
            f"a candidate was picked {float(off.max()):.1f} standard deviations off its inclusion"
        )
