"""The conditional Poisson design: K of N items, in proportion to the product of their weights.

    Q(Y) = Π_{n ∈ Y} w_n / Z   for |Y| = K,      Z = Σ_{|Y| = K} Π_{n ∈ Y} w_n        (eq:q)

Flip a coin with odds w_n for every item, and keep only the outcomes with K heads: that is the
design, and the one of largest entropy among those with its inclusion probabilities. Beam search is
its limit for w_n = p_n^{1/τ}, τ → 0; drawing from it at every step of that recursion instead is the
paper's conditional Poisson stochastic beam search.

Weights are given as logarithms: an item with -inf is never taken, one with +inf always (*forced*).
``cpsbs.conditional_poisson`` explains the arithmetic.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from cpsbs.conditional_poisson import gradients, normalizer, sampling
from cpsbs.conditional_poisson.fitting import fit_log_weights
from cpsbs.conditional_poisson.population import split
from cpsbs.conditional_poisson.weights import log_odds
from cpsbs.randomness import Generators, Streams


class ConditionalPoisson:
    """The conditional Poisson design: Q(Y) = Π_{n ∈ Y} w_n / Z over the subsets Y of K of N items.

    Everything is computed and returned in float64, on the device of the weights.
    ``log_normalizer``, ``log_inclusion``, ``log_inclusion_of``, ``log_prob`` and ``entropy`` are
    differentiable with respect to ``log_weights``, ``log_normalizer`` twice; the transforms of
    ``torch.func`` are not supported.

    Args:
        log_weights: [..., N] log w, in float64, 32, 16 or bfloat16; only their differences matter.
            An item with -inf is never taken, one with inf always (*forced*). Leading dimensions
            are independent designs. The tensor is not copied and must not be changed afterwards.
        k: K, how many items a sample has; the same for the whole batch.

    Raises:
        ValueError: for a NaN among the weights, a K outside 0…N, and rows with more than K forced
            items or fewer than K items of positive weight.
    """

    def __init__(self, log_weights: Tensor, k: int, *, _name: str = "log_weights") -> None:
        k = _checked_k(_name, log_weights, k)
        self.log_weights = log_weights
        self.k = k
        rows = log_weights.detach().reshape(math.prod(self.batch_shape), self.n)
        self._population = split(rows, k, _name)

    def __repr__(self) -> str:
        return f"ConditionalPoisson(k={self.k}, log_weights={list(self.log_weights.shape)})"

    @property
    def batch_shape(self) -> torch.Size:
        """The leading dimensions of the weights."""
        return self.log_weights.shape[:-1]

    @property
    def n(self) -> int:
        """N, the number of items."""
        return self.log_weights.shape[-1]

    @classmethod
    def from_log_probs(
        cls,
        log_p: Tensor,
        k: int,
        weights: Literal["odds", "probability"] = "odds",
        anneal: float = 1.0,
    ) -> ConditionalPoisson:
        """Return the design with weights made from probabilities, as the search uses it.

        "odds" is the paper's w = p/(1 − p), with which the inclusion probabilities come close to p
        where these sum to K (§3, *Setting w_n*); an item with p = 1 is always taken. "probability"
        is w = p, which for K = 1 is ordinary sampling.

        ``anneal`` is the paper's annealing of the design, w ↦ w^{1/τ}; as it goes to 0 the sample
        becomes the set of the K most probable items, with ties broken uniformly at random. It is
        not the temperature of a model, which changes p itself. Annealed weights are rescaled, so
        that values of ``log_normalizer`` for different ``anneal`` cannot be compared.

        Args:
            log_p: [..., N] logarithms of probabilities, so at most 0; they need not sum to one. For
                logits, use ``logits.log_softmax(-1)``, in float64 where probabilities come close to
                one: float32 has no number between 1 − 6e-8 and 1, and p = 1 means certainty.
            k: K.
            weights: "odds" or "probability".
            anneal: τ ≥ 0; 0 is the limit itself.
        """
        k = _checked_k("log_p", log_p, k)
        if weights not in ("odds", "probability"):
            raise ValueError(f'weights is {weights!r}; it must be "odds" or "probability"')
        if not isinstance(anneal, int | float) or not 0 <= anneal < math.inf:
            raise ValueError(f"anneal is {anneal!r}; it must be a finite number of at least 0")
        largest = float(log_p.detach().max()) if log_p.numel() else 0.0
        if largest > 1e-3:
            raise ValueError(
                f"log_p has {largest}; a log-probability is at most 0 "
                "(for logits, use logits.log_softmax(-1))"
            )
        log_weights = log_p.to(torch.float64).clamp(max=0.0)
        if weights == "odds":
            log_weights = log_odds(log_weights)
        if anneal != 1.0:
            log_weights = _anneal(log_weights, k, anneal)
        return cls(log_weights, k, _name="log_p")

    @classmethod
    def fit(cls, inclusion: Tensor, k: int) -> ConditionalPoisson:
        """Return the design with these inclusion probabilities.

        It exists and is unique up to the scale of its weights whenever 0 ≤ π ≤ 1 and Σ π = K. Its
        log-weights x minimise the convex log Z(x) − Σ_n π_n x_n, whose gradient is the error in the
        inclusion probabilities; see ``cpsbs.conditional_poisson.fitting``.

        Args:
            inclusion: [..., N] inclusion probabilities; they may be exactly 0 and 1. float64
                targets that sum to K to 1e-10 are met to 1e-10. Gradients do not flow through.
            k: K.

        Raises:
            RuntimeError: if no design in float64 comes that close.
        """
        k = _checked_k("inclusion", inclusion, k)
        log_weights = fit_log_weights(
            inclusion.detach(), k, lambda x: cls(x, k)._log_inclusion_odds()
        )
        return cls(log_weights, k)

    # ------------------------------------------------------------------ probabilities

    @property
    def log_normalizer(self) -> Tensor:
        """[...] log Z = log e_K(w) (eq:naive); where items are forced, it is over the free ones."""
        if self._wants_gradient:
            return gradients.apply(gradients.LogNormalizer, self)
        return self._log_normalizer

    @property
    def log_inclusion(self) -> Tensor:
        """[..., N] log π_n, the logarithm of the probability that item n is in the sample."""
        if self._wants_gradient:
            return gradients.apply(gradients.LogInclusion, self)
        return self._log_inclusion.view(self.log_weights.shape).clone()

    def log_inclusion_of(self, indices: Tensor) -> Tensor:
        """Return [..., m] log π_n of these items [..., m] only, without computing the others.

        ``indices`` may have more leading dimensions than the design, as samples do. (Where
        gradients are wanted, the others are computed too.)
        """
        index = self._rows_of_indices("indices", indices)
        if self._wants_gradient:
            values = self.log_inclusion.view(self._population.log_weights.shape).expand(
                len(index), -1, -1
            )
            return values.gather(-1, index).view(self._shape_of(indices))
        with torch.inference_mode():
            values = sampling.log_inclusion_at(self._population, self._relative_weights(index))
        return values.clone().view(self._shape_of(indices))

    def log_prob(self, subset: Tensor) -> Tensor:
        """Return [...] log Q(Y) of the subsets [..., K]; the order of items does not matter."""
        if isinstance(subset, Tensor) and subset.ndim and subset.shape[-1] != self.k:
            raise ValueError(
                f"subset has shape {list(subset.shape)}; its last dimension must be k = {self.k}"
            )
        index = self._rows_of_indices("subset", subset, distinct=True)
        with torch.no_grad():
            log_q = normalizer.log_prob(self._population, self._relative_weights(index))
        if self._wants_gradient:
            # The same value, computed less accurately for the sake of its gradient.
            x = _gathered(self.log_weights.reshape(self._population.log_weights.shape), index)
            product = torch.where(x.isfinite(), x, 0.0).sum(-1)
            path = product - self.log_normalizer.view(-1)
            log_q = log_q + (path - path.detach())
        return log_q.view(self._shape_of(subset)[:-1])

    def joint_log_inclusion(self, subset: Tensor) -> Tensor:
        """Return [..., m, m] log P(i and j are both in) for the items [..., m]; it has no gradient.

        The diagonal is log π_i. P(i, j) = π_i · P(j | i), and the design given i is conditional
        Poisson with K − 1 of the others: no difference of nearly equal numbers is taken, whether
        weights are tied or not.
        """
        index = self._rows_of_indices("subset", subset, distinct=True)
        y = self._relative_weights(index)
        joint = torch.zeros((*y.shape, y.shape[-1]), dtype=torch.float64, device=y.device)
        for sample, out in zip(y, joint, strict=True):
            out.copy_(sampling.joint_log_inclusion_at(self._population, sample))
        shape = self._shape_of(subset)
        return joint.view(*shape, shape[-1])

    def entropy(self) -> Tensor:
        """Return [...] the entropy −Σ_Y Q(Y) log Q(Y), in nats.

        With Y* the K largest weights and c the smallest log-weight among them, every term of

            H = −log Q(Y*) + Σ_{n ∈ Y*} (1 − π_n)(x_n − c) + Σ_{n ∉ Y*} π_n (c − x_n)

        is at least zero, so that small entropies keep their digits too.
        """
        if self._wants_gradient:
            return gradients.apply(gradients.Entropy, self)
        return normalizer.entropy(self._population, self._log_inclusion).view(self.batch_shape)

    # ------------------------------------------------------------------ samples

    def sample(self, sample_shape: Sequence[int] = (), generator: Generators = None) -> Tensor:
        """Draw [*sample_shape, ..., K] distinct indices, in ascending order.

        Args:
            sample_shape: the shape of the samples for each design.
            generator: a generator on the device of the weights; the same state of it gives the same
                samples on the same device. With a list of generators, one for each design of the
                batch, a sample (of shape ()) does not depend on the other designs, unless their
                weights are so flat that the head must be larger for all of them.
        """
        sizes = sample_shape if isinstance(sample_shape, tuple | list) else (-1,)
        if not all(isinstance(size, int) and size >= 0 for size in sizes):
            raise ValueError(
                f"sample_shape is {sample_shape!r}; it must be a tuple of integers, such as (5,)"
            )
        samples = math.prod(sample_shape)
        with torch.inference_mode():
            streams = Streams(generator, math.prod(self.batch_shape), self.log_weights.device)
            picked = sampling.draw(self._population, samples, streams)
        return picked.clone().view(*sample_shape, *self.batch_shape, self.k)

    def condition_on(self, index: Tensor | int) -> ConditionalPoisson:
        """Return the design given that item ``index`` [...] is in: the paper's Q̃ (eq:beam_cp_p).

        There is one item for each design. Dimensions that ``index`` has before those of the batch
        become dimensions of the result, with a design for each item. To condition on several items,
        condition again.
        """
        index = torch.as_tensor(index, device=self.log_weights.device)
        if index.ndim < len(self.batch_shape):
            index = index.expand(self.batch_shape)
        if index.shape[index.ndim - len(self.batch_shape) :] != self.batch_shape:
            raise ValueError(
                f"index has shape {list(index.shape)}; it must end in the batch shape "
                f"{list(self.batch_shape)} of the design"
            )
        index = index[..., None]
        self._rows_of_indices("index", index)
        with torch.no_grad():
            if bool((self.log_inclusion_of(index) == -math.inf).any()):
                raise ValueError(
                    "index names an item that is in no sample; it must name items with π > 0"
                )
        weights = self.log_weights.expand(*index.shape[:-1], self.n)
        return ConditionalPoisson(weights.scatter(-1, index, math.inf), self.k)

    # ------------------------------------------------------------------ internals, on rows [R, ...]

    @property
    def _wants_gradient(self) -> bool:
        return self.log_weights.requires_grad and torch.is_grad_enabled()

    @property
    def _log_normalizer(self) -> Tensor:
        """[...] log Z, without a gradient."""
        return normalizer.log_normalizer(self._population).view(self.batch_shape)

    @cached_property
    def _log_inclusion(self) -> Tensor:
        """[R, N] log π, computed once; an ordinary tensor even if inference mode is on."""
        with torch.inference_mode(False), torch.no_grad():
            return sampling.log_inclusion(self._population)

    def _log_inclusion_odds(self) -> Tensor:
        return sampling.log_inclusion_odds(self._population).view(self.log_weights.shape)

    def _covariance_product(self, vector: Tensor) -> Tensor:
        """Return [..., N] Σ_j Cov(i, j) v_j for v [..., N]."""
        rows = vector.reshape(self._population.log_weights.shape)
        return sampling.covariance_product(self._population, rows).view(vector.shape)

    def _gradient_of_rare(self, vector: Tensor) -> Tensor:
        """Return [..., N] Σ_i v_i ∂ log π_i / ∂ log w_j over items i with log π_i < ``RARE``.

        Such an item changes nothing for the others, so log π_i = log w_i + log e_{K−1} − log e_K of
        all items, and the derivative is δ_ij + π_j − π'_j, where π is for K − 1 items and π' for K.
        """
        rows = vector.reshape(self._population.log_weights.shape)
        out = torch.zeros_like(rows)
        some = rows.any(-1).nonzero()[:, 0]
        fewer = ConditionalPoisson(self._population.log_weights[some], self.k - 1)
        change = fewer.log_inclusion.exp() - self._log_inclusion[some].exp()
        out[some] = rows[some] + rows[some].sum(-1, keepdim=True) * change
        return out.masked_fill(self._population.log_weights == math.inf, 0.0).view(vector.shape)

    def _relative_weights(self, index: Tensor) -> Tensor:
        """Return the relative log-weights [S, R, m] of the items [S, R, m]."""
        return self._population.relative(_gathered(self._population.log_weights, index))

    def _shape_of(self, indices: Tensor) -> torch.Size:
        if indices.shape[:-1] == self.batch_shape:
            return indices.shape
        batch = torch.broadcast_shapes(indices.shape[:-1], self.batch_shape)
        return torch.Size([*batch, indices.shape[-1]])

    def _rows_of_indices(self, name: str, indices: Tensor, distinct: bool = False) -> Tensor:
        """Check indices [..., m], and return them as [S, R, m]."""
        if not isinstance(indices, Tensor) or indices.ndim == 0:
            given = "a scalar" if isinstance(indices, Tensor) else f"a {type(indices).__name__}"
            raise ValueError(f"{name} is {given}; it must be an integer tensor of shape [..., m]")
        if (
            indices.dtype.is_floating_point
            or indices.dtype.is_complex
            or indices.dtype is torch.bool
        ):
            raise ValueError(f"{name} has dtype {indices.dtype}; it must hold integers")
        try:
            shape = self._shape_of(indices)
        except RuntimeError:
            shape = None
        batch = len(self.batch_shape)
        if shape is None or shape[len(shape) - 1 - batch : -1] != self.batch_shape:
            raise ValueError(
                f"{name} has shape {list(indices.shape)}; its dimensions before the last must fit "
                f"the batch shape {list(self.batch_shape)} of the design"
            )
        index = indices.to(device=self.log_weights.device, dtype=torch.int64)
        if index.numel():
            least, most = torch.stack(index.aminmax()).tolist()
            if least < 0 or most >= self.n:
                wrong = least if least < 0 else most
                raise ValueError(f"{name} has {wrong}; items are 0 to N - 1 = {self.n - 1}")
        if distinct and index.shape[-1] > 1:
            ordered = index.sort(dim=-1).values
            repeated = ordered[..., 1:][ordered[..., 1:] == ordered[..., :-1]]
            if repeated.numel():
                raise ValueError(f"{name} has {int(repeated[0])} twice; its items must be distinct")
        rows, samples = math.prod(self.batch_shape), math.prod(shape[: len(shape) - 1 - batch])
        return index.expand(shape).reshape(samples, rows, shape[-1])


# ---------------------------------------------------------------------- pieces


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _checked_k(name: str, values: Tensor, k: int) -> int:
    """Check that the weights and K make sense together, and return K as a plain integer."""
    if not isinstance(values, Tensor) or values.dtype not in DTYPES:
        given = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"{name} is {given}; it must be a tensor of float64, float32, float16 or bfloat16"
        )
    if values.ndim == 0:
        raise ValueError(f"{name} has no dimension; it must have shape [..., N]")
    try:
        number = -1 if isinstance(k, bool) else operator.index(k)
    except TypeError:
        number = -1
    if not 0 <= number <= values.shape[-1]:
        raise ValueError(f"k is {k!r}; it must be an integer from 0 to N = {values.shape[-1]}")
    return number


def _gathered(rows: Tensor, index: Tensor) -> Tensor:
    """Return the entries [S, R, m] of rows [R, N] at the indices [S, R, m]."""
    return rows.expand(len(index), -1, -1).gather(-1, index)


def _anneal(log_weights: Tensor, k: int, anneal: float) -> Tensor:
    """Return log-weights / anneal, measured from the K-th largest.

    Ties with it stay ties however small ``anneal`` is, and all others may overflow to ±inf, which
    then rightly means always or never.
    """
    if k == 0:
        return log_weights
    kth = log_weights.topk(k, dim=-1).values[..., -1:]
    gap = log_weights - torch.where(kth.isfinite(), kth, 0.0)
    if anneal == 0.0:
        annealed = torch.where(gap == 0, 0.0, torch.copysign(gap.new_tensor(math.inf), gap))
    else:
        annealed = gap / anneal
    return torch.where(kth == -math.inf, log_weights, annealed)
