"""The adapter for transformers models that can ``generate``, decoder-only or encoder–decoder.

What transformers prepares before it generates (encoder states, an empty KV cache, masks and
positions) it prepares for us too: ``model.generate`` is called with a decoding method that only
keeps what it is given. From there on the adapter manages the rows. They are selected by parent at
every step, so that a hypothesis that has ended is no longer computed. What belongs to a source and
not to a hypothesis (encoder states, cross-attention) moves only when the number of hypotheses of
some source changes, and on a CPU keys and values stay in the same memory (``growing``). On a GPU a
step of many small kernels takes longer to launch than to compute. There the backend of the search
may take over: every source keeps K rows, and the step is recorded as a CUDA graph
(``Backend.fixed_steps``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpsbs.models.transformers.caches import CACHE, apart, is_blank
from cpsbs.models.transformers.forcing import forced_logits
from cpsbs.models.transformers.inputs import (
    evaluating,
    naming_last_position,
    prepare,
    refuse_right_padding,
)
from cpsbs.models.transformers.modules import modules_of
from cpsbs.models.transformers.moves import Moves, rows_of_value
from cpsbs.models.transformers.processors import Criteria, Layout, Processors
from cpsbs.models.transformers.usual import OURS

if TYPE_CHECKING:
    from cpsbs.backends import Backend, FixedSteps
    from cpsbs.backends.base import CompiledDecoder
    from cpsbs.models.transformers.direct.steps import DirectSteps

MOST_SHARED = 2**30
"""The most bytes of weights of a model that is searched in several threads."""

FORCED_END = "ForcedEOSTokenLogitsProcessor"
"""The processor that forces the end token at the maximal length."""


class TransformersModel:
    """A transformers model with its inputs, for the search.

    Args:
        model: a transformers model that can ``generate``.
        logits_processor: processors to apply to the scores of the next token, on top of those that
            the arguments below ask for. The result is normalised again. The checkpoint's generation
            config adds only those that define the model's support: forced, suppressed and bad
            tokens.
        inputs: what you would pass to ``generate``: ``input_ids``, ``attention_mask``,
            ``encoder_outputs``, … Prompts of decoder-only models must be padded on the left.
    """

    def __init__(self, model: Any, *, logits_processor: Any = None, **inputs: Any) -> None:
        processors = [] if logits_processor is None else list(logits_processor)
        prepared = prepare(model, processors, **inputs)
        mask_is_given = inputs.get("attention_mask") is not None
        self._begin(model, **prepared, inputs=inputs, mask_is_given=mask_is_given)

    @classmethod
    def from_generate(cls, model: Any, **given: Any) -> TransformersModel:
        """Make one from what transformers passes to a decoding method, one row for each source."""
        self = cls.__new__(cls)
        self._begin(model, **given)
        return self

    def _begin(
        self,
        model: Any,
        input_ids: Tensor,
        config: Any,
        processors: Any,
        criteria: Any,
        kwargs: dict[str, Any],
        states: Callable[[], Tensor] | None = None,
        inputs: dict[str, Any] | None = None,
        mask_is_given: bool = False,
    ) -> None:
        if not model.config.is_encoder_decoder:
            mask = None if mask_is_given else config.pad_token_id
            refuse_right_padding(input_ids, kwargs.get("attention_mask"), mask)
        self._model, self._given = model, apart(kwargs)
        self._states = states
        """Computes the encoder's states, if that is still to be done."""
        self._mask: Tensor | None = kwargs.get("attention_mask")
        self._inputs = inputs
        """What the caller would pass to ``generate``; None inside ``generate``."""
        self._restarts = is_blank(kwargs.get(CACHE))
        self.name = type(model).__name__
        self.prompt = input_ids
        self.sources = len(input_ids)
        self.device = input_ids.device
        eos = config.eos_token_id
        self.eos: tuple[int, ...] = (
            () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        )
        first_eos = self.eos[0] if self.eos else 0
        self.pad: int = first_eos if config.pad_token_id is None else config.pad_token_id
        self._layout = (self.sources, config.num_beams, self.pad)
        # A search may return an unfinished sequence of maximal length; its end is not forced.
        self._all_processors = [p for p in processors if type(p).__name__ != FORCED_END]
        self._all_criteria = [c for c in criteria if type(c).__name__ not in OURS]
        self._in_training = any(module.training for module in modules_of(model))
        self._started = False
        self._may_be_direct = True
        """Whether steps may run the layers directly; false in copies to compare these with."""
        self._rewind()
        if not self._restarts:
            self._given = {}  # so that a cache that was given is not kept twice
        text_config = model.config.get_text_config()
        self.vocab_size: int = getattr(text_config, "vocab_size", 0)

    def _rewind(self) -> None:
        """Go back to where the prompt ends, with what was prepared for the first search."""
        self._kwargs = apart(self._given)
        self._ids = self.prompt
        self._source = torch.arange(self.sources, device=self.device)
        # Not a method: a reference cycle would keep buffers on the device until it is collected.
        ended = partial(_have_ended, self.eos, self.prompt.shape[-1])
        self._processors = Processors(self._all_processors, Layout(*self._layout), ended)
        self._criteria = Criteria(self._all_criteria, Layout(*self._layout))
        self._owns = False
        """Whether the tensors of sources are copies, which may be overwritten."""
        self._fixed: FixedSteps | None = None
        """The steps of fixed shape, once the rows are fixed."""
        self._direct: DirectSteps | None = None
        """The steps that run the layers directly, if the model can take them."""

    @property
    def _is_encoder_decoder(self) -> bool:
        return bool(self._model.config.is_encoder_decoder)

    @property
    def concurrent(self) -> bool:
        """Whether threads may search such models at the same time, which share their weights.

        Large models need the memory and all cores for one batch, and code from outside of
        transformers may keep a state.
        """
        foreign = bool(self._all_processors or self._all_criteria) or self._in_training
        known = type(self._model).__module__.startswith("transformers.models.")
        size = sum(x.numel() * x.element_size() for x in self._model.parameters())
        return known and not foreign and size <= MOST_SHARED

    def start(self) -> Tensor:
        """Return the scores [sources, V] of the first token after the prompt.

        A second call begins anew. It does not run an encoder again.

        Raises:
            ValueError: if it is called again and the model was given a KV cache with something in
                it, which the first search has changed.
        """
        if self._started:
            if not self._restarts:
                raise ValueError(
                    f"{CACHE} held something when the model was made, so that it holds the state "
                    "of one search; make another TransformersModel"
                )
            self._rewind()
        self._started = True
        if self._states is not None:
            self._encode(self._states())
        found = self._prefill_directly()
        return self.prefill() if found is None else found

    def prefill(self) -> Tensor:
        """Return the scores [sources, V] of the first token by the model's own forward pass."""
        return self._forward(first=True)

    def _encode(self, states: Tensor) -> None:
        """Put the encoder's states in their place."""
        from transformers.modeling_outputs import BaseModelOutput

        found: Any = states
        for inputs in (self._given, self._kwargs):
            inputs["encoder_outputs"] = BaseModelOutput(found)
        self._states = None

    def advance(self, parent: Tensor, token: Tensor) -> Tensor:
        """Return the scores [rows, V] after one more token."""
        at_start = self._direct is None and self._ids.shape[-1] == self.prompt.shape[-1]
        if at_start and self.device.type == "cpu":
            self._direct = self._begin_directly(parent)
            if self._direct is None:
                self._let_grow()
        if self._direct is not None:
            return self._advance_directly(self._direct, parent, token)
        self._select(parent)
        self._ids = torch.cat([self._ids, token[:, None]], dim=-1)
        return self._forward(first=False)

    def force(self, source: Tensor, tokens: Tensor) -> Tensor:
        """Return [n, T, V] the scores of every token of n sequences; gradients go through it.

        Dropout is switched off, as in the search. What the search keeps is not touched.

        Args:
            source: [n] the source of each sequence, ascending.
            tokens: [n, T] the sequences, padded after their end.
        """
        if self._inputs is None:
            raise ValueError(
                "the model was made inside generate(), whose encoder has run without gradients; "
                "make a TransformersModel of the inputs"
            )
        with self._evaluating():
            given = (self._model, self._inputs, self.prompt, self._mask)
            scores = forced_logits(*given, source, tokens).to(torch.float32)
        if not self._all_processors:
            return scores
        ended = partial(_have_ended, self.eos, self.prompt.shape[-1])
        apply = Processors(self._all_processors, Layout(*self._layout), ended)
        ids = torch.cat([self.prompt[source], tokens], dim=-1)
        first, steps = self.prompt.shape[-1], range(tokens.shape[-1])
        return torch.stack(
            [apply(ids[:, : first + t], scores[:, t].clone(), source) for t in steps], dim=1
        )

    def _begin_directly(self, parent: Tensor) -> DirectSteps | None:
        """Return steps that run the layers directly, for a first step with these parents [rows]."""
        if not self._runs_directly():
            return None
        from cpsbs.models.transformers.direct.steps import begin

        rows = int(torch.bincount(parent).max())
        return begin(self._model, self._kwargs, rows, self._ordinary)

    def _prefill_directly(self) -> Tensor | None:
        """Return the scores of the first token from the decoder's layers run directly, if it can.

        Then the steps that follow run them directly, too.
        """
        kwargs, length = self._kwargs, self.prompt.shape[-1]
        blank = self._restarts and kwargs.get("use_cache", True) and length == 1
        if not blank or kwargs.get("encoder_outputs") is None or not self._runs_directly():
            return None
        from cpsbs.models.transformers.direct.steps import begin_from_states

        begun = begin_from_states(self._model, kwargs, self.prompt, self._ordinary)
        if begun is None:
            return None
        self._direct, scores = begun
        self.vocab_size = scores.shape[-1]
        return self._processors(self._ids, scores, self._source)

    def _runs_directly(self) -> bool:
        """Return whether the layers may be run directly, as far as that is known without them."""
        trains = self._in_training or self._model.training or torch.is_grad_enabled()
        return self._may_be_direct and self.device.type == "cpu" and not trains

    def _advance_directly(self, direct: DirectSteps, parent: Tensor, token: Tensor) -> Tensor:
        """Return the scores [rows, V] after one more token, and note what processors need."""
        self._kwargs.pop(CACHE, None)
        if self._processors or self._criteria:
            self._ids = torch.cat([self._ids[parent], token[:, None]], dim=-1)
            self._source = self._source[parent]
        with naming_last_position(self._model):
            scores = direct.advance(parent, token)
        return self._processors(self._ids, scores, self._source)

    def compiled_steps(self) -> CompiledDecoder | None:
        """Return what a backend needs to take steps by itself, after the first ``advance``."""
        if self._direct is None or self._processors or self._criteria:
            return None
        return self._direct.compiled()

    def _let_grow(self) -> None:
        """Give the KV cache of the prompt room for the tokens that follow."""
        cache = self._kwargs.get(CACHE)
        cache = getattr(cache, "self_attention_cache", cache)
        if hasattr(cache, "layers") and not torch.is_grad_enabled():
            from cpsbs.models.transformers.growing import let_grow

            let_grow(cache)

    def fix_rows(self, k: int, steps: int, backend: Backend) -> bool:
        """Give every source K rows for at most ``steps`` more tokens, if the backend can.

        Returns whether it can; then ``step`` takes the place of ``advance``. That is possible
        after ``start``, for models that hold nothing between tokens but keys and values, and not
        if the caller has stopping criteria.
        """
        at_start = self._started and len(self._ids) == self.sources and self._fixed is None
        if not at_start or self._criteria or steps < 1:
            return False
        with self._evaluating():
            given = (self._prefilled, k, steps, self._ordinary)
            self._fixed = backend.fixed_steps(self._model, *given)
        if self._fixed is None:
            return False
        del self._kwargs[CACHE]
        if self._processors:
            self._ids = self._ids.repeat_interleave(k, dim=0)
            self._source = self._source.repeat_interleave(k)
        return True

    @property
    def step_dtype(self) -> torch.dtype:
        """The dtype of what ``step`` returns."""
        dtype: torch.dtype = torch.float32 if self._processors else self._model.dtype
        return dtype

    def _prefilled(self) -> dict[str, Any]:
        """Return the model's inputs after its own prefill, done now if layers ran directly."""
        if self._direct is not None:
            ordinary = self._ordinary()
            ordinary.prefill()
            self._kwargs, self._direct = ordinary._kwargs, None
        return self._kwargs

    def step(self, parent: Tensor, token: Tensor) -> Tensor:
        """Return the scores [b·K, V] after one more token, once the rows are fixed.

        The next step overwrites them. They are of the model's dtype unless there are processors.

        Args:
            parent: [b, K] which of its source's rows, 0 … K − 1, each row extends. At first these
                rows are all alike.
            token: [b, K] the token that each row appends.
        """
        fixed = self._fixed_steps("step")
        with self._evaluating():
            scores = fixed.step(parent, token)
        if not self._processors:
            return scores
        first = torch.arange(0, parent.numel(), parent.shape[1], device=self.device)
        before = self._ids[(first[:, None] + parent).flatten()]
        self._ids = torch.cat([before, token.reshape(-1, 1)], dim=-1)
        return self._processors(self._ids, scores.to(torch.float32, copy=True), self._source)

    def memo(self) -> dict[Any, Any]:
        """Return a dictionary that lives as long as the buffers of ``step``."""
        return self._fixed_steps("memo").memo

    def keep_sources(self, sources: Tensor) -> None:
        """Drop all sources but these [b'], which are given in ascending order."""
        fixed = self._fixed_steps("keep_sources")
        fixed.keep_sources(sources)
        if self._processors:
            self._ids = self._ids.view(-1, fixed.k, self._ids.shape[-1])[sources].flatten(0, 1)
            self._source = self._source.view(-1, fixed.k)[sources].flatten()

    def retire(self, places: list[int]) -> None:
        """Note that the search no longer needs the sources in these places."""
        if self._fixed is not None:
            self._fixed.retire(places)

    def admits(self, other: Any) -> bool:
        """Return whether the sources of another model, which has started, can take places here."""
        same = isinstance(other, TransformersModel) and other._model is self._model
        if self._fixed is None or not same:
            return False
        if self._processors or other._processors or other._criteria or other._fixed is not None:
            return False
        return self._fixed.admits(other._prefilled())

    def join(self, places: list[int], other: TransformersModel) -> None:
        """Let the sources of a model that ``admits`` has accepted take these places."""
        self._fixed_steps("join").join(places, other._prefilled())
        del other._kwargs[CACHE]

    def release(self) -> None:
        """Free the buffers for other searches, because this one is over."""
        self._fixed = None

    def _fixed_steps(self, call: str) -> FixedSteps:
        if self._fixed is None:
            raise ValueError(f"{call}() was called, but fix_rows() has not returned True")
        return self._fixed

    def _ordinary(self) -> TransformersModel:
        """Return a copy that takes ordinary steps, without processors and without changing this."""
        other = copy.copy(self)
        other._processors, other._kwargs = self._processors.without_any(), apart(self._kwargs)
        other._may_be_direct = False
        return other

    def stops(self, parent: Tensor, token: Tensor) -> Tensor | None:
        """Return [rows] whether a stopping criterion of the caller ends each extension."""
        if not self._criteria:
            return None
        if not len(parent):
            return torch.zeros(0, dtype=torch.bool, device=self.device)
        ids = torch.cat([self._ids[parent], token[:, None]], dim=-1)
        return self._criteria(ids, self._source[parent])

    def _evaluating(self) -> AbstractContextManager[None]:
        """Switch off dropout in training mode, which was looked up once, because that is slow."""
        trains = self._in_training or self._model.training
        return evaluating(self._model) if trains else nullcontext()

    def _forward(self, first: bool) -> Tensor:
        """Run the model on the latest tokens, and return the processed scores."""
        with self._evaluating():
            return self._scores(first)

    def _scores(self, first: bool) -> Tensor:
        use_cache = self._kwargs.get("use_cache", True) and not first
        inputs = self._model.prepare_inputs_for_generation(
            self._ids,
            next_sequence_length=1 if use_cache else None,
            is_first_iteration=first,
            **self._kwargs,
        )
        with naming_last_position(self._model):
            outputs = self._model(**inputs, return_dict=True)
        self._kwargs = self._model._update_model_kwargs_for_generation(
            outputs, self._kwargs, is_encoder_decoder=self._is_encoder_decoder
        )
        logits: Tensor = outputs.logits[:, -1, :]
        scores = logits.to(dtype=torch.float32, device=self.device)
        if scores.dtype == logits.dtype and self._processors:
            scores = scores.clone()
        scores = self._processors(self._ids, scores, self._source)
        self.vocab_size = scores.shape[-1]
        return scores

    def _select(self, parent: Tensor) -> None:
        """Replace the rows by these previous rows [rows], in this order."""
        same_rows = len(parent) == len(self._ids) and bool(
            (parent == torch.arange(len(parent), device=parent.device)).all()
        )
        if same_rows:
            return
        source = self._source[parent]
        same_sources = len(source) == len(self._source) and torch.equal(source, self._source)
        moves = self._moves(parent, source)
        self._ids, self._source = self._ids[parent], source
        cache = self._kwargs.get(CACHE)
        if cache is not None:
            self._reorder(cache, parent, None if same_sources else moves)
        for name, value in self._kwargs.items():
            if name == CACHE:
                continue
            if self._grows(name):
                self._kwargs[name] = rows_of_value(value, Moves(parent))
            elif not same_sources:
                self._kwargs[name] = rows_of_value(value, moves)
        self._owns |= not same_sources

    def _moves(self, parent: Tensor, source: Tensor) -> Moves:
        """Return how to move what belongs to sources, for rows that now have these sources [rows].

        The rows of a source have the same encoder states. So where there are no more rows than
        before, and the tensors are ours, only rows whose source changes are written.
        """
        shrinks = self._owns and len(source) <= len(self._source)
        if shrinks and self.device.type == "cpu" and not torch.is_grad_enabled():
            return Moves(parent, (source != self._source[: len(source)]).nonzero()[:, 0])
        return Moves(parent)

    def _grows(self, name: str) -> bool:
        """Return whether this input has an entry for every token of a hypothesis."""
        if self._is_encoder_decoder:
            return name.startswith("decoder_")
        # The masks and positions of all hypotheses of a source are alike.
        return False

    def _reorder(self, cache: Any, parent: Tensor, of_sources: Moves | None) -> None:
        """Select rows of the KV cache, and of the cross-attention only if their sources change."""
        if hasattr(self._model, "_reorder_cache"):
            self._kwargs[CACHE] = self._model._reorder_cache(cache, parent)
        elif hasattr(cache, "self_attention_cache"):
            cache.self_attention_cache.reorder_cache(parent)
            if of_sources is not None:
                for layer in cache.cross_attention_cache.layers:
                    if layer.is_initialized:
                        layer.keys, layer.values = map(of_sources, (layer.keys, layer.values))
        elif hasattr(cache, "reorder_cache"):
            cache.reorder_cache(parent)
        else:
            raise ValueError(
                f"{type(self._model).__name__} keeps a {type(cache).__name__}, which cannot be "
                "reordered; pass use_cache=False"
            )


def _have_ended(eos: tuple[int, ...], prompt: int, ids: Tensor) -> Tensor:
    """Return [rows] whether each row [rows, t] has an end token after the prompt."""
    ends = torch.tensor(eos, dtype=ids.dtype, device=ids.device)
    return torch.isin(ids[:, prompt:], ends).any(-1)
