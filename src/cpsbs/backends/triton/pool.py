"""The workspaces of each model, kept for later searches, and what has been found out about it."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from cpsbs.backends.triton.attention import works
from cpsbs.backends.triton.fusing import can_fuse, replaced_forward
from cpsbs.backends.triton.kept import Shelf, most_kept, trim
from cpsbs.backends.triton.layers import table_is_possible
from cpsbs.backends.triton.workspace import Shape, Workspace

MANY_ROWS = 129
"""Fused layers choose the same kernels for any number of rows from this one on."""

Kernels = tuple[int, int, bool, bool]
"""What the choice of kernels depends on: K, the rows and whether layers are fused, and whether a
program of the attention handles several rows."""


class Lease:
    """A workspace in use, until this object is gone."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def __del__(self) -> None:
        self.workspace.busy = False
        trim(self.workspace.shape.device)


class Pool:
    """What is known of one model, and its workspaces.

    A pool must not refer to its model, so that it ends with it.
    """

    def __init__(self) -> None:
        self.logged = False
        """Whether it has been logged why the model is run step by step."""
        self.verified = set[Kernels]()
        """The kernels with which fixed steps have agreed with the ordinary ones."""
        self.refused: str | None = None
        """Why the model cannot have fixed steps, if that is known."""
        self.by_table = False
        """Whether the model has read its KV cache by the table so far, where it could."""
        self.fuses = False
        """Whether known layers of the model compute with fewer launches."""
        self.own_positions: bool | None = None
        """Whether the rows of the model can stand at different positions, if that is known."""
        self.trying = threading.Lock()
        """Held by the thread that finds out about ``own_positions``."""
        self._fingerprint: int | None = None
        self.workspaces = Shelf[Workspace]()

    def forget_if_changed(self, model: Any) -> None:
        """Forget everything if graphs would read other weights, or compute something else.

        That is so after ``model.to(…)``, with another adapter, with hooks, with other modules.
        """
        fingerprint = hash((model.config._attn_implementation, _weights_and_hooks(model)))
        with _LOCK:
            if fingerprint != self._fingerprint:
                self.workspaces.clear()
                self.verified, self.refused = set(), None
                self.own_positions = None
                self.by_table = model.config._attn_implementation == "sdpa"
                self.fuses = can_fuse(model)
            self._fingerprint = fingerprint

    def give_up_fusing(self) -> None:
        """Let the model compute its layers as transformers has them, until it changes."""
        self.fuses, self.own_positions = False, None
        self.verified.clear()
        self.workspaces.clear()

    def refuse(self, reason: str) -> None:
        """Give the model no fixed steps until it changes."""
        self.refused = reason
        self.workspaces.clear()

    def lease(self, shape: Shape) -> Lease:
        """Return an idle workspace of this shape, or a new one."""
        made = self.workspaces.take(shape)
        if made is None:
            most_kept(shape.device)  # a wrong setting is an error here, and not when a search ends
            possible = works() and table_is_possible(shape.device, shape.dtype, shape.k)
            made = Workspace(shape, self.by_table and possible)
            self.workspaces.put(made)
        return Lease(made)


def kernels_for(shape: Shape, fuses: bool) -> Kernels:
    """Return what the choice of kernels for a workspace depends on."""
    rows = min(shape.sources * shape.k, MANY_ROWS) if fuses else MANY_ROWS
    return shape.k, rows, fuses, shape.together


def pool_of(model: Any) -> Pool:
    """Return the pool of a model, which lives as long as the model does."""
    with _LOCK:
        return _POOLS.setdefault(model, Pool())


_POOLS: weakref.WeakKeyDictionary[Any, Pool] = weakref.WeakKeyDictionary()
_LOCK = threading.RLock()


def _weights_and_hooks(model: Any) -> tuple[Any, ...]:
    """Return what tells a model from itself after a change.

    It reads the dictionaries of the modules directly, because every search begins with this.
    """
    parts: list[Any] = []
    modules = [model]
    while modules:
        module = modules.pop()
        own = module.__dict__
        adapter = str(own["_active_adapter"]) if "_active_adapter" in own else None
        parts += (id(module), id(replaced_forward(module)), adapter, own.get("_disable_adapters"))
        parts += (*module._forward_hooks, "|", *module._forward_pre_hooks, "|")
        for named in (module._parameters, module._buffers):
            parts += [(x.data_ptr(), x.dtype, x.device) for x in named.values() if x is not None]
        modules += [x for x in module._modules.values() if x is not None]
    return tuple(parts)
