"""A decoding step of fixed shape: on CUDA it is recorded once as a graph and then replayed.

Every source has K rows. All that changes between steps lives in buffers: which row of its source
each row continues, the new tokens, the positions they stand at, masks, and the keys and values of
all layers in one tensor. A step changes the table that says where the past of a row lies (or, for
attention that cannot read this, moves the past itself), writes the new keys and values at the
positions, which the device reads, and attends to the smallest of a few windows that holds them all.
So the same kernels with the same arguments serve every step of a window, and a later search of the
same shape only fills the buffers again.

What a model computes this way is compared with what it computes the ordinary way before it is
relied on; where they differ, or anything fails, the ordinary way is what remains.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from cpsbs.backends.triton.attention import works
from cpsbs.backends.triton.layers import table_is_possible
from cpsbs.backends.triton.prefix import NotPossibleError, Prefix
from cpsbs.backends.triton.workspace import Shape, Workspace, rung

ON_CPU = False
"""On a CPU nothing is gained, as rows that have ended are computed too; the tests do it anyway."""

MOST_IDLE = 8
"""Workspaces that are kept for later searches with a model …"""
MOST_IDLE_MEMORY = 0.3
"""… in so much of the device's memory."""

log = logging.getLogger("cpsbs")


class Reference(Protocol):
    """The ordinary way, on a copy of the state with a row a source."""

    vocab_size: int

    def advance(self, parent: Tensor, token: Tensor) -> Tensor:
        """[rows, V] scores."""
        ...


@torch.no_grad()
def begin(
    model: Any,
    kwargs: Mapping[str, Any],
    k: int,
    steps: int,
    reference: Callable[[], Reference],
) -> RecordedSteps | None:
    """Steps of fixed shape after a prompt, or None (and a note in the log) if that is impossible.

    Args:
        model: of transformers.
        kwargs: its inputs after the prompt has been read, a row a source. They stay as they are.
        k: K, the rows of each source from here on.
        steps: how many at most.
        reference: makes what the first steps of a model are compared with.
    """
    with _LOCK:
        kept = _KEPT.setdefault(model, _Kept())
    try:
        prefix = Prefix.of(model, kwargs)
        kept.check_same(model)
        if kept.refused:
            raise NotPossibleError(kept.refused)
        if kept.each is None and prefix.sources > 1:
            with kept.trying:
                if kept.each is None:
                    kept.each = _can_each(model, kept, prefix, k, steps, reference())
        recorded = RecordedSteps(model, kept, prefix, k, steps, each=bool(kept.each))
        if not kept.checked:
            _compare(recorded, prefix, min(steps, 3), reference())
            kept.checked = True
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Any model may come along, and whatever goes wrong with it here, the ordinary way is there.
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, NotPossibleError):
            reason = str(error)
        else:
            kept.refuse(reason)
        if not kept.said:
            log.info("%s is run step by step: %s", type(model).__name__, reason)
        kept.said = True
        return None
    return recorded


class RecordedSteps:
    """The state of one search. Its workspace is free for another one when it is gone."""

    def __init__(
        self, model: Any, kept: _Kept, prefix: Prefix, k: int, steps: int, each: bool
    ) -> None:
        self._model, self._kept, self.k, self._steps = model, kept, k, steps
        self._lease = kept.lease(prefix.shape(k, steps, each))
        self._taken = 0
        """Steps, so far."""
        self._ahead: list[int | None] = []
        """How many more tokens than steps the rows of each source have; None where it rests."""
        self._most_ahead = 0
        self.rewind(prefix)

    @property
    def _longest(self) -> int:
        return self._taken + self._most_ahead

    def _stand(self, ahead: list[int | None]) -> None:
        self._ahead = ahead
        self._most_ahead = max((n for n in ahead if n is not None), default=-self._taken)

    def rewind(self, prefix: Prefix) -> None:
        """Back to before the first step."""
        self._stand([prefix.length - self._taken] * prefix.sources)
        everywhere = torch.arange(prefix.sources, device=prefix.device)
        self._lease.workspace.fill(everywhere, *prefix.held())

    def step(self, parent: Tensor, token: Tensor) -> Tensor:
        """[b·K, V] logits, for row ``parent`` [b, K] of each source extended by ``token`` [b, K].

        The next step overwrites them.
        """
        workspace, sources = self._lease.workspace, len(self._ahead)
        room = workspace.shape.capacity
        if self._longest >= room:
            raise ValueError(f"there is room for {room} tokens only")
        workspace.parent[:sources].copy_(parent)
        workspace.token[:sources].copy_(token)
        scores = workspace.run(self._model, self._longest, strict=not self._kept.checked)
        self._taken += 1
        self._kept.by_table &= not workspace.gave_up_table
        return scores[: sources * self.k]

    def rest(self, places: list[int]) -> None:
        """Nobody asks for the sources in these places any more."""
        resting = set(places)
        self._stand([None if i in resting else n for i, n in enumerate(self._ahead)])
        workspace = self._lease.workspace
        workspace.rest(torch.tensor(places, dtype=torch.int64, device=workspace.shape.device))

    def admits(self, prefix: Prefix) -> bool:
        """Whether other sources, after their prompt, can take places here."""
        shape = self._lease.workspace.shape
        theirs = replace(
            prefix.shape(self.k, self._steps, shape.each),
            sources=shape.sources,
            capacity=shape.capacity,
            source_length=shape.source_length,
        )
        fits = prefix.length + self._steps <= shape.capacity
        fits &= not prefix.cross or prefix.cross[0].shape[2] <= shape.source_length
        return shape.each and theirs == shape and fits

    def join(self, places: list[int], prefix: Prefix) -> None:
        """Other sources take these places."""
        new, ahead = set(places), prefix.length - self._taken
        self._stand([ahead if i in new else n for i, n in enumerate(self._ahead)])
        at = torch.tensor(places, dtype=torch.int64, device=prefix.device)
        self._lease.workspace.fill(at, *prefix.held())

    @property
    def memo(self) -> dict[Any, Any]:
        """What others want to keep as long as the buffers are there."""
        return self._lease.workspace.memo

    def keep_sources(self, sources: Tensor) -> None:
        """Only these sources [b'] go on."""
        if len(sources) == len(self._ahead):
            return
        before = self._lease.workspace
        # Of few sizes, so that there are few graphs. What is left over rests.
        size = min(rung(len(sources)), before.shape.sources)
        filled = torch.cat([sources, sources[-1:].expand(size - len(sources))])
        lease = self._lease
        if size < before.shape.sources:
            lease = self._kept.lease(replace(before.shape, sources=size))
        lease.workspace.take(before, filled, self._longest)
        lease.workspace.rest(torch.arange(len(sources), size, device=sources.device))
        self._stand([self._ahead[i] for i in sources.tolist()])
        self._lease = lease


def _compare(recorded: RecordedSteps, prefix: Prefix, steps: int, reference: Reference) -> None:
    """Raise if the recorded steps are not the model's; then go back to the start.

    Every other row extends the reference's tokens, in the first step those with even numbers, then
    those with odd ones: all go on from their neighbours. The others have other tokens.
    """
    source = torch.arange(prefix.sources, device=prefix.device)
    row = torch.arange(recorded.k, device=prefix.device)
    neighbour = torch.where(row + 1 < recorded.k, row + 1, row - 1).clamp(min=0)
    for n in range(steps):
        # Other tokens in every source and step, so that a mistaken row or position shows.
        token = (7 * source + 3 + n) % reference.vocab_size
        expected = reference.advance(source, token)[:, None]
        same = slice(n % 2 if recorded.k > 1 else 0, None, 2)
        tokens = (token[:, None] + 1 + row) % reference.vocab_size
        tokens[:, same] = token[:, None]
        found = recorded.step(neighbour.expand_as(tokens), tokens)
        found = found.view(*tokens.shape, -1)[:, same].float()
        _agree(found, expected, prefix, n)
    recorded.rewind(prefix)


def _agree(found: Tensor, expected: Tensor, prefix: Prefix, step: int) -> None:
    """Raise if logits [..., V] are not those expected."""
    p = expected.softmax(-1)
    gap = (found.log_softmax(-1) - expected.log_softmax(-1)).abs()
    gap = torch.where(p > 0, p * gap, 0.0).sum(-1).amax()
    # In float32 a GPU may multiply with fewer bits. Large logits are rounded coarsely.
    eps = max(torch.finfo(prefix.dtype).eps, 2**-10 if prefix.device.type == "cuda" else 1e-5)
    scale = expected.masked_fill(expected.isinf(), 0.0).abs().amax()
    if not bool(gap <= eps * (32 + scale)):
        raise ValueError(f"log-probabilities differ by {float(gap):.2g} at step {step + 1}")


def _can_each(
    model: Any, kept: _Kept, prefix: Prefix, k: int, steps: int, reference: Reference
) -> bool | None:
    """Whether the rows of a model can stand at different positions; None if one step cannot tell.

    After a step the first source begins again, and makes the same step while the others go on.
    """
    if steps < 2:
        return None
    by_table = kept.by_table
    try:
        recorded = RecordedSteps(model, kept, prefix, k, steps, each=True)
        source = torch.arange(prefix.sources, device=prefix.device)
        parent = source.new_zeros((prefix.sources, k))
        before = None
        for n in range(2):
            token = (7 * source + 3 + n) % reference.vocab_size
            expected = reference.advance(source, token)
            if before is not None:
                token[0], expected[0] = before[0][0], before[1][0]
                recorded.join([0], prefix.of_sources(slice(1)))
            before = token.clone(), expected.clone()
            found = recorded.step(parent, token[:, None].expand(-1, k)).view(*parent.shape, -1)
            _agree(found[:, 0].float(), expected, prefix, n)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        log.debug("%s has one position for all rows: %s", type(model).__name__, error)
        kept.by_table = by_table
        kept.forget()
        return False
    kept.checked = False  # what was compared before were other graphs
    return True


def _weights_and_hooks(model: Any) -> tuple[Any, ...]:
    """What tells a model from itself after a change; with the dictionaries of its modules alone, as
    every search begins with this.
    """
    parts: list[Any] = []
    modules = [model]
    while modules:
        module = modules.pop()
        own = module.__dict__
        adapter = str(own["_active_adapter"]) if "_active_adapter" in own else None
        parts += (id(module), id(own.get("forward")), adapter, own.get("_disable_adapters"))
        parts += (*module._forward_hooks, "|", *module._forward_pre_hooks, "|")
        for named in (module._parameters, module._buffers):
            parts += [(x.data_ptr(), x.dtype, x.device) for x in named.values() if x is not None]
        modules += [x for x in module._modules.values() if x is not None]
    return tuple(parts)


class _Lease:
    """A workspace in use, until this is gone."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def __del__(self) -> None:
        self.workspace.busy = False


class _Kept:
    """What is known of a model, and its workspaces, the one used last at the end.

    It must not hold on to the model, whose end is its own.
    """

    def __init__(self) -> None:
        self.said, self.checked = False, False
        self.refused: str | None = None
        self.by_table = False
        """Whether the model has read its cache by the table so far, where it could."""
        self.each: bool | None = None
        """Whether its rows can stand at different positions, if that is known."""
        self.trying = threading.Lock()
        self._fingerprint: int | None = None
        self._workspaces: list[Workspace] = []

    def check_same(self, model: Any) -> None:
        """Forget everything if graphs would read other weights than the model's, or compute else.

        That is after ``model.to(…)``, with another adapter, with hooks, with other modules.
        """
        fingerprint = hash((model.config._attn_implementation, _weights_and_hooks(model)))
        with _LOCK:
            if fingerprint != self._fingerprint:
                self._workspaces, self.checked, self.refused = [], False, None
                self.each = None
                self.by_table = model.config._attn_implementation == "sdpa"
            self._fingerprint = fingerprint

    def refuse(self, reason: str) -> None:
        """Do not try again until the model is another one."""
        self.refused = reason
        self.forget()

    def forget(self) -> None:
        """Keep no workspace."""
        with _LOCK:
            self._workspaces = []

    def lease(self, shape: Shape) -> _Lease:
        """An idle workspace of this shape, or a new one."""
        with _LOCK:
            for workspace in self._workspaces:
                if workspace.shape == shape and not workspace.busy:
                    workspace.busy = True
                    self._workspaces.remove(workspace)
                    self._workspaces.append(workspace)
                    return _Lease(workspace)
            most = math.inf
            if shape.device.type == "cuda":
                total = torch.cuda.get_device_properties(shape.device).total_memory
                most = MOST_IDLE_MEMORY * total
            self._drop(MOST_IDLE - 1, most)
        by_table = (
            self.by_table and works() and table_is_possible(shape.device, shape.dtype, shape.k)
        )
        made = None
        try:
            made = Workspace(shape, by_table)
        except torch.OutOfMemoryError:
            with _LOCK:
                self._drop(0, 0)
        # Not before the error is gone, which holds on to what was there already.
        made = made or Workspace(shape, by_table)
        made.busy = True
        with _LOCK:
            self._workspaces.append(made)
        return _Lease(made)

    def _drop(self, count: int, size: float) -> None:
        """Keep so many idle workspaces of so many bytes together, those used last."""
        for workspace in reversed([w for w in self._workspaces if not w.busy]):
            count, size = count - 1, size - workspace.bytes
            if count < 0 or size < 0:
                self._workspaces.remove(workspace)


_KEPT: weakref.WeakKeyDictionary[Any, _Kept] = weakref.WeakKeyDictionary()
_LOCK = threading.RLock()
