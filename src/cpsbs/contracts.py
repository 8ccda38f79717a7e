"""``check_design``: whether a design keeps the promises that the search and ``estimate`` rely on.

It is for authors of designs; our tests run it on every design we ship. It is not in
``cpsbs.designs`` because it searches a model, and designs know nothing of either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from cpsbs.designs import Candidates, Design, Selection
from cpsbs.estimation.uncertainty import one_beam_variance
from cpsbs.models.table import TableModel
from cpsbs.randomness import Streams
from cpsbs.scores.reading import read
from cpsbs.search.api import search
from cpsbs.search.beams import Beams

DRAWS = 4000
"""How many times each example is drawn."""
SIGMAS = 5.0
"""How many standard errors an average may be off."""
FEW = 8.0
"""How many times the largest deviation the sum of all draws may be off in addition, because sums of
rare events are not normal: Bernstein's bound, at about the same false-alarm rate as ``SIGMAS``."""
ENOUGH = 100
"""How many beams must have an estimate of their variance for it to be checked."""
LENGTH = 3
"""The maximal length of the sequences of the larger model that is searched."""

Fault = tuple[str, str]
"""Which promise is broken, and a sentence that says how."""


def check_design(design: Design, k: int = 3, seed: int = 0) -> None:
    """Check that a design keeps the promises that the search and ``estimate`` rely on.

    The design picks from three small sets of candidates, 4,000 times each. Then whole searches
    draw 4,000 beams from each of two models all of whose sequences are known, one of which has no
    more than K sequences. The design must

    - return tensors of the shapes that ``Selection`` says, with candidates that exist and have a
      probability above zero, none of them twice if it is ``distinct``, and the same ones for the
      same random numbers. Places may stay empty (``present`` false), also by chance: an independent
      coin for each place is a design;
    - be hashable if it is ``recordable``;
    - if it reports inclusion probabilities, give a candidate the same one in every draw, pick
      candidates as often as they say, and have them sum to the expected number of picks, which is
      K only where all places are filled; give the same ones by ``log_inclusion_at``, if it has
      that; and likewise for joint inclusion probabilities of pairs,
      which it must report if it ``needs_joint``;
    - if its beams have weights, make Σ w f unbiased;
    - if it estimates the variance, estimate it at no less than half of what it is, on average, and
      for normalised estimates such that it does not depend on the unit of the weights.

    Averages may differ by 5 standard errors, so that a design that keeps its promises hardly ever
    fails by accident: none of the designs we ship did in 1,200 checks with other seeds. The same
    seed gives the same result.

    Args:
        design: the design object, with the settings that are to be checked.
        k: K, the number of places.
        seed: the seed of the examples and of all draws.

    Raises:
        ValueError: with a line for every promise that is broken.
    """
    faults = dict(_caught(_value_faults(design, k), "recordable(k)"))
    for parents, tokens in ((1, 8), (k, 5), (1, max(1, k - 1))):
        where = f"picking {k} of the {tokens} extensions of each of {parents} parents"
        for promise, sentence in _caught(_step_faults(design, k, parents, tokens, seed), where):
            faults.setdefault(promise, sentence)
    if not faults.keys() & {"fails", "shape", "range"}:  # a design with these cannot be searched
        for model, length in ((_large_model(k, seed), LENGTH), (_small_model(k, seed), 1)):
            searched = _search_faults(design, k, model, length, seed)
            for promise, sentence in _caught(searched, "a search with it"):
                faults.setdefault(promise, sentence)
    if faults:
        lines = "".join(f"\n- {sentence}" for sentence in faults.values())
        raise ValueError(f"the design {design!r} breaks what it promises with k = {k}:{lines}")


def _caught(faults: Iterator[Fault], doing: str) -> Iterator[Fault]:
    """Yield the faults, and an exception on the way as one of them."""
    try:
        yield from faults
    except Exception as error:
        yield "fails", f"{doing} failed with {type(error).__name__}: {error}"


def _value_faults(design: Design, k: int) -> Iterator[Fault]:
    """Yield a fault if recorded steps of the design could not be looked up."""
    if design.recordable(k) and type(design).__hash__ is None:
        yield "hash", "it is recordable but cannot be hashed; make it a frozen dataclass"


def _step_faults(design: Design, k: int, parents: int, tokens: int, seed: int) -> Iterator[Fault]:
    """Yield what is wrong with the design's picks from one set of candidates."""
    generator = torch.Generator().manual_seed(seed)
    parents = parents if design.roots(k) == 1 else design.roots(k)
    candidates = _example(design, parents, tokens, k, generator)
    for joint in (False, True) if k > 1 else (False,):
        selection, again = (
            design.select(candidates, k, _streams(seed + 1), joint) for _ in range(2)
        )
        if misshapen := list(_shape_faults(candidates, selection, k)):
            yield from misshapen
            return
        if not torch.equal(selection.index, again.index):
            yield (
                "random",
                "it picks differently with the same random numbers; draw from streams only",
            )
        yield from _pick_faults(design, candidates, selection)
        if selection.log_inclusion is not None:
            yield from _inclusion_faults(candidates, selection)
            yield from _elsewhere_faults(design, candidates, selection, k)
        if joint and selection.joint_log_inclusion is not None:
            yield from _joint_faults(candidates, selection)
        elif joint and design.needs_joint:
            yield "joint", "needs_joint is true, but select(joint=True) returns no joint inclusion"


def _streams(seed: int) -> Streams:
    """Return the random numbers of all draws."""
    return Streams(torch.Generator().manual_seed(seed), DRAWS, torch.device("cpu"))


def _example(
    design: Design, parents: int, tokens: int, k: int, generator: torch.Generator
) -> Candidates:
    """Return the same candidates for all draws; one is impossible if more than K are left."""
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


def _shape_faults(candidates: Candidates, selection: Selection, k: int) -> Iterator[Fault]:
    """Yield a fault for a tensor of the wrong shape, or for an index outside the candidates."""
    parts: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "index": (selection.index, (DRAWS, k)),
        "present": (selection.present, (DRAWS, k)),
        "log_inclusion": (selection.log_inclusion, (DRAWS, k)),
        "joint_log_inclusion": (selection.joint_log_inclusion, (DRAWS, k, k)),
        **{f"state[{name!r}]": (value, (DRAWS, k)) for name, value in selection.state.items()},
    }
    for name, (value, shape) in parts.items():
        if value is not None and value.shape != shape:
            yield (
                "shape",
                f"{name} has the shape {list(value.shape)}; for {DRAWS} sources and k = {k} it "
                f"must be {list(shape)}",
            )
            return
    count = candidates.shape[1] * candidates.shape[2]
    outside = selection.index[(selection.index < 0) | (selection.index >= count)]
    if len(outside):
        yield (
            "range",
            f"index has {int(outside[0])}, which is outside 0 to P·V − 1 = {count - 1}; empty "
            "places must name a candidate too",
        )


def _pick_faults(design: Design, candidates: Candidates, selection: Selection) -> Iterator[Fault]:
    """Yield a fault for picks that are impossible or repeated."""
    index, present = selection.index, selection.present
    possible = candidates.chunks.scores[0].flatten() > -math.inf
    if not bool(present.any()):
        yield "empty", f"it picked none of {int(possible.sum())} candidates in {DRAWS} draws"
    if not bool(possible[index[present]].all()):
        yield "zero", "it picked a candidate of probability zero"
    if design.distinct and bool(_twice(index[..., None], present).any()):
        yield "twice", "it picked a candidate twice, but distinct is true"


def _twice(items: Tensor, present: Tensor) -> Tensor:
    """Return [B] whether two of the K places hold the same item [B, K, m]."""
    same = (items[:, :, None] == items[:, None, :]).all(-1)
    return (same & _both(present)).triu(1).flatten(1).any(-1)


def _both(present: Tensor) -> Tensor:
    """Return [B, K, K] whether both of two places are filled."""
    return present[:, :, None] & present[:, None, :]


def _inclusion_faults(candidates: Candidates, selection: Selection) -> Iterator[Fault]:
    """Yield where picks disagree with their inclusion probabilities."""
    assert selection.log_inclusion is not None
    here = selection.present
    number = candidates.shape[1] * candidates.shape[2]
    index, pi = selection.index[here], selection.log_inclusion[here].exp()
    what = "the inclusion probability of a candidate"
    yield from _frequency_faults("inclusion", what, index, pi, number)
    times = torch.bincount(index, minlength=number).double()
    total = float((_sums(index, pi, number) / times.clamp(min=1)).sum())
    picked = here.sum(-1).double()
    missing, error = float(picked.mean()) - total, float(picked.std()) / math.sqrt(DRAWS)
    # Candidates that never came up may account for what is missing, but not much each.
    unseen = 20 / DRAWS * int((times == 0).sum())
    if not -SIGMAS * error - 1e-6 < missing < unseen + SIGMAS * error + 1e-6:
        yield (
            "sum",
            f"the inclusion probabilities of the candidates sum to {total:.6g}, but "
            f"{float(picked.mean()):.6g} are picked on average; these must be the same",
        )


def _elsewhere_faults(
    design: Design, candidates: Candidates, selection: Selection, k: int
) -> Iterator[Fault]:
    """Yield a fault if ``log_inclusion_at`` contradicts what the design reports of its picks."""
    found = design.log_inclusion_at(candidates, k, selection.index, selection)
    if found is None or selection.log_inclusion is None:
        return
    here = selection.present
    if not torch.allclose(found[here].exp(), selection.log_inclusion[here].exp(), atol=1e-9):
        yield (
            "elsewhere",
            "log_inclusion_at gives a picked candidate another inclusion probability than select",
        )


def _joint_faults(candidates: Candidates, selection: Selection) -> Iterator[Fault]:
    """Yield where pairs of picks disagree with their joint inclusion probabilities."""
    assert selection.joint_log_inclusion is not None
    number = candidates.shape[1] * candidates.shape[2]
    index, pairs = selection.index, selection.joint_log_inclusion
    if selection.log_inclusion is not None:
        own = pairs.diagonal(dim1=1, dim2=2) - selection.log_inclusion
        if not bool((own[selection.present].abs() < 1e-9).all()):
            yield (
                "diagonal",
                "the joint inclusion probability of a candidate with itself, on the diagonal, is "
                "not its inclusion probability",
            )
    both = _both(selection.present) & ~torch.eye(pairs.shape[-1], dtype=torch.bool, device="cpu")
    code = (index[:, :, None] * number + index[:, None, :])[both]
    what = "the joint inclusion probability of a pair"
    yield from _frequency_faults("joint", what, code, pairs[both].exp(), number**2)


def _frequency_faults(
    promise: str, what: str, item: Tensor, pi: Tensor, number: int
) -> Iterator[Fault]:
    """Yield where the frequencies of the items [n], below ``number``, disagree with pi [n]."""
    if not bool((pi <= 1 + 1e-9).all()):
        yield promise, f"{what} is {float(pi[~(pi <= 1 + 1e-9)][0]):.6g}; it must be at most 1"
        return
    times = torch.bincount(item, minlength=number).double()
    mean = _sums(item, pi, number) / times.clamp(min=1)
    spread = float((pi - mean[item]).abs().max()) if len(pi) else 0.0
    if spread > 1e-9:
        yield f"{promise} varies", f"{what} varies by {spread:.3g} from draw to draw"
    allowed = SIGMAS * (DRAWS * mean * (1 - mean)).clamp(min=0.0).sqrt() + FEW
    # Items that are certain must come up in every draw.
    allowed = torch.where(mean > 1 - 1e-12, 1e-6, allowed)
    excess = torch.where(times > 0, (times - DRAWS * mean).abs() / allowed, 0.0)
    worst = int(excess.argmax())
    if float(excess[worst]) > 1:
        yield (
            f"{promise} frequency",
            f"{what} is {float(mean[worst]):.4g}, but it came up in {int(times[worst])} of {DRAWS} "
            f"draws; {DRAWS * float(mean[worst]):.0f} ± {float(allowed[worst]):.0f} were expected",
        )


def _sums(item: Tensor, values: Tensor, number: int) -> Tensor:
    """Return [number] the sum of the values [n] of each item [n]."""
    zeros = torch.zeros(number, dtype=torch.float64, device="cpu")
    return zeros.index_add_(0, item, values.double())


def _search_faults(
    design: Design, k: int, model: TableModel, length: int, seed: int
) -> Iterator[Fault]:
    """Yield what is wrong with many beams of a model."""
    copies = TableModel(model.tables * DRAWS, model.eos[0])
    beams = search(copies, k, design, max_length=length, generator=_streams(seed + 2), joint=k > 1)
    if design.distinct and bool(_twice(beams.sequences, beams.present).any()):
        yield "sequences", "a beam has a sequence twice, but distinct is true"
    if beams.log_weight is not None:
        yield from _estimate_faults(design, model, beams, length, seed)
    # A design with other weights may have none for some settings, as with anneal=0.
    elif design.estimates and type(design).log_weight is Design.log_weight:
        yield (
            "weights",
            "estimates is true, but its beams have no weights: return log_inclusion, override "
            "log_weight, or set estimates = False",
        )


def _large_model(k: int, seed: int) -> TableModel:
    """Return a model with many more than K sequences, none of them very improbable.

    Improbable ones have large weights in some designs, so large that 4,000 beams would not do.
    """
    vocabulary = max(3, math.ceil((4 * k) ** (1 / LENGTH)) + 1)
    (table,) = TableModel.random(vocabulary, LENGTH, seed=seed).tables
    even = 1 / vocabulary
    return TableModel({y: [(p + even) / 2 for p in row] for y, row in table.items()}, eos=0)


def _small_model(k: int, seed: int) -> TableModel:
    """Return a model with K − 1 sequences of one token, but at least one."""
    return TableModel.random(max(1, k - 1), 1, seed=seed)


def _estimate_faults(
    design: Design, model: TableModel, beams: Beams, length: int, seed: int
) -> Iterator[Fault]:
    """Yield what is wrong with estimates of a few expectations, which are known."""
    assert beams.log_weight is not None
    weight = beams.log_weight.exp()
    if not bool((weight < math.inf).all()):
        yield "finite", "a weight is NaN or infinite; all must be finite"
        return
    names, f, truth = _functions(model, length, seed)
    digits = model.vocab_size ** torch.arange(beams.sequences.shape[-1], device="cpu")
    values = f[(beams.sequences * digits).sum(-1)] * beams.present[..., None]
    estimates = (weight[..., None] * values).sum(1)
    off = estimates.mean(0) - truth
    allowed = _allowed(estimates - truth) + 1e-9
    worst = int((off.abs() / allowed).argmax())
    if not float(off[worst].abs()) <= float(allowed[worst]):
        yield (
            "bias",
            f"Σ w f is biased: for f = {names[worst]} its mean over {DRAWS} beams is "
            f"{float(estimates[:, worst].mean()):.4g}, but the expectation is "
            f"{float(truth[worst]):.4g}, and they may differ by {float(allowed[worst]):.2g}",
        )
    variance, freedom = one_beam_variance(beams, weight, values, None, estimates)
    if freedom.shape != (DRAWS,) or (variance is not None and variance.shape != estimates.shape):
        yield "variance shape", "variance must return [B, d] variances and [B] degrees of freedom"
    elif variance is not None:
        yield from _variance_faults(names, variance, (estimates - truth).square())
        yield from _unit_faults(design, beams, weight, values)


def _unit_faults(design: Design, beams: Beams, weight: Tensor, values: Tensor) -> Iterator[Fault]:
    """Yield a fault if the variance of normalised estimates depends on the unit of p."""
    norm = weight.sum(-1, keepdim=True).clamp(min=1e-300)
    centred = values - (weight[..., None] * values).sum(1, keepdim=True) / norm[..., None]
    centred = centred * beams.present[..., None]
    smaller = replace(beams, log_prob=beams.log_prob - 1)
    one, other = (
        design.variance(drawn, weight / norm, centred, norm[:, 0].log() - shift)[0]
        for drawn, shift in ((beams, 0), (smaller, 1))
    )
    if one is None or other is None:  # the design knows no variance of normalised estimates
        return
    if not torch.allclose(one, other, rtol=1e-6, atol=1e-12, equal_nan=True):
        yield (
            "variance unit",
            "the variance of a normalised estimate changes when all probabilities are divided by "
            "e, which must not matter: see log_norm of Design.variance",
        )


def _allowed(deviation: Tensor) -> Tensor:
    """Return [d] how far the mean of deviations [n, d] may be from zero."""
    count = len(deviation)
    error = deviation.std(0) / math.sqrt(count)
    return SIGMAS * error + FEW / count * deviation.abs().amax(0)


def _functions(model: TableModel, length: int, seed: int) -> tuple[list[str], Tensor, Tensor]:
    """Return the names of three functions of sequences, their values [codes, 3] and means [3].

    The code of a sequence has its tokens as digits, and zeros after its end, which is token 0.
    """
    sequences = model.sequences(length)
    base = model.vocab_size
    codes = [sum(token * base**i for i, token in enumerate(y)) for y in sequences]
    f = torch.zeros((base**length, 3), dtype=torch.float64, device="cpu")
    f[codes, 0] = 1.0
    f[codes, 1] = torch.tensor([float(len(y)) for y in sequences], dtype=f.dtype, device="cpu")
    f[codes, 2] = torch.rand(
        len(codes), generator=torch.Generator().manual_seed(seed), dtype=f.dtype, device="cpu"
    )
    p = torch.tensor(list(sequences.values()), dtype=f.dtype, device="cpu")
    return ["1", "the length", "an arbitrary function"], f, p @ f[codes]


def _variance_faults(names: list[str], variance: Tensor, squares: Tensor) -> Iterator[Fault]:
    """Yield where the variances [B, d] are too small on average for the squared errors [B, d]."""
    for i, name in enumerate(names):
        known = ~variance[:, i].isnan()
        estimated, real = variance[known, i], squares[known, i]
        over = estimated - real / 2
        if len(over) >= ENOUGH and float(over.mean()) < -float(_allowed(over)) - 1e-12:
            yield (
                "variance",
                f"the variance is estimated at {float(estimated.mean()):.3g} on average for "
                f"f = {name}, but it is {float(real.mean()):.3g}; the estimate must be at least "
                "half of that",
            )
