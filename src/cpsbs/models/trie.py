"""The sequences that were found so far, as a tree of prefixes that knows how much mass is left.

Let S be the sequences of a source that are held. For a prefix x, u(x) is the share of the
probability below x that S does *not* hold:

    u(x) = Σ_{v not in the tree} p(v | x) + Σ_{v in the tree} p(v | x) u(xv) ,

with u = 0 at a sequence of S and u = 1 for every prefix that S never visits. All terms are positive
and none is a difference, so that u keeps its relative precision however little is left, and it is
exactly zero where S holds everything that is possible. It is kept as a logarithm, in float64.

Nothing here calls a model: ``cpsbs.models.residual`` does, and fills in what it finds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Trie:
    """Prefixes of sequences of one or more sources; the first nodes are the empty prefixes.

    Args:
        sources: the number of sources.
        device: the device of all tensors.

    Attributes:
        source: [n] the source of each node.
        token: [n] the last token of each node's prefix; -1 for an empty one.
        log_p: [n] log p(token | prefix without it).
        log_others: [n] the log of the probability that the next token is none of the children's.
        log_left: [n] log u(x).
        entropy: [n] the entropy of the next token, where it was asked for.
        leaf: [n] whether the prefix is a sequence that is held.
    """

    def __init__(self, sources: int, device: torch.device) -> None:
        zeros = torch.zeros(sources, dtype=torch.float64, device=device)
        self.vocab_size = 0
        self.source = torch.arange(sources, device=device)
        self.token = torch.full_like(self.source, -1)
        self.leaf = torch.zeros(sources, dtype=torch.bool, device=device)
        self.log_p, self.log_others, self.log_left, self.entropy = (zeros.clone() for _ in range(4))
        # The edges, sorted by parent and token: [m] parent·V + token, and [m] the child.
        self._keys = self._child = torch.empty(0, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        return len(self.source)

    def insert(self, source: Tensor, sequences: Tensor, lengths: Tensor) -> Tensor:
        """Add sequences, and return [s, T] the node of every prefix; -1 after the end.

        What is known of new nodes is set to what holds for a prefix that S never visits. Sequences
        may repeat, and may have been added before.

        Args:
            source: [s] the source of each sequence.
            sequences: [s, T] their tokens, 0 ≤ token < ``vocab_size``.
            lengths: [s] their numbers of tokens, at least 1.

        Raises:
            ValueError: if a sequence is the beginning of another one of its source.
        """
        count = len(self)
        path = torch.full_like(sequences, -1)
        node, keys, sources = source, list[Tensor](), [self.source]
        for t in range(sequences.shape[-1]):
            on = (lengths > t).nonzero()[:, 0]
            key = node[on] * self.vocab_size + sequences[on, t]
            child = self._find(key)
            unknown = child < 0
            new, place = torch.unique(key[unknown], return_inverse=True)
            child[unknown] = count + place
            path[on, t] = child
            keys.append(new)
            sources.append(torch.empty_like(new).scatter_(0, place, source[on[unknown]]))
            count += len(new)
            node = path[:, t]
        self._grow(torch.cat(keys), torch.cat(sources))
        last = path.gather(-1, (lengths - 1)[:, None])[:, 0]
        self.leaf[last], self.log_left[last] = True, -math.inf
        inner = path.scatter(-1, (lengths - 1)[:, None], -1)
        broken = (inner >= 0) & self.leaf[inner.clamp(min=0)]
        if bool(broken.any()):
            row, t = broken.nonzero()[0].tolist()
            raise ValueError(
                f"the sequence {sequences[row, : t + 1].tolist()} of source {int(source[row])} is "
                f"the beginning of another one, {sequences[row, : lengths[row]].tolist()}"
            )
        return path

    def children(self, node: Tensor, token: Tensor) -> Tensor:
        """Return [r] the node of prefix [r] and token [r]; -1 if there is none, or no prefix."""
        found = self._find(node * self.vocab_size + token)
        return torch.where(node < 0, -1, found)

    def edges(self, node: Tensor) -> tuple[Tensor, Tensor]:
        """Return all edges below the nodes [r]: [e] the place of the node, and [e] the child.

        A negative node has none.
        """
        first, end = (
            torch.searchsorted(self._keys, (node + more) * self.vocab_size) for more in (0, 1)
        )
        count = torch.where(node < 0, 0, end - first)
        place = torch.arange(len(node), device=node.device).repeat_interleave(count)
        start = (first - (count.cumsum(0) - count))[place]
        return place, self._child[start + torch.arange(len(place), device=node.device)]

    def settle(self, path: Tensor) -> None:
        """Compute u again along these paths [s, T], from the leaves to the empty prefixes.

        ``log_p`` and ``log_others`` must be known for all of their nodes.
        """
        for t in range(path.shape[-1] - 1, -1, -1):
            there = path[:, t] >= 0
            node = self.source[path[there, 0]] if t == 0 else path[there, t - 1]
            node = torch.unique(node)
            place, child = self.edges(node)
            below = self.log_p[child] + self.log_left[child]
            self.log_left[node] = add_exp(self.log_others[node], place, below).clamp(max=0.0)

    def _find(self, key: Tensor) -> Tensor:
        """Return [r] the child at each key, or -1."""
        if not len(self._keys):
            return torch.full_like(key, -1)
        place = torch.searchsorted(self._keys, key).clamp_(max=len(self._keys) - 1)
        return torch.where(self._keys[place] == key, self._child[place], -1)

    def _grow(self, keys: Tensor, source: Tensor) -> None:
        """Make room for new nodes with these keys, given the sources [n] of all nodes."""
        number = torch.arange(len(self), len(source), device=source.device)
        self._keys, order = torch.cat([self._keys, keys]).sort()
        self._child = torch.cat([self._child, number])[order]
        self.source = source
        self.token = torch.cat([self.token, keys % self.vocab_size])
        zeros = self.log_p.new_zeros(len(keys))
        self.leaf = torch.cat([self.leaf, zeros.bool()])
        for name in ("log_p", "log_others", "log_left", "entropy"):
            setattr(self, name, torch.cat([getattr(self, name), zeros]))


def add_exp(total: Tensor, place: Tensor, terms: Tensor) -> Tensor:
    """Return [r] log(e^total + Σ e^terms), where each of the terms [e] belongs to a place [e]."""
    most = total.scatter_reduce(0, place, terms, "amax")
    unit = torch.where(most == -math.inf, 0.0, most)
    summed = (total - unit).exp().scatter_add(0, place, (terms - unit[place]).exp())
    return summed.log() + unit
