"""Teacher forcing: the log-probabilities of the sequences of a beam, computed again.

A search runs without gradients. To train a model on what was drawn, the log-probabilities of the
sequences are computed once more, token by token given the tokens before it, under the same
distribution as in the search: temperature and nucleus are those of the beams, processors those of
the model. The result equals ``Beams.log_prob`` up to rounding, and autograd goes through it.

Memory is bounded: sequences are taken in blocks, and with ``checkpoint`` a block keeps nothing for
the backward pass but its result, which is then computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed

from cpsbs.models.base import ForcedModel, SequenceModel
from cpsbs.search.beams import Beams
from cpsbs.search.recursion import processed

BLOCK = {"cpu": 2**24, "cuda": 2**27}
"""How many scores are computed at once by default, by type of device; each takes four bytes, and
some copies."""


@dataclass(frozen=True)
class TokenScores:
    """What a model says of every token of the sequences of a beam, with gradients."""

    log_prob: Tensor
    """[B, K, T] log p(y_t | y_<t); 0 after the end of a sequence and in empty places."""
    entropy: Tensor | None = None
    """[B, K, T] the entropy of p(· | y_<t), if it was asked for; 0 as above."""
    divergence: Tensor | None = None
    """[B, K, T] KL(p(· | y_<t) ‖ q(· | y_<t)) to another model q, if there is one; 0 as above."""


def log_prob(
    model: SequenceModel, beams: Beams, *, block: int | None = None, checkpoint: bool = False
) -> Tensor:
    """Return [B, K] log p(y) of the sequences of beams, differentiable with respect to the model.

    It equals ``beams.log_prob`` up to rounding, if the model is the one that was searched and has
    not changed since; that is 0 instead of -inf in empty places. Nothing is drawn, and dropout is
    switched off as it was in the search, because with dropout the draw and the gradient would be
    of different models.

    Args:
        model: the model that was searched, or one with the same sources: a ``TransformersModel``, a
            ``FunctionModel``, or any model whose scores have gradients.
            ``TextModel.sequence_model(texts)`` makes one for texts.
        beams: the result of ``search``. Temperature and nucleus are theirs.
        block: how many scores (sequences × tokens × vocabulary) to compute at once; by default 2²⁴
            on a CPU and 2²⁷ on a GPU.
        checkpoint: whether to keep nothing of a block for the backward pass but its result, and to
            compute the block again when it is needed. That bounds memory by one block, and costs a
            second forward pass.

    Models without ``force`` (``cpsbs.models.base.ForcedModel``) go step by step, and ``block`` and
    ``checkpoint`` change nothing.
    """
    return token_scores(model, beams, block=block, checkpoint=checkpoint).log_prob.sum(-1)


def token_scores(
    model: SequenceModel,
    beams: Beams,
    *,
    entropy: bool = False,
    other: SequenceModel | None = None,
    other_temperature: float | None = None,
    block: int | None = None,
    checkpoint: bool = False,
) -> TokenScores:
    """Return log p of every token of the sequences of beams, differentiable.

    Args:
        model: as for ``log_prob``.
        beams: as for ``log_prob``.
        entropy: whether to return the entropies of the tokens' distributions too.
        other: a model q of the same sources, to which the divergences are wanted; gradients do not
            go through it.
        other_temperature: the temperature of q; by default that of the beams. q is never truncated
            to a nucleus, because the divergence would be infinite.
        block: as for ``log_prob``.
        checkpoint: as for ``log_prob``.
    """
    _check(model, beams, "model")
    settings = beams.settings
    tau, nucleus = settings.get("temperature", 1.0), settings.get("nucleus")
    own = (tau, nucleus)
    theirs = (tau if other_temperature is None else other_temperature, None)
    if other is not None:
        _check(other, beams, "other")
        if other is model:
            raise ValueError(
                "model and other are one object; make two, because a model holds the state of one "
                "search"
            )
    if isinstance(model, ForcedModel) and (other is None or isinstance(other, ForcedModel)):
        parts = _forced(model, other, beams, own, theirs, entropy, block, checkpoint)
    else:
        parts = _stepped(model, other, beams, own, theirs, entropy)
    places, values = zip(*parts, strict=True)
    where = tuple(torch.cat(x) for x in zip(*places, strict=True))
    table = beams.log_prob.new_zeros((*beams.sequences.shape, 3))
    found = table.index_put(where, torch.cat(values).to(table.dtype)).unbind(-1)
    return TokenScores(found[0], found[1] if entropy else None, None if other is None else found[2])


Part = tuple[tuple[Tensor, ...], Tensor]
"""Places (source, sequence, token) of n tokens, and [n, 3] log p, entropy and divergence there."""

Settings = tuple[float, float | None]
"""Temperature and nucleus."""


def _forced(
    model: ForcedModel,
    other: ForcedModel | None,
    beams: Beams,
    own: Settings,
    theirs: Settings,
    entropy: bool,
    block: int | None,
    checkpoint: bool,
) -> Iterator[Part]:
    """Yield the scores of blocks of sequences, each from one forward pass."""
    for source, place in _blocks(model, beams, block):
        length = int(beams.lengths[source, place].max())
        tokens = beams.sequences[source, place, :length]

        def values(source: Tensor, tokens: Tensor) -> Tensor:
            log_p = _normalised(model.force(source, tokens), *own)
            log_q = None
            if other is not None:
                with torch.no_grad():
                    log_q = _normalised(other.force(source, tokens), *theirs)
            return _columns(log_p, tokens, log_q, entropy)

        if checkpoint and torch.is_grad_enabled():
            found: Tensor = recomputed(values, source, tokens, use_reentrant=False)
        else:
            found = values(source, tokens)
        step = torch.arange(length, device=source.device)
        here = step < beams.lengths[source, place][:, None]
        row, step = here.nonzero().unbind(-1)
        yield (source[row], place[row], step), found[row, step]


def _blocks(
    model: SequenceModel, beams: Beams, block: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the sources [n] and places [n] of the sequences of each block.

    Sources whose longest sequences are of similar length come together, so that little is padding;
    inside a block sources ascend.
    """
    size = BLOCK.get(beams.sequences.device.type, BLOCK["cpu"]) if block is None else block
    if size < 1:
        raise ValueError(f"block is {block}; it must be at least 1")
    lengths = torch.where(beams.present, beams.lengths, 0)
    order = lengths.amax(-1).argsort(descending=True, stable=True).tolist()
    present, longest = beams.present.tolist(), lengths.amax(-1).tolist()
    rows = [(b, i) for b in order for i, here in enumerate(present[b]) if here]
    vocabulary = max(1, model.vocab_size)
    while rows:
        # The first sequence has the longest source, so that none of the block is longer.
        count = max(1, size // (vocabulary * longest[rows[0][0]]))
        some, rows = sorted(rows[:count]), rows[count:]
        both = torch.tensor(some, dtype=torch.int64, device=beams.sequences.device)
        yield both[:, 0], both[:, 1]


def _stepped(
    model: SequenceModel,
    other: SequenceModel | None,
    beams: Beams,
    own: Settings,
    theirs: Settings,
    entropy: bool,
) -> Iterator[Part]:
    """Yield the scores of one step after the other, for models that cannot ``force``."""
    scores = model.start()
    with torch.no_grad():
        others = None if other is None else other.start()
    row = torch.arange(len(beams), device=scores.device)[:, None].expand(beams.log_prob.shape)
    for t in range(beams.sequences.shape[-1]):
        here = beams.present & (beams.lengths > t)
        if t > 0:
            parent, token = row[here], beams.sequences[..., t - 1][here]
            if len(parent) == 0:
                return
            scores = model.advance(parent, token)
            with torch.no_grad():
                others = None if other is None else other.advance(parent, token)
            row = (here.flatten().cumsum(0) - 1).view(here.shape)
        mine = row[here]
        log_p = _normalised(scores, *own)[mine]
        log_q = None if others is None else _normalised(others, *theirs)[mine]
        source, place = here.nonzero().unbind(-1)
        found = _columns(log_p, beams.sequences[..., t][here], log_q, entropy)
        yield (source, place, torch.full_like(source, t)), found


def _normalised(scores: Tensor, temperature: float, nucleus: float | None) -> Tensor:
    """Return [..., V] log-probabilities of the next token."""
    return processed(scores, temperature, nucleus).log_softmax(-1)


def _columns(log_p: Tensor, tokens: Tensor, log_q: Tensor | None, entropy: bool) -> Tensor:
    """Return [..., 3] log p of the tokens, and entropy and divergence if they are wanted."""
    own = log_p.gather(-1, tokens[..., None])[..., 0]
    nothing = torch.zeros_like(own)
    if not entropy and log_q is None:
        return torch.stack([own, nothing, nothing], dim=-1)
    # Where p is zero its logarithm is -inf, whose gradient would be NaN.
    finite = log_p.masked_fill(log_p.isneginf(), 0.0)
    p = log_p.exp()
    of_entropy = -(p * finite).sum(-1) if entropy else nothing
    of_divergence = nothing if log_q is None else _divergence(p, finite, log_q)
    return torch.stack([own, of_entropy, of_divergence], dim=-1)


def _divergence(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return [...] Σ_v p log(p/q), where terms with p = 0 count nothing."""
    gap = torch.where(p > 0, log_p - log_q, 0.0)
    return (p * gap).sum(-1)


def _check(model: SequenceModel, beams: Beams, name: str) -> None:
    """Refuse what has no sources, or other ones than the beams."""
    if not hasattr(model, "sources"):
        raise ValueError(
            f"{name} is a {type(model).__name__}; it must be a model with the sources of the "
            "beams, such as TransformersModel(model, **inputs) or TextModel.sequence_model(texts)"
        )
    here, there = beams.sequences.device, torch.device(model.device)
    if here.type != there.type:
        raise ValueError(f"the beams are on {here}, and {name} on {there}; move them by beams.to()")
    if model.sources != len(beams):
        raise ValueError(
            f"{name} has {model.sources} sources; it must have those of the beams, {len(beams)}"
        )
