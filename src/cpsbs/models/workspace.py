"""The buffers of a decoding step of fixed shape, and the graphs that are recorded on them."""

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
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from cpsbs.models.attention import one_query_attention
from cpsbs.models.reorder import kernel_works, reorder
from cpsbs.recording import captured

log = logging.getLogger("cpsbs")


@dataclass(frozen=True)
class Shape:
    """What graphs and buffers depend on."""

    sources: int
    k: int
    capacity: int
    """The most tokens of a row, with the prompt."""
    states: tuple[int, int, int]
    """Keys and values of all layers: how many, heads, dimension of a head."""
    cross: tuple[int, int, int]
    """The same of the cross-attention."""
    source_length: int
    """0 without an encoder."""
    hidden: int
    """Of the encoder."""
    dtype: torch.dtype
    device: torch.device
    stream: int
    """On which the buffers are used; what is on one stream is never used at once."""


class Workspace:
    """The buffers of a shape, and its graphs, one for each window."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.busy = shape, False
        rows = shape.sources * shape.k
        count, heads, dim = shape.states
        cross_count, cross_heads, cross_dim = shape.cross

        def zeros(*size: int, dtype: torch.dtype = shape.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=shape.device)

        # A later search may write them outside of an inference mode that this one is in.
        with torch.inference_mode(False):
            self.parent = zeros(shape.sources, shape.k, dtype=torch.int64)
            self.token = zeros(shape.sources, shape.k, dtype=torch.int64)
            self.clock = _Clock(zeros(1, dtype=torch.int64), shape.capacity)
            self.offset = zeros(rows, 1, dtype=torch.int64)
            # How many positions two rows of a source have in common.
            self.shared = zeros(shape.sources, shape.k, shape.k, dtype=torch.int64)
            self.mask = zeros(rows, 1, 1, shape.capacity)
            self.states = zeros(count, rows, heads, shape.capacity, dim)
            self.cross_mask = zeros(rows, 1, 1, shape.source_length)
            self.cross = zeros(cross_count, rows, cross_heads, shape.source_length, cross_dim)
            layers: list[Any] = [_Layer(*pair, self.clock) for pair in _pairs(self.states)]
            self.cache: Any = Cache(layers=layers)
            if cross_count:
                fixed: list[Any] = [_FixedLayer(*pair, self.clock) for pair in _pairs(self.cross)]
                self.cache = EncoderDecoderCache(self.cache, Cache(layers=fixed))
            # Its keys and values are in the cache: nothing but its shape is looked at.
            self.encoded: Any = zeros(1, 1, 1).expand(rows, shape.source_length, shape.hidden)
        self.scores: Tensor | None = None
        self.graphs: dict[int, torch.cuda.CUDAGraph | None] = {}
        self.memo: dict[Any, Any] = {}
        self.pool: Any = None

    @property
    def bytes(self) -> int:
        """Of the largest buffers."""
        held = [self.states, self.cross] + ([] if self.scores is None else [self.scores])
        return sum(x.nbytes for x in held)

    def fill(
        self, states: Sequence[Tensor], seen: Tensor, cross: Sequence[Tensor], cross_seen: Tensor
    ) -> None:
        """Every row of a source is what the source's one row was.

        Args:
            states: [b, heads, length, dim] keys and values of all layers.
            seen: [b, length] which tokens of the prompt count.
            cross: [b, heads, source length, dim] of the cross-attention, if there is any.
            cross_seen: [b, source length]
        """
        size = (self.shape.sources, self.shape.k)
        for buffers, given in ((self.states, states), (self.cross, cross)):
            # What is masked has to be finite.
            buffers.zero_()
            for buffer, state in zip(buffers, given, strict=True):
                rows = buffer.view(*size, *buffer.shape[1:])
                rows[..., : state.shape[2], :].copy_(state[:, None])
        for mask, shown in ((self.mask, seen), (self.cross_mask, cross_seen)):
            mask.fill_(torch.finfo(mask.dtype).min)
            start = mask.view(*size, mask.shape[-1])[..., : shown.shape[1]]
            start.masked_fill_(shown[:, None], 0.0)
        self.shared.fill_(seen.shape[1])
        # The padding before a prompt does not count in positions.
        self.offset.view(size).copy_((seen.sum(-1) - seen.shape[1])[:, None])

    def take(self, other: Workspace, rows: Tensor, length: int) -> None:
        """Rows [sources·K] of another workspace, or of this one, of so many tokens."""
        for mine, its in (
            (self.offset, other.offset),
            (self.mask, other.mask),
            (self.cross_mask, other.cross_mask),
            *zip(self.cross, other.cross, strict=True),
        ):
            mine.copy_(its.index_select(0, rows))
        self.shared.copy_(other.shared[rows[:: self.shape.k] // self.shape.k])
        for mine, its in zip(self.states, other.states, strict=True):
            mine[:, :, :length].copy_(its[:, :, :length].index_select(0, rows))
            mine[:, :, length:].zero_()

    @torch.no_grad()
    def run(self, model: Any, length: int, strict: bool) -> Tensor:
        """[rows, V] logits after the tokens in the buffer, which stand at position ``length``.

        What cannot be recorded is an error if we are strict, and is computed without a graph else.
        """
        if length >= self.shape.capacity:
            raise ValueError(f"there is room for {self.shape.capacity} tokens only")
        window = min(ladder(length + 1, 32), self.shape.capacity)
        cuda = self.shape.device.type == "cuda"
        with torch.cuda.device(self.shape.device) if cuda else nullcontext():
            self.clock.position.fill_(length)
            if window not in self.graphs:
                self.graphs[window] = self._record(model, window, strict)
            graph = self.graphs[window]
            if graph is None:
                self._compute(model, window)
            else:
                graph.replay()
        assert self.scores is not None
        return self.scores

    def _record(self, model: Any, window: int, strict: bool) -> torch.cuda.CUDAGraph | None:
        """The step as a graph, or None where there are no graphs.

        Before it is recorded it has to run once, for what is only done the first time. If every
        row goes on as itself, that changes nothing that the step itself does not overwrite.
        """
        parent = self.parent.clone()
        self.parent.copy_(torch.arange(self.shape.k, device=parent.device).expand_as(parent))
        graph = None
        try:
            if self.shape.device.type == "cuda":
                graph = self._captured(model, window)
            else:
                with _NoWaiting():
                    self._compute(model, window)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if strict:
                raise
            log.info("a step is not recorded: %s: %s", type(error).__name__, error)
        self.parent.copy_(parent)
        return graph

    def _captured(self, model: Any, window: int) -> torch.cuda.CUDAGraph:
        kernel_works(self.shape.device)  # Known from here on: finding out waits for the device.
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        return captured(lambda: self._compute(model, window), self.pool, _NoWaiting())

    def _reorder(self, window: int) -> None:
        """Rows go on from their parents; what they have in common already stays where it is."""
        parent, k = self.parent, self.shape.k
        since = self.shared.gather(2, parent[..., None])[..., 0]
        reorder(self.states, parent, since, self.clock.position, window)
        down, across = parent[..., None].expand(-1, -1, k), parent[:, None, :].expand(-1, k, -1)
        common = self.shared.gather(1, down).gather(2, across)
        self.shared.copy_(torch.where(down == across, self.clock.position, common))

    def _compute(self, model: Any, window: int) -> None:
        if self.shape.k > 1:
            self._reorder(window)
        self.clock.window = window
        self.mask.index_fill_(-1, self.clock.position, 0.0)
        mask, token = self.mask[..., :window], self.token.view(-1, 1)
        inputs: dict[str, Any] = {"past_key_values": self.cache, "use_cache": True}
        if self.shape.source_length:
            inputs |= {"decoder_input_ids": token, "decoder_attention_mask": mask}
            inputs["encoder_outputs"] = BaseModelOutput(last_hidden_state=self.encoded)
            inputs["attention_mask"] = self.cross_mask
        else:
            inputs |= {"input_ids": token, "attention_mask": mask}
            if "position_ids" in inspect.signature(model.forward).parameters:
                inputs["position_ids"] = self.offset + self.clock.position
        with one_query_attention():
            logits = model(**inputs, return_dict=True).logits[:, -1]
        if self.scores is None:
            with torch.inference_mode(False):
                self.scores = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        self.scores.copy_(logits)


def _pairs(states: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer."""
    return list(zip(states[::2], states[1::2], strict=True))


@dataclass
class _Clock:
    """Where in the rows we are, for all layers of a workspace."""

    position: Tensor
    """[1] of the new tokens"""
    window: int
    """How many positions are attended to."""


class _Layer(CacheLayerMixin):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """Keys and values [rows, heads, capacity, dim], written where the clock says."""

    keys: Tensor
    values: Tensor
    is_compileable = True
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, clock: _Clock) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.keys, self.values, self._clock = keys, values, clock
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to do."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The keys and values of the window, with the new ones."""
        self.keys.index_copy_(2, self._clock.position, key_states)
        self.values.index_copy_(2, self._clock.position, value_states)
        window = self._clock.window
        return self.keys[:, :, :window], self.values[:, :, :window]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and start of what is attended to."""
        return self._clock.window, 0

    def get_seq_length(self) -> Any:
        """[] how many tokens came before; a tensor, as the static cache of transformers has it."""
        return self._clock.position[0]

    def get_max_length(self) -> int:
        """The capacity."""
        return int(self.keys.shape[2])

    get_max_cache_shape = get_max_length


class _FixedLayer(_Layer):  # type: ignore[no-untyped-call, unused-ignore]
    """Of the cross-attention: nothing is added."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Is not asked for, as the cache says that it has been filled."""
        raise ValueError("the keys and values of the cross-attention are computed anew")

    def get_seq_length(self) -> int:
        """The length of the source."""
        return self.get_max_length()


class _NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
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
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, … that is not below n."""
    power = 1 << max(n - 1, 0).bit_length()
    return power // 4 * 3 if power >= 4 and n <= power // 4 * 3 else power


def ladder(n: int, unit: int) -> int:
    """The smallest of those, times the unit, that is not below n."""
    return unit * rung(math.ceil(n / unit))
