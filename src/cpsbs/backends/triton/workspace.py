"""The buffers of decoding steps of fixed shape, and the CUDA graphs that work on them."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from cpsbs.backends.triton import kernels
from cpsbs.backends.triton.attention import one_query_attention
from cpsbs.backends.triton.fusing import fused_layers
from cpsbs.backends.triton.graphs import GraphMemory, capture
from cpsbs.backends.triton.layers import Clock, FixedRowLayer, RowLayer, SharedLayer, TableLayer
from cpsbs.backends.triton.logits import Logits
from cpsbs.backends.triton.reorder import reorder

log = logging.getLogger("cpsbs")


@dataclass(frozen=True)
class Shape:
    """What the sizes of the buffers, and the graphs, depend on."""

    sources: int
    k: int
    capacity: int
    """The most tokens of a row, with the prompt"""
    states: tuple[int, int, int]
    """Number of tensors of keys and values in all layers, heads, dimension of a head"""
    cross: tuple[int, int, int]
    """The same for the cross-attention"""
    source_length: int
    """Tokens of the encoder's input; 0 without an encoder"""
    hidden: int
    """Dimension of the encoder's states"""
    dtype: torch.dtype
    device: torch.device
    stream: int
    """The CUDA stream that the buffers are used on, where nothing uses them at the same time"""
    own_positions: bool
    """Whether the model is told a position for each row, or one for all of them"""
    together: bool
    """Whether a program of the attention handles several rows of a source"""
    fuses: bool = False
    """Whether known layers of the model compute with fewer launches (``fusing``)"""


class Workspace:
    """The buffers of one shape, and their graphs, one for each window of positions.

    ``by_table`` says how the KV cache lies in them, see ``cpsbs.backends.triton.layers``.
    """

    def __init__(self, shape: Shape, by_table: bool) -> None:
        self.shape, self.busy, self.by_table = shape, False, by_table
        self.fuses = shape.fuses
        """Whether layers are fused; no longer if a step with fused ones could not be recorded."""
        self.gave_up_table = False
        rows = shape.sources * shape.k
        count, heads, dim = shape.states
        cross_count, cross_heads, cross_dim = shape.cross

        def zeros(*size: int, dtype: torch.dtype = shape.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=shape.device)

        # A later search may write to them outside of an inference mode that this one is in.
        with torch.inference_mode(False):
            self.parent = zeros(shape.sources, shape.k, dtype=torch.int64)
            self.token = zeros(shape.sources, shape.k, dtype=torch.int64)
            position = zeros(shape.sources, dtype=torch.int64)
            self.clock = Clock(position, shape.capacity, shape.own_positions)
            # The last position that the rows of a source may reach; idle ones stay at the first.
            self.limit = zeros(shape.sources, dtype=torch.int64)
            self.offset = zeros(rows, 1, dtype=torch.int64)
            # The table: in which row of its source each position of a row lies.
            self.place = zeros(shape.sources, shape.k, shape.capacity, dtype=torch.int32)
            self.mask = zeros(rows, 1, 1, shape.capacity)
            self.states = zeros(count, rows, heads, shape.capacity, dim)
            self.cross_mask = zeros(rows, 1, 1, shape.source_length)
            cross_size = (cross_heads, shape.source_length, cross_dim)
            self.cross = zeros(cross_count, shape.sources if by_table else rows, *cross_size)
            # Its keys and values are in the cache, so that models read nothing but its shape.
            self.encoded: Any = zeros(1, 1, 1).expand(rows, shape.source_length, shape.hidden)
            self._make_cache()
        self.logits = Logits()
        self.graphs: dict[int, torch.cuda.CUDAGraph | None] = {}
        self.memo: dict[Any, Any] = {}

    def _make_cache(self) -> None:
        """Make the cache that the model sees, on top of the buffers."""
        clock, own, cross = self.clock, _pairs(self.states), _pairs(self.cross)
        self.held: list[TableLayer | SharedLayer] = []
        layers: list[Any]
        fixed: list[Any]
        if self.by_table:
            together = self.shape.together
            layers = [TableLayer(*pair, clock, self.place, together) for pair in own]
            fixed = [SharedLayer(*pair, clock, self.shape.k) for pair in cross]
            self.held = layers + fixed
        else:
            layers = [RowLayer(*pair, clock) for pair in own]
            fixed = [FixedRowLayer(*pair, clock) for pair in cross]
        self.cache: Any = Cache(layers=layers)
        if fixed:
            self.cache = EncoderDecoderCache(self.cache, Cache(layers=fixed))

    @property
    def bytes(self) -> int:
        """The memory of the buffers, and of the graphs on them."""
        held = [self.states, self.cross, self.mask, self.place, self.cross_mask]
        if self.logits.scores is not None:
            held.append(self.logits.scores)
        graphs = self.memo[GraphMemory].bytes if GraphMemory in self.memo else 0
        return graphs + sum(x.nbytes for x in held)

    def fill(
        self,
        at: Tensor,
        states: Sequence[Tensor],
        seen: Tensor,
        cross: Sequence[Tensor],
        cross_seen: Tensor,
        next_position: Tensor,
    ) -> None:
        """Let all K rows of some sources begin as copies of one row.

        Args:
            at: [n] the places of these sources.
            states: [n, heads, length, dim] keys and values of all layers.
            seen: [n, length] which tokens of the prompt are attended to.
            cross: [n, heads, source length, dim] those of the cross-attention, if there is any.
            cross_seen: [n, source length] which tokens of the source are attended to.
            next_position: [n] the position of the token after the prompt.
        """
        length, k = seen.shape[1], self.shape.k
        for buffers, given in ((self.states, states), (self.cross, cross)):
            for buffer, state in zip(buffers, given, strict=True):
                rows = buffer.view(self.shape.sources, -1, *buffer.shape[1:])
                if self.by_table and buffers is self.states:
                    rows[at, 0, :, :length] = state
                else:
                    # Masked keys and values must be finite: 0 · NaN is NaN.
                    rows[at] = pad(state, (0, 0, 0, rows.shape[-2] - state.shape[2]))[:, None]
        # All rows of a source find its prompt in the first of them.
        self.place[at] = 0
        self.clock.position[at] = length - 1
        self.limit[at] = self.shape.capacity - 1
        for mask, shown in ((self.mask, seen), (self.cross_mask, cross_seen)):
            hidden = torch.full_like(shown, torch.finfo(mask.dtype).min, dtype=mask.dtype)
            hidden = pad(
                hidden.masked_fill(shown, 0.0),
                (0, mask.shape[-1] - shown.shape[1]),
                value=torch.finfo(mask.dtype).min,
            )
            mask.view(self.shape.sources, k, -1)[at] = hidden[:, None]
        # The padding before a prompt does not count for positions, and the caller may give others.
        self.offset.view(-1, k)[at] = (next_position - length)[:, None]

    def retire(self, at: Tensor) -> None:
        """Let the sources in these places [n] be idle: they stay at the first position."""
        self.clock.position[at], self.limit[at] = -1, 0
        self.offset.view(-1, self.shape.k)[at] = 0

    def take(self, other: Workspace, sources: Tensor, length: int) -> None:
        """Copy sources [b] of another workspace, or of this one, into places 0 … b − 1.

        Their rows have at most ``length`` tokens.
        """
        if self.by_table != other.by_table:
            (self if self.by_table else other)._leave_table()
        k = self.shape.k
        rows = (sources[:, None] * k + torch.arange(k, device=sources.device)).flatten()
        for mine, its in (
            (self.offset, other.offset),
            (self.mask, other.mask),
            (self.cross_mask, other.cross_mask),
        ):
            mine.copy_(its.index_select(0, rows))
        self.place.copy_(other.place.index_select(0, sources))
        self.clock.position.copy_(other.clock.position.index_select(0, sources))
        self.limit.copy_(other.limit.index_select(0, sources))
        for mine, its in zip(self.cross, other.cross, strict=True):
            mine.copy_(its.index_select(0, sources if self.by_table else rows))
        for mine, its in zip(self.states, other.states, strict=True):
            mine[:, :, :length].copy_(its[:, :, :length].index_select(0, rows))
            if not self.by_table:
                mine[:, :, length:].zero_()

    @torch.no_grad()
    def run(self, model: Any, length: int, strict: bool) -> Tensor:
        """Return the logits [rows, V] after the tokens in the buffer.

        Args:
            model: the transformers model.
            length: the most tokens that a row had before these.
            strict: raise if the step cannot be recorded, instead of computing it without a graph.
        """
        window = min(ladder(length + 1, 32), self.shape.capacity)
        cuda = self.shape.device.type == "cuda"
        with torch.cuda.device(self.shape.device) if cuda else nullcontext():
            if window not in self.graphs:
                self.graphs[window] = self._record(model, window, strict)
            graph = self.graphs[window]
            if graph is None:
                self._compute(model, window)
            else:
                graph.replay()
        assert self.logits.scores is not None
        return self.logits.scores

    def _record(self, model: Any, window: int, strict: bool) -> torch.cuda.CUDAGraph | None:
        """Return the step as a CUDA graph, or None where it cannot be recorded.

        A step runs once before it is recorded, for what is only done the first time. With every
        row as its own parent, that changes nothing that the step itself does not overwrite.
        """
        parent, self._before = self.parent.clone(), self.clock.position.clone()
        self.parent.copy_(torch.arange(self.shape.k, device=parent.device).expand_as(parent))
        graph = None
        try:
            if self.shape.device.type == "cuda":
                if strict and kernels.usable(self.shape.device):
                    self._compile(model, window)
                graph = self._captured(model, window)
            else:
                with _NoSynchronisation():
                    self._compute(model, window)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if strict:
                raise
            what = "the layers are not fused" if self.fuses else "a step is not recorded"
            log.info("%s: %s: %s: %s", type(model).__name__, what, type(error).__name__, error)
        self.parent.copy_(parent)
        self.clock.position.copy_(self._before)
        if graph is None and self.fuses and self.shape.device.type == "cuda":
            # Kernels depend on the number of rows: what suited other searches may not suit this.
            # Layers as transformers has them are compared when the next search begins.
            self.fuses = False
            return self._record(model, window, strict)
        return graph

    def _compile(self, model: Any, window: int) -> None:
        """Compile the kernels of a step side by side; what fails will fail again in the step."""
        from cpsbs.backends.triton.kernels.launching import compiling_only

        try:
            with compiling_only(indices=True):
                for _ in range(2):  # the first run shows where the logits come from, see Logits
                    self._compute(model, window)
                    self.clock.position.copy_(self._before)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.clock.position.copy_(self._before)
            log.debug("the kernels of a step are not compiled side by side: %s", error)

    def _captured(self, model: Any, window: int) -> torch.cuda.CUDAGraph:
        memory = self.memo.setdefault(GraphMemory, GraphMemory())
        if self.logits.scores is None:
            # This run shows which operation makes the logits. From the next one on it writes them
            # elsewhere, which must have run once before it is recorded, as everything must.
            self._compute(model, window)
            self.clock.position.copy_(self._before)
        return capture(lambda: self._compute(model, window), memory, _NoSynchronisation())

    def _compute(self, model: Any, window: int) -> None:
        """Let every row continue from its parent, run the model, and keep its logits."""
        self.clock.window = window
        torch.minimum(self.clock.position + 1, self.limit, out=self.clock.position)
        if self.by_table:
            from cpsbs.backends.triton.kernels.cache import advance

            advance(self.place, self.mask, self.parent, self.clock.position, window)
            logits = self._forward(model, window)
            if all(layer.was_read() for layer in self.held):
                self.logits.keep(logits)
                return
            log.info("%s reads its cache itself; its rows are moved", type(model).__name__)
            # The table has advanced already, so that it leads every row to its parent's past.
            self._leave_table()
            self.gave_up_table = True
        else:
            if self.shape.k > 1:
                reorder(self.states, self.parent, self.clock.position, window)
            here = self.clock.position[:, None, None].expand(-1, self.shape.k, 1)
            self.mask.view_as(self.place).scatter_(2, here, 0.0)
        self.logits.keep(self._forward(model, window))

    def _forward(self, model: Any, window: int) -> Tensor:
        """Run the model on the tokens in the buffer, and return their logits."""
        mask, token = self.mask[..., :window], self.token.view(-1, 1)
        inputs: dict[str, Any] = {"past_key_values": self.cache, "use_cache": True}
        if self.shape.source_length:
            inputs |= {"decoder_input_ids": token, "decoder_attention_mask": mask}
            inputs["encoder_outputs"] = BaseModelOutput(last_hidden_state=self.encoded)
            inputs["attention_mask"] = self.cross_mask
        else:
            inputs |= {"input_ids": token, "attention_mask": mask}
            if "position_ids" in inspect.signature(model.forward).parameters:
                offset = self.offset.view_as(self.token)
                inputs["position_ids"] = (offset + self.clock.position[:, None]).view(-1, 1)
        for layer in self.held:
            layer.begin()
        fused = fused_layers(model) if self.fuses else nullcontext()
        with one_query_attention(self.held) if self.held else nullcontext(), fused:
            return self.logits.of(model, inputs)

    def _leave_table(self) -> None:
        """Copy into every row what the table says of it; from here on, the rows are moved."""
        if self.shape.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the model reads its cache otherwise than before")
        sources, k = self.shape.sources, self.shape.k
        source = torch.arange(sources, device=self.shape.device)[:, None, None]
        t = torch.arange(self.shape.capacity, device=self.shape.device)
        held = (t <= self.clock.position[:, None])[:, None, None, :, None]
        with torch.inference_mode(False):
            place = self.place.long()
            for state in self.states:
                rows = state.view(sources, k, *state.shape[1:])
                found = rows[source, place, :, t].transpose(2, 3)
                # Masked keys and values must be finite: 0 · NaN is NaN.
                rows.copy_(torch.where(held, found, 0.0))
            self.cross = self.cross.repeat_interleave(k, dim=1)
            self.by_table = False
            self._make_cache()
        self.graphs.clear()


def _pairs(states: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the keys and values of each layer."""
    return list(zip(states[::2], states[1::2], strict=True))


class _NoSynchronisation(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Raises where the host would wait for the device, which cannot be recorded."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        of_values = torch.Tag.data_dependent_output in func.tags
        if torch.Tag.dynamic_output_shape in func.tags:
            indices = args[1] if func is torch.ops.aten.index.Tensor else []
            picks = (torch.bool, torch.uint8)
            of_values |= not indices or any(i is not None and i.dtype in picks for i in indices)
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            tensors = [x for x in (*args, result) if isinstance(x, Tensor)]
            of_values |= len({x.device.type for x in tensors}) > 1
        if of_values:
            raise RuntimeError(f"{func} makes the host wait for the device in every step")
        return result


def rung(n: int) -> int:
    """Return the smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, … that is at least n."""
    power = 1 << max(n - 1, 0).bit_length()
    return power // 4 * 3 if power >= 4 and n <= power // 4 * 3 else power


def ladder(n: int, unit: int) -> int:
    """Return the smallest ``unit * rung(i)`` that is at least n."""
    return unit * rung(math.ceil(n / unit))
