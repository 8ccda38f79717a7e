"""Kernels that read all scores once, for maxima and power sums of chunks (``scores.reading``)."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from cpsbs.backends.triton.kernels.launching import kernel
from cpsbs.backends.triton.kernels.numbers import host_number, scaled

THREADS = 128
"""The threads of a program that reads"""

LOG2_E = 1 / math.log(2)
"""log₂ e: a GPU computes powers of two"""

RUNS = 4
"""A chunk is read in so many runs, by the same threads."""


@triton.jit
def _run(scores, token, number, tokens, RUN: tl.constexpr):
    """Return the scores of one of the four runs of chunks that begin with these tokens."""
    token += number * RUN
    x = tl.load(scores + token, mask=token < tokens, other=-float("inf"))
    return x.to(tl.float32)


@kernel
def _read(
    scores, maxima, sums,
    stride, tokens, chunks, table, factor,
    TERMS: tl.constexpr, LENGTH: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Program (row, block): maxima and TERMS power sums of GROUP chunks of LENGTH scores.

    The four runs of a chunk, of RUN scores each, are read by the same few threads, so that most of
    a sum is added up inside of a thread: exchanging numbers between threads would take longer than
    the reading. ``factor`` is log2 e over the temperature.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    token = (chunk * LENGTH)[:, None] + tl.arange(0, RUN)[None, :]
    scores += row * stride
    a, b = _run(scores, token, 0, tokens, RUN), _run(scores, token, 1, tokens, RUN)
    c, d = _run(scores, token, 2, tokens, RUN), _run(scores, token, 3, tokens, RUN)
    largest = tl.max(tl.maximum(tl.maximum(a, b), tl.maximum(c, d)), axis=1)
    bound = tl.where(largest == -float("inf"), 0.0, largest)[:, None]
    a, b = tl.exp2((a - bound) * factor), tl.exp2((b - bound) * factor)
    c, d = tl.exp2((c - bound) * factor), tl.exp2((d - bound) * factor)
    place = row * chunks + chunk
    inside = chunk < chunks
    tl.store(maxima + place, largest, mask=inside)
    e, f, g, h = a, b, c, d
    for j in tl.static_range(TERMS):
        tl.store(sums + j * table + place, tl.sum((e + f) + (g + h), axis=1), mask=inside)
        e, f, g, h = e * a, f * b, g * c, h * d


def read_into(
    scores: Tensor, temperature: float, length: int, maxima: Tensor, sums: Tensor
) -> None:
    """Fill maxima [rows, C] and sums [J, rows, C] from scores [rows, V]; both float32.

    ``length`` is a power of two; the rows of scores need not be contiguous.
    """
    rows, tokens = scores.shape
    chunks = maxima.shape[-1]
    # A thread reads 16 bytes of each run.
    run, each = length // RUNS, 16 // scores.element_size()
    group = max(1, THREADS * each // run)
    grid = (rows, triton.cdiv(chunks, group))
    _read[grid](
        scores, maxima, sums, scores.stride(0), tokens, chunks, rows * chunks, LOG2_E / temperature,
        TERMS=len(sums), LENGTH=length, GROUP=group, RUN=run, num_warps=THREADS // 32,
    )  # fmt: skip


@kernel
def _normalize(
    maxima, sums, log_prob, log_total, offset, chunks, inverse_temperature, BLOCK: tl.constexpr
):
    """Compute log Σ e^{maximum / temperature} · sum over the chunks of one row."""
    row = tl.program_id(0).to(tl.int64)
    inverse_temperature = tl.load(inverse_temperature)
    top = tl.full((), -float("inf"), tl.float64)
    total = tl.zeros((), tl.float64)
    for start in range(0, chunks, BLOCK):
        chunk = start + tl.arange(0, BLOCK)
        place, here = row * chunks + chunk, chunk < chunks
        x = tl.load(maxima + place, mask=here, other=-float("inf"))
        x = scaled(x, inverse_temperature)
        higher = tl.maximum(top, tl.max(x, axis=0))
        bound = tl.where(higher == -float("inf"), 0.0, higher)
        weight = tl.load(sums + place, mask=here, other=0.0).to(tl.float64) * tl.exp(x - bound)
        total = total * tl.exp(top - bound) + tl.sum(weight, axis=0)
        top = higher
    all_of_it = top + tl.log(total)
    tl.store(log_total + row, all_of_it)
    tl.store(offset + row, tl.load(log_prob + row) - all_of_it)


def normalize(
    maxima: Tensor, sums: Tensor, temperature: float, log_prob: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log Σ exp(score / temperature) [R, P], and the log-probabilities [R, P] less that.

    Both are float64; they are computed from maxima [R, P, C] and sums [R, P, C].
    """
    log_prob = log_prob.contiguous()
    log_total, offset = torch.empty_like(log_prob), torch.empty_like(log_prob)
    _normalize[(log_prob.numel(),)](
        maxima.contiguous(), sums.contiguous(), log_prob, log_total, offset,
        maxima.shape[-1], host_number(1 / temperature, maxima.device),
        BLOCK=512,
    )  # fmt: skip
    return log_total, offset
