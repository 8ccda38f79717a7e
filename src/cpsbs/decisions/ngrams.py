"""N-grams that texts have in common, for all pairs of texts of many sources at once.

Metrics such as BLEU and chrF rest on Σ_g min(count of g in a, count of g in b), the number of
n-grams g that two texts share. Pair by pair, that counts the n-grams of every text again and again.
Here each text is counted once, for all orders n together:

1. All suffixes of all texts of a source are sorted by their first n symbols, for the largest n. In
   that order the n-grams of *every* order stand in runs, so that a run number is an n-gram's index.
2. Scattering ones into a table [texts, n-grams] counts them.
3. With counts a and b, min(a, b) = [a ≥ 1][b ≥ 1] + min((a − 1)⁺, (b − 1)⁺). Summed over n-grams,
   the first term is a product of matrices. The second concerns few n-grams, those that some text
   has twice, and is a distance: Σ min(a, b) = (Σ a + Σ b − Σ |a − b|) / 2.

Everything is exact: the counts are integers, far below 2²⁴.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SYMBOLS = {"cpu": 2**17, "cuda": 2**23}
"""The number of symbols that are sorted together, by type of device: so many stay in the cache of a
CPU, and keep a GPU busy."""

TABLE = {"cpu": 2**22, "cuda": 2**28}
"""The largest table of counts that is made at once, in numbers of four bytes; one source may need a
larger one."""

KEY_BITS = 63
"""How many bits of a sorting key can be used."""


@dataclass(frozen=True)
class Symbols:
    """The distinct texts of many sources as sequences of symbols, such as characters or words."""

    flat: Tensor
    """[n] the symbols of all texts one after the other, as integers ≥ 0."""
    lengths: list[list[int]]
    """For each source, the number of symbols of each of its texts."""

    @staticmethod
    def of_characters(texts: Sequence[Sequence[str]]) -> Symbols:
        """Return the characters of texts; a symbol is a code point."""
        joined = "".join(text for own in texts for text in own)
        data = bytearray(joined.encode("utf-32-le", "surrogatepass"))
        flat = torch.zeros(0, dtype=torch.int64, device="cpu")
        if data:
            flat = torch.frombuffer(data, dtype=torch.int32).to(torch.int64)
        return Symbols(flat, [[len(text) for text in own] for own in texts])

    @staticmethod
    def of_words(texts: Sequence[Sequence[Sequence[str]]]) -> Symbols:
        """Return the words of texts that are lists of words; equal words get equal numbers."""
        known: dict[str, int] = {}
        flat = [
            known.setdefault(word, len(known)) for own in texts for text in own for word in text
        ]
        lengths = [[len(text) for text in own] for own in texts]
        return Symbols(torch.tensor(flat, dtype=torch.int64, device="cpu"), lengths)


def shared_ngrams(
    symbols: Symbols, rows: Tensor, columns: Tensor, order: int, device: torch.device
) -> Tensor:
    """Return [S, order, R, C] how many n-grams of each order n = 1, …, order two texts share.

    Args:
        symbols: the texts of S sources.
        rows: [S, R] the texts of the rows, as indices into the texts of the source.
        columns: [S, C] the texts of the columns.
        order: the largest n.
        device: where to compute.
    """
    sizes = [sum(own) + len(own) for own in symbols.lengths]
    found = torch.zeros((len(sizes), order, rows.shape[1], columns.shape[1]), device=device)
    begin, at, together = 0, 0, SYMBOLS.get(device.type, SYMBOLS["cpu"])
    while begin < len(sizes):
        end, longest = begin + 1, sizes[begin]
        while end < len(sizes) and (end + 1 - begin) * max(longest, sizes[end]) <= together:
            longest = max(longest, sizes[end])
            end += 1
        lengths = symbols.lengths[begin:end]
        count = sum(map(sum, lengths))
        flat = symbols.flat[at : at + count].to(device)
        part = slice(begin, end)
        of_rows, of_columns = rows[part].to(device), columns[part].to(device)
        most = max(map(len, lengths))
        found[part] = _shared(*_laid_out(flat, lengths), most, of_rows, of_columns, order)
        begin, at = end, at + count
    return found


def _laid_out(flat: Tensor, lengths: list[list[int]]) -> tuple[Tensor, Tensor, int]:
    """Return [S, M] the symbols, numbered from 1, with 0 after each text; and [S, M] their texts.

    The third value is the largest number of a symbol.
    """
    device = flat.device
    texts = [len(own) for own in lengths]
    length = torch.tensor([n for own in lengths for n in own], dtype=torch.int64, device=device)
    source = torch.arange(len(texts), device=device).repeat_interleave(
        torch.tensor(texts, device=device)
    )
    first = torch.tensor([0, *texts[:-1]], device=device).cumsum(0)
    place = torch.arange(len(length), device=device) - first[source]
    ends = (length + 1).cumsum(0)  # with a zero after each text
    before = torch.nn.functional.pad(ends, (1, 0))[first]
    size = max(sum(own) + len(own) for own in lengths)
    of_symbol = torch.arange(len(length), device=device).repeat_interleave(length)
    at = torch.arange(len(flat), device=device) + of_symbol - before[source[of_symbol]]
    where = source[of_symbol] * size + at
    numbers, largest = _numbered(flat)
    codes = torch.zeros(len(texts) * size, dtype=torch.int64, device=device)
    text = torch.zeros_like(codes)
    codes[where] = numbers
    text[where] = place[of_symbol]
    return codes.view(len(texts), size), text.view(len(texts), size), largest


def _numbered(flat: Tensor) -> tuple[Tensor, int]:
    """Return the symbols numbered 1, 2, … in order, without gaps, and the largest number."""
    if not len(flat):
        return flat, 0
    seen = torch.zeros(int(flat.max()) + 1, dtype=torch.int64, device=flat.device)
    seen[flat] = 1
    number = seen.cumsum(0)
    return number[flat], int(number[-1])


def _shared(
    codes: Tensor,
    text: Tensor,
    largest: int,
    texts: int,
    rows: Tensor,
    columns: Tensor,
    order: int,
) -> Tensor:
    """Return [S, order, R, C] the shared n-grams of texts whose symbols are laid out in rows.

    A source has at most ``texts`` texts.
    """
    size = TABLE.get(codes.device.type, TABLE["cpu"])
    suffixes = _sorted_suffixes(codes, text, largest, order)
    owner = next(suffixes)
    out = torch.zeros((len(codes), order, rows.shape[1], columns.shape[1]), device=codes.device)
    new = torch.zeros_like(codes, dtype=torch.bool)
    for n, column in enumerate(suffixes):
        new[:, 1:] |= column.diff(dim=1) != 0
        ngram = new.cumsum(1)
        width = int(ngram[:, -1].max()) + 1
        # A suffix of fewer than n symbols has no n-gram.
        present = (column > 0).to(out.dtype)
        step = max(1, size // (texts * width))
        for i in range(0, len(codes), step):
            part = slice(i, i + step)
            table = out.new_zeros((len(ngram[part]), texts * width))
            table.scatter_add_(1, owner[part] * width + ngram[part], present[part])
            counts = table.view(-1, texts, width)
            out[part, n] = _common(counts, rows[part], columns[part])
    return out


def _sorted_suffixes(codes: Tensor, text: Tensor, largest: int, order: int) -> Iterator[Tensor]:
    """Yield [S, M] the texts of all suffixes in order, then their first, second, … symbol [S, M].

    Symbols after the end of a text are 0.
    """
    following = [codes]
    for _ in range(order - 1):
        moved = torch.nn.functional.pad(following[-1][:, 1:], (0, 1))
        following.append(torch.where(codes > 0, moved, 0))
    bits, text_bits = largest.bit_length(), int(text.max()).bit_length()
    if order * bits + text_bits <= KEY_BITS:
        key = torch.zeros_like(codes)
        for column in following:
            key = (key << bits).bitwise_or_(column)
        key = (key << text_bits).bitwise_or_(text).sort(dim=1).values
        shifts = [text_bits + bits * (order - 1 - n) for n in range(order)]
        mask = (1 << bits) - 1
        yield key & ((1 << text_bits) - 1)
        yield from ((key >> shift).bitwise_and_(mask) for shift in shifts)
        return
    # The alphabet is too large for one key: sort by the last symbol first.
    place = torch.arange(codes.shape[1], device=codes.device).expand_as(codes)
    for column in reversed(following):
        place = place.gather(1, column.gather(1, place).sort(dim=1, stable=True).indices)
    yield text.gather(1, place)
    yield from (column.gather(1, place) for column in following)


def _common(counts: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return [S, R, C] Σ_g min(a_g, b_g) of two texts.

    The counts [S, texts, n-grams] are overwritten.
    """

    def of(table: Tensor, texts: Tensor) -> Tensor:
        return table.gather(1, texts[..., None].expand(-1, -1, table.shape[-1]))

    # N-grams that some text has more than once, gathered at the front.
    most = counts.amax(1)
    width = int((most > 1).sum(1).max())
    further = torch.zeros((), device=counts.device)
    if width:
        at = most.topk(width, dim=1).indices
        rest = counts.gather(2, at[:, None].expand(-1, counts.shape[1], -1)).sub_(1).clamp_(min=0)
        a, b = of(rest, rows), of(rest, columns)
        further = (a.sum(-1)[:, :, None] + b.sum(-1)[:, None, :] - torch.cdist(a, b, p=1)) / 2
    once = counts.clamp_(max=1)
    return torch.bmm(of(once, rows), of(once, columns).mT) + further
