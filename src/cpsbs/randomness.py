"""Random numbers for the rows of a batch: from one generator for all rows, or from one for each.

Where every row has a stream of its own, what a row draws does not depend on the rest of the batch.
Such a stream is a ``torch.Generator``, or, where the backend draws in kernels, a counter: a seed
and a count from which a kernel computes the random numbers itself (Philox), without asking the
host.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cpsbs.backends.base import TORCH, Backend

Generators = torch.Generator | Sequence[torch.Generator] | None
"""One generator for all rows, one for each row, or None for torch's default generator."""


BELOW_ONE = 1 - 2.0**-52
"""A factor that keeps u·x below x after rounding, for a uniform u in [0, 1)."""


@dataclass(frozen=True)
class Counters:
    """Streams of random numbers on a device, each given by a seed and a count."""

    seeds: Tensor
    """[B] int64."""
    counts: Tensor
    """[B] int64, how many times each stream was drawn from; drawing increments it on the device."""


class Streams:
    """Random streams for ``rows`` rows on a device: one for each row, or one for all of them.

    Args:
        generator: one generator for each row, or one for all of them (None for torch's default).
        rows: how many rows there are.
        device: where the random numbers are needed.
        backend: decides whether streams of single rows become counters.
    """

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
            pairs = [_seed_and_count(g) for g in generator]
            both = torch.tensor(pairs, dtype=torch.int64, device="cpu").view(-1, 2).to(device)
            self.counters = Counters(both[:, 0].contiguous(), both[:, 1].contiguous())

    @staticmethod
    def split(
        seed: int,
        sources: int | Sequence[int],
        device: torch.device | str,
        backend: Backend = TORCH,
    ) -> Streams:
        """Return a stream for each source, which depends on the seed and on its number alone.

        Args:
            seed: the seed of all streams.
            sources: how many sources there are, or their numbers.
            device: where the random numbers are needed.
            backend: if it draws in kernels, the streams are counters and no generator is made.
        """
        device = torch.device(device)
        numbers = range(sources) if isinstance(sources, int) else sources
        if not backend.counts_random_numbers:
            return Streams(split_seed(seed, numbers, device), len(numbers), device)
        streams = Streams(None, len(numbers), device, backend)
        mixed = [_stream_seed(seed, i) for i in numbers]
        seeds = torch.tensor(mixed, dtype=torch.int64, device="cpu").to(device)
        streams.counters = Counters(seeds, torch.zeros_like(seeds))
        return streams

    @property
    def rows(self) -> int | None:
        """The number of streams, or None if all rows share one generator."""
        if self.counters is not None:
            return len(self.counters.seeds)
        return len(self.generator) if isinstance(self.generator, Sequence) else None

    @property
    def separate(self) -> bool:
        """Whether each row has a stream of its own."""
        return self.counters is not None or isinstance(self.generator, Sequence)

    def uniform(self, row: Tensor, size: tuple[int, ...]) -> Tensor:
        """Draw [A, *size] float64 numbers in [0, 1) from the streams of the rows [A]."""
        if self.counters is not None:
            return self._backend.uniform(self.counters, row, size)
        if isinstance(self.generator, Sequence):
            drawn = torch.empty((len(row), *size), dtype=torch.float64, device=self._device)
            for own, r in zip(drawn.unbind(), row.tolist(), strict=True):
                own.uniform_(generator=self.generator[r])
            return drawn
        shape = (len(row), *size)
        return torch.rand(shape, dtype=torch.float64, device=self._device, generator=self.generator)

    def select(self, rows: Tensor) -> Streams:
        """Return the streams of some rows, which go on from where they are now.

        This changes nothing here. Generators are shared with the selection, but counters are
        copied: whoever draws from the selection and then goes on with these streams must ``put``
        the selection back, or the same numbers are drawn twice.
        """
        if self.counters is not None:
            some = Streams(None, 0, self._device, self._backend)
            some.counters = Counters(self.counters.seeds[rows], self.counters.counts[rows])
            return some
        if isinstance(self.generator, Sequence):
            chosen = [self.generator[r] for r in rows.tolist()]
            return Streams(chosen, len(chosen), self._device, self._backend)
        return self

    def put(self, rows: Sequence[int] | Tensor, others: Streams) -> None:
        """Replace the streams of some rows by others, which go on from where they are now.

        The others are either a selection of these rows that was drawn from meanwhile, or the
        streams of other sources that take the places of these.
        """
        if self.counters is not None and others.counters is not None:
            at = torch.as_tensor(rows, dtype=torch.int64, device=self._device)
            self.counters.seeds.index_copy_(0, at, others.counters.seeds)
            self.counters.counts.index_copy_(0, at, others.counters.counts)
        elif isinstance(self.generator, Sequence) and isinstance(others.generator, Sequence):
            numbers = rows.tolist() if isinstance(rows, Tensor) else rows
            replaced = dict(zip(numbers, others.generator, strict=True))
            self.generator = [replaced.get(i, own) for i, own in enumerate(self.generator)]
        elif self.separate or others.separate or self.generator is not others.generator:
            raise ValueError(
                "generator is one for all sources, whose streams cannot be replaced one by one; "
                "give a seed, or a list with one generator for each source"
            )

    def copy(self) -> Streams:
        """Return a copy whose streams can be replaced without changing these.

        The generators are shared, but the counters are copied and advance independently.
        """
        copied = Streams(None, 0, self._device, self._backend)
        copied.generator = self.generator
        if self.counters is not None:
            copied.counters = Counters(self.counters.seeds.clone(), self.counters.counts.clone())
        return copied

    def load(self, other: Streams) -> None:
        """Overwrite the counters in place with those of other streams, of as many rows."""
        assert self.counters is not None
        assert other.counters is not None
        self.counters.seeds.copy_(other.counters.seeds)
        self.counters.counts.copy_(other.counters.counts)


def _seed_and_count(generator: torch.Generator) -> tuple[int, int]:
    """Return the seed and the count of a stream made from a generator, which is advanced.

    A stream made later from the same generator has nothing in common with this one. On a GPU no
    random number is drawn for that, because reading it back would synchronise with the host.
    """
    if generator.device.type == "cpu":
        return fresh_seed(generator), 0
    offset, seed = generator.get_offset(), generator.initial_seed() % 2**63
    generator.set_offset(offset + 4)
    return (_stream_seed(seed, offset) if offset else seed), 0


def fresh_seed(generator: torch.Generator | None) -> int:
    """Draw a seed from a generator, or from torch's default generator."""
    device = torch.device("cpu") if generator is None else generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device))


def chosen_seed(seed: int | None) -> int:
    """Return the seed, or a fresh one for None, or raise a ValueError if it is no integer."""
    if seed is None:
        return fresh_seed(None)
    try:
        return operator.index(seed)
    except TypeError:
        raise ValueError(f"seed is {seed!r}; it must be an integer, or None") from None


def split_seed(
    seed: int, sources: int | Sequence[int], device: torch.device | str = "cpu"
) -> list[torch.Generator]:
    """Return one generator for each source; that of source i depends on the seed and i alone.

    Args:
        seed: the seed of all generators.
        sources: how many sources there are, or their numbers.
        device: where the random numbers are needed.
    """
    numbers = range(sources) if isinstance(sources, int) else sources
    return [torch.Generator(device).manual_seed(_stream_seed(seed, i)) for i in numbers]


def round_seed(seed: int, number: int) -> int:
    """Return the seed of a round of draws, the first of which is number 1 and has the seed itself.

    Rounds that shared their random numbers would not be independent of what was found before.
    """
    return seed if number == 1 else _stream_seed(seed, -number)


def shuffle_keys(items: Tensor, uniform: Tensor) -> Tensor:
    """Return random int64 keys [R, n]; sorting the items [R, n] by them shuffles each row.

    The key of an item depends on the item, an integer, and on the row's random number ``uniform``
    [R, 1] in [0, 1) alone, not on its place: the shuffled order is the same in whatever order the
    items come.
    """
    return _splitmix64(items * 0x2545F4914F6CDD1D + (uniform * 2.0**53).long())


def _splitmix64(bits: Tensor) -> Tensor:
    """Return the int64 numbers mixed by splitmix64; products wrap around."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ ((bits >> shift) & (2 ** (64 - shift) - 1))) * (factor - 2**64)
    return bits ^ ((bits >> 31) & (2**33 - 1))


def _stream_seed(seed: int, i: int) -> int:
    """Return 63 bits (splitmix64) in which neighbouring seeds and sources have nothing in common.

    Torch's generator on a CPU uses 32 of them, so that among 10⁵ sources one or two pairs may have
    the same stream.
    """
    mixed = (seed * 0x9E3779B97F4A7C15 + i * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) % 2**64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
    return (mixed ^ (mixed >> 31)) % 2**63
