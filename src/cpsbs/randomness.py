"""Uniform random numbers for rows: from one generator for all of them, or from one for each.

With one for each, what a row gets does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cpsbs.backends.base import TORCH, Backend

Generators = torch.Generator | Sequence[torch.Generator] | None
"""One generator, one for each row, or torch's default one."""


BELOW_ONE = 1 - 2.0**-52
"""Keeps u·x below x when it is rounded."""


@dataclass(frozen=True)
class Counters:
    """Streams that are a seed and a count each, on a device; for kernels."""

    seeds: Tensor
    """[B] int64"""
    counts: Tensor
    """[B] int64; how many times something was drawn."""


class Streams:
    """Random numbers for ``rows`` rows on a device."""

    def __init__(
        self, generator: Generators, rows: int, device: torch.device, backend: Backend = TORCH
    ) -> None:
        if isinstance(generator, Sequence) and len(generator) != rows:
            raise ValueError(
                f"generator has {len(generator)} generators; it must have one for each row, {rows}"
            )
        self.generator = generator
        self._device, self._backend = device, backend
        self.counters: Counters | None = None
        if isinstance(generator, Sequence) and backend.counts_random_numbers:
            seeds = [_state(g) for g in generator]
            both = torch.tensor(seeds, dtype=torch.int64, device="cpu").view(-1, 2).to(device)
            self.counters = Counters(both[:, 0].contiguous(), both[:, 1].contiguous())

    @staticmethod
    def split(
        seed: int,
        sources: int | Sequence[int],
        device: torch.device | str,
        backend: Backend = TORCH,
    ) -> Streams:
        """Return those of the generators of ``split_seed``; counters are made without them."""
        device = torch.device(device)
        numbers = range(sources) if isinstance(sources, int) else sources
        if not backend.counts_random_numbers:
            return Streams(split_seed(seed, numbers, device), len(numbers), device)
        streams = Streams(None, len(numbers), device, backend)
        mixed = [_mixed(seed, i) % 2**63 for i in numbers]
        seeds = torch.tensor(mixed, dtype=torch.int64, device="cpu")
        seeds = seeds.to(device)
        streams.counters = Counters(seeds, torch.zeros_like(seeds))
        return streams

    @property
    def rows(self) -> int | None:
        """How many there are, if each has its own."""
        if self.counters is not None:
            return len(self.counters.seeds)
        return len(self.generator) if isinstance(self.generator, Sequence) else None

    @property
    def separate(self) -> bool:
        """Each row has a stream of its own."""
        return self.counters is not None or isinstance(self.generator, Sequence)

    def uniform(self, row: Tensor, size: tuple[int, ...]) -> Tensor:
        """[A, *size] float64 in [0, 1), for the rows [A] named."""
        if self.counters is not None:
            return self._backend.uniform(self.counters, row, size)
        if isinstance(self.generator, Sequence):
            drawn = torch.empty((len(row), *size), dtype=torch.float64, device=self._device)
            for own, r in zip(drawn.unbind(), row.tolist(), strict=True):
                own.uniform_(generator=self.generator[r])
            return drawn
        return self._draw((len(row), *size), self.generator)

    def select(self, rows: Tensor) -> Streams:
        """The streams of some of the rows."""
        if self.counters is not None:
            some = Streams(None, 0, self._device, self._backend)
            some.counters = Counters(self.counters.seeds[rows], self.counters.counts[rows])
            # What goes on here draws nothing that is drawn there.
            self.counters.counts.index_add_(0, rows, torch.full_like(rows, 2**16))
            return some
        if isinstance(self.generator, Sequence):
            chosen = [self.generator[r] for r in rows.tolist()]
            return Streams(chosen, len(chosen), self._device, self._backend)
        return self

    def put(self, rows: Sequence[int], others: Streams) -> None:
        """Let these rows have the streams of others; all are separate."""
        if self.counters is not None and others.counters is not None:
            at = torch.tensor(rows, dtype=torch.int64, device=self._device)
            self.counters.seeds.index_copy_(0, at, others.counters.seeds)
            self.counters.counts.index_copy_(0, at, others.counters.counts)
        elif isinstance(self.generator, Sequence) and isinstance(others.generator, Sequence):
            mine = dict(enumerate(self.generator)) | dict(zip(rows, others.generator, strict=True))
            self.generator = list(mine.values())
        else:
            raise ValueError("generator is one for all sources; it must have one for each")

    def copy(self) -> Streams:
        """The same streams, of which others may be put into the copy; generators are shared."""
        copied = Streams(None, 0, self._device, self._backend)
        copied.generator = self.generator
        if self.counters is not None:
            copied.counters = Counters(self.counters.seeds.clone(), self.counters.counts.clone())
        return copied

    def load(self, other: Streams) -> None:
        """Become those of another; of counters only."""
        assert self.counters is not None
        assert other.counters is not None
        self.counters.seeds.copy_(other.counters.seeds)
        self.counters.counts.copy_(other.counters.counts)

    def _draw(self, size: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return torch.rand(size, dtype=torch.float64, device=self._device, generator=generator)


def _state(generator: torch.Generator) -> tuple[int, int]:
    """A seed and a count that stand for a generator, which goes on."""
    if generator.device.type == "cpu":
        return fresh_seed(generator), 0
    count = generator.get_offset()
    generator.set_offset(count + 4)
    return generator.initial_seed() % 2**63, count % 2**24


def fresh_seed(generator: torch.Generator | None) -> int:
    """A seed, drawn from a generator, or from torch's own."""
    device = torch.device("cpu") if generator is None else generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device))


def split_seed(
    seed: int, sources: int | Sequence[int], device: torch.device | str = "cpu"
) -> list[torch.Generator]:
    """One generator for each source; that of source i depends on the seed and i alone.

    ``sources`` is how many there are, or their numbers.
    """
    numbers = range(sources) if isinstance(sources, int) else sources
    return [torch.Generator(device).manual_seed(_mixed(seed, i) % 2**63) for i in numbers]


def shuffled(items: Tensor, uniform: Tensor) -> Tensor:
    """[R, n] random int64 keys of the items [R, n], which are whole numbers; in [0, 1) [R, 1].

    The key of an item depends on the item and on the row's random number alone, not on its place:
    an order by these keys stays what it is when items change places.
    """
    return _mix(items * 0x2545F4914F6CDD1D + (uniform * 2.0**53).long())


def _mix(bits: Tensor) -> Tensor:
    """Splitmix64 of int64 numbers, whose products wrap around."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ ((bits >> shift) & (2 ** (64 - shift) - 1))) * (factor - 2**64)
    return bits ^ ((bits >> 31) & (2**33 - 1))


def _mixed(seed: int, i: int) -> int:
    """64 bits (splitmix64), in which neighbouring seeds and sources have nothing in common.

    Torch's generator on a CPU uses 32 of them, so that among 10⁵ sources one or two pairs may have
    the same stream.
    """
    mixed = (seed * 0x9E3779B97F4A7C15 + i * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) % 2**64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
    return mixed ^ (mixed >> 31)
