"""Decoding steps of fixed shape, which are recorded as CUDA graphs once and then replayed.

Every source has K rows. All that changes between steps lives in buffers: which row of its source
each row extends, the new tokens, the positions they stand at, masks, and the keys and values of all
layers in one tensor. A step changes the table that says where the past of a row lies (or, for
attention that cannot read this table, moves the past itself), writes the new keys and values at the
positions, which the device reads, and attends to the smallest of a few windows that holds them all.
So the same kernels with the same arguments serve every step of a window, and a later search of the
same shape only fills the buffers again.

What a model computes this way is compared with its ordinary steps before it is relied on. Where
they differ, or anything fails, the search goes on with the ordinary steps. Without CUDA the steps
are the same but are not recorded, which gains nothing: rows that have ended are computed too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cpsbs.backends.base import OrdinarySteps
from cpsbs.backends.triton.pool import Kernels, Pool, kernels_for, pool_of
from cpsbs.backends.triton.prefilled import NotPossibleError, PrefilledState
from cpsbs.backends.triton.workspace import rung

log = logging.getLogger("cpsbs")


@torch.no_grad()
def begin(
    model: Any,
    inputs: Mapping[str, Any],
    k: int,
    steps: int,
    reference: Callable[[], OrdinarySteps],
) -> FixedShapeSteps | None:
    """Return steps of fixed shape after the prefill, or None where they are impossible.

    The reason is logged once for each model. For the arguments see ``Backend.fixed_steps``.
    """
    pool = pool_of(model)
    try:
        state = PrefilledState.of(model, inputs)
        pool.forget_if_changed(model)
        if pool.refused:
            raise NotPossibleError(pool.refused)
        try:
            fixed = _verified(model, pool, state, k, steps, reference)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if not pool.fuses:
                raise
            name = type(model).__name__
            log.info("the layers of %s are not fused: %s: %s", name, type(error).__name__, error)
            pool.give_up_fusing()
            fixed = _verified(model, pool, state, k, steps, reference)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Any model may come along. Whatever goes wrong with it here, its ordinary steps remain.
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, NotPossibleError):
            reason = str(error)
        else:
            pool.refuse(reason)
        if not pool.logged:
            log.info("%s is run step by step: %s", type(model).__name__, reason)
        pool.logged = True
        return None
    return fixed


def _verified(
    model: Any,
    pool: Pool,
    state: PrefilledState,
    k: int,
    steps: int,
    reference: Callable[[], OrdinarySteps],
) -> FixedShapeSteps:
    """Return steps that agree with the model's ordinary ones, or raise an exception."""
    if pool.own_positions is None and state.sources > 1:
        with pool.trying:
            if pool.own_positions is None:
                pool.own_positions = _can_differ(model, pool, state, k, steps, reference())
    fixed = FixedShapeSteps(model, pool, state, k, steps, bool(pool.own_positions))
    kernels = fixed.kernels
    if kernels not in pool.verified:
        _compare(fixed, state, min(steps, 3), reference())
        pool.verified.add(kernels)
    fixed.strict = False
    return fixed


class FixedShapeSteps:
    """The steps of one search, see ``FixedSteps``; its workspace is free again when it is gone."""

    def __init__(
        self,
        model: Any,
        pool: Pool,
        state: PrefilledState,
        k: int,
        steps: int,
        own_positions: bool,
    ) -> None:
        self._model, self._pool, self.k, self._steps = model, pool, k, steps
        self.strict = True
        """Whether a step that cannot be recorded is an error, as long as steps are tried out."""
        shape = state.shape(k, steps, own_positions)
        self._lease = pool.lease(replace(shape, fuses=pool.fuses))
        self._taken = 0
        """The number of steps so far."""
        self._ahead: list[int | None] = []
        """How many more tokens than steps the rows of each source have; None if it is idle."""
        self._most_ahead = 0
        self.rewind(state)

    @property
    def kernels(self) -> Kernels:
        """What the choice of kernels depends on."""
        workspace = self._lease.workspace
        return kernels_for(workspace.shape, workspace.fuses)

    @property
    def _longest(self) -> int:
        """The most tokens of a row."""
        return self._taken + self._most_ahead

    def _set_ahead(self, ahead: list[int | None]) -> None:
        self._ahead = ahead
        self._most_ahead = max((n for n in ahead if n is not None), default=-self._taken)

    def rewind(self, state: PrefilledState) -> None:
        """Return to the state before the first step."""
        self._set_ahead([state.length - self._taken] * state.sources)
        everywhere = torch.arange(state.sources, device=state.device)
        self._lease.workspace.fill(everywhere, *state.tensors())

    def step(self, parent: Tensor, token: Tensor) -> Tensor:
        """Return the logits [b·K, V] after one more token; the next step overwrites them."""
        workspace, sources = self._lease.workspace, len(self._ahead)
        room = workspace.shape.capacity
        if self._longest >= room:
            raise ValueError(
                f"the rows have {self._longest} tokens and there is room for {room} tokens only; "
                "ask fix_rows() for more steps"
            )
        workspace.parent[:sources].copy_(parent)
        workspace.token[:sources].copy_(token)
        scores = workspace.run(self._model, self._longest, strict=self.strict)
        self._taken += 1
        self._pool.by_table &= not workspace.gave_up_table
        return scores[: sources * self.k]

    def retire(self, places: list[int]) -> None:
        """Let the sources in these places be idle, so that no step attends to their past."""
        idle = set(places)
        self._set_ahead([None if i in idle else n for i, n in enumerate(self._ahead)])
        workspace = self._lease.workspace
        workspace.retire(torch.tensor(places, dtype=torch.int64, device=workspace.shape.device))

    def admits(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether other sources of the same model, after their prefill, fit in here."""
        try:
            state = PrefilledState.of(self._model, inputs)
        except NotPossibleError:
            return False
        shape = self._lease.workspace.shape
        theirs = replace(
            state.shape(self.k, self._steps, shape.own_positions),
            sources=shape.sources,
            capacity=shape.capacity,
            source_length=shape.source_length,
            together=shape.together,
            fuses=shape.fuses,
        )
        fits = state.length + self._steps <= shape.capacity
        fits &= not state.cross or state.cross[0].shape[2] <= shape.source_length
        return shape.own_positions and theirs == shape and fits

    def join(self, places: list[int], inputs: Mapping[str, Any]) -> None:
        """Let other sources, which ``admits`` has accepted, take these places."""
        self._put(places, PrefilledState.of(self._model, inputs))

    def _put(self, places: list[int], state: PrefilledState) -> None:
        new, ahead = set(places), state.length - self._taken
        self._set_ahead([ahead if i in new else n for i, n in enumerate(self._ahead)])
        at = torch.tensor(places, dtype=torch.int64, device=state.device)
        self._lease.workspace.fill(at, *state.tensors())

    @property
    def memo(self) -> dict[Any, Any]:
        """A dictionary that lives as long as the buffers do."""
        return self._lease.workspace.memo

    def keep_sources(self, sources: Tensor) -> None:
        """Drop all sources but these [b'], and move the others together."""
        if len(sources) == len(self._ahead):
            return
        before = self._lease.workspace
        # Workspaces come in few sizes, so that there are few graphs. Places left over are idle.
        size = min(rung(len(sources)), before.shape.sources)
        filled = torch.cat([sources, sources[-1:].expand(size - len(sources))])
        lease = self._lease
        if size < before.shape.sources:
            shape = replace(before.shape, sources=size, fuses=before.fuses)
            # Fewer rows may have other kernels, which are used only once they have been compared.
            if kernels_for(shape, shape.fuses) not in self._pool.verified:
                shape = replace(shape, fuses=False)
            lease = self._pool.lease(shape)
        lease.workspace.take(before, filled, self._longest)
        lease.workspace.retire(torch.arange(len(sources), size, device=sources.device))
        self._set_ahead([self._ahead[i] for i in sources.tolist()])
        self._lease = lease


def _compare(
    fixed: FixedShapeSteps, state: PrefilledState, steps: int, reference: OrdinarySteps
) -> None:
    """Raise if fixed steps give other logits than ordinary ones; then rewind.

    The reference has one row a source, and the fixed steps K. In the first step the rows with even
    numbers get the reference's tokens, in the next one those with odd numbers, and so on, and every
    row extends its neighbour; so each of these rows holds what the reference holds. All others get
    other tokens.
    """
    source = torch.arange(state.sources, device=state.device)
    row = torch.arange(fixed.k, device=state.device)
    neighbour = torch.where(row + 1 < fixed.k, row + 1, row - 1).clamp(min=0)
    for n in range(steps):
        # Every source and step gets another token, so that a mistaken row or position shows.
        token = (7 * source + 3 + n) % reference.vocab_size
        expected = reference.advance(source, token)[:, None]
        same = slice(n % 2 if fixed.k > 1 else 0, None, 2)
        tokens = (token[:, None] + 1 + row) % reference.vocab_size
        tokens[:, same] = token[:, None]
        found = fixed.step(neighbour.expand_as(tokens), tokens)
        found = found.view(*tokens.shape, -1)[:, same].float()
        _require_agreement(found, expected, state, n)
    fixed.rewind(state)


def _require_agreement(found: Tensor, expected: Tensor, state: PrefilledState, step: int) -> None:
    """Raise if Σ p |log p' − log p| between logits [..., V] is more than rounding explains."""
    p = expected.softmax(-1)
    gap = (found.log_softmax(-1) - expected.log_softmax(-1)).abs()
    gap = torch.where(p > 0, p * gap, 0.0).sum(-1).amax()
    # In float32 a GPU may multiply with fewer bits. Large logits are rounded coarsely.
    eps = max(torch.finfo(state.dtype).eps, 2**-10 if state.device.type == "cuda" else 1e-5)
    scale = expected.masked_fill(expected.isinf(), 0.0).abs().amax()
    if not bool(gap <= eps * (32 + scale)):
        raise ValueError(f"log-probabilities differ by {float(gap):.2g} at step {step + 1}")


def _can_differ(
    model: Any, pool: Pool, state: PrefilledState, k: int, steps: int, reference: OrdinarySteps
) -> bool | None:
    """Return whether rows of a model can stand at different positions, or None if that is open.

    One step cannot tell. After the first one, the first source begins again and makes the same step
    while the others go on.
    """
    if steps < 2:
        return None
    by_table = pool.by_table
    try:
        fixed = FixedShapeSteps(model, pool, state, k, steps, own_positions=True)
        source = torch.arange(state.sources, device=state.device)
        parent = source.new_zeros((state.sources, k))
        before = None
        for n in range(2):
            token = (7 * source + 3 + n) % reference.vocab_size
            expected = reference.advance(source, token)
            if before is not None:
                token[0], expected[0] = before[0][0], before[1][0]
                fixed._put([0], state.of_sources(slice(1)))
            before = token.clone(), expected.clone()
            found = fixed.step(parent, token[:, None].expand(-1, k)).view(*parent.shape, -1)
            _require_agreement(found[:, 0].float(), expected, state, n)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        log.debug("%s has one position for all rows: %s", type(model).__name__, error)
        pool.by_table = by_table
        pool.workspaces.clear()
        return False
    pool.verified.clear()  # what was compared before were other graphs
    return True
