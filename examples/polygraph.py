"""Semantic entropy by lm-polygraph, from weighted beams.

    python examples/polygraph.py

lm-polygraph's ``SemanticEntropy`` takes samples, their log-likelihoods ℓ_j and their semantic
classes c(j). With the default settings and log-weights v_j it computes

    −(1/K) Σ_j exp(v_j) · log Σ_{i: c(i) = c(j)} exp(ℓ_i) .

With ℓ_j = log w_j and v_j = log w_j + log K, where w are the weights of the beam, normalised, that
is −Σ_a P(a) log P(a), the plug-in entropy over answers of ``cpsbs.answers``. docs/how-to has a page
on it.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import cpsbs
from cpsbs import keys
from cpsbs.decisions.keys import Key


@dataclass(frozen=True)
class PolygraphInputs:
    """What ``SemanticEntropy`` takes, for each source; samples are in the order of the beam."""

    texts: list[list[str]]
    """``hyps_list``: the texts of the samples."""
    log_likelihoods: list[list[float]]
    """``loglikelihoods_list``: log w of each sample, such that those of an answer add up to P."""
    log_weights: list[list[float]]
    """``log_weights``: log (K w) of each sample; their exponentials average to one."""
    sample_to_class: dict[int, dict[int, int]]
    """For each source, the number of the class of each sample."""
    class_to_sample: dict[int, list[list[int]]]
    """For each source, the samples of each class."""

    @property
    def stats(self) -> dict[str, Any]:
        """What ``SemanticEntropy.__call__`` takes; it has no place for the weights."""
        classes = {"sample_to_class": self.sample_to_class, "class_to_sample": self.class_to_sample}
        return {
            "sample_texts": self.texts,
            "sample_log_probs": self.log_likelihoods,
            "semantic_classes_entail": classes,
        }


def polygraph_inputs(beams: cpsbs.Beams, key: Key, decode: Any) -> PolygraphInputs:
    """Return beams as lm-polygraph's samples, with the answers of a key as semantic classes.

    Args:
        beams: the result of a search by a design that has weights.
        key: the same as for ``cpsbs.answers``.
        decode: a function from lists of tokens to texts, such as ``TextModel.decode``.
    """
    if beams.log_weight is None:
        raise ValueError(f"the design {beams.design!r} has no weights; search with 'stratified'")
    found = cpsbs.answers(beams, key, decode=decode)
    to_class, members = {}, {}
    log_likelihoods = []
    for b, own in enumerate(found):
        number = {y: i for i, answer in enumerate(own.answers) for y in answer.sequences}
        samples = [tuple(y) for y in beams.tokens(b)]
        to_class[b] = {j: number[y] for j, y in enumerate(samples)}
        members[b] = [
            [j for j, c in to_class[b].items() if c == i] for i in range(len(own.answers))
        ]
        log_likelihoods.append(beams.log_weight[b][beams.present[b]].log_softmax(0).tolist())
    log_weights = [[x + math.log(len(own)) for x in own] for own in log_likelihoods]
    return PolygraphInputs(beams.decode(decode), log_likelihoods, log_weights, to_class, members)


def answer_stats(found: cpsbs.Answers) -> dict[str, Any]:
    """Return answers as if each were one sample, for ``entropy_estimation="direct"``.

    Then lm-polygraph computes −Σ_a P(a) log P(a) by its ``__call__``, without weights.
    """
    counts = [len(own.answers) for own in found]
    classes = {
        "sample_to_class": {b: {i: i for i in range(n)} for b, n in enumerate(counts)},
        "class_to_sample": {b: [[i] for i in range(n)] for b, n in enumerate(counts)},
    }
    totals = [math.fsum(a.probability for a in own.answers) for own in found]
    return {
        "sample_texts": [[str(a.answer) for a in own.answers] for own in found],
        "sample_log_probs": [
            [math.log(a.probability / total) for a in own.answers]
            for own, total in zip(found, totals, strict=True)
        ],
        "semantic_classes_entail": classes,
    }


def semantic_entropy(inputs: PolygraphInputs) -> list[float]:
    """Return the semantic entropy of every source by lm-polygraph's own estimator."""
    from lm_polygraph.estimators import SemanticEntropy

    estimator = SemanticEntropy()
    estimator(inputs.stats)  # it remembers the classes, and its result does not count
    found = estimator.batched_call(inputs.texts, inputs.log_likelihoods, inputs.log_weights)
    return [float(value) for value in found]


def main() -> None:
    """Print the entropy over answers by cpsbs, and by lm-polygraph if it is installed."""
    model = cpsbs.load("en-fr")
    sources = ["The room was too warm.", "Is this seat free?"]
    beams = model.beams(sources, k=10, temperature=0.7, seed=0)
    noun = keys.choice(["pièce", "chambre", "salle", "place", "siège"])
    found = cpsbs.answers(beams, noun, decode=model.decode)
    print("cpsbs:       ", ", ".join(f"{own.entropy:.6f}" for own in found))
    if importlib.util.find_spec("lm_polygraph") is None:
        print("lm-polygraph is not installed")
        return
    by_samples = semantic_entropy(polygraph_inputs(beams, noun, model.decode))
    print("lm-polygraph:", ", ".join(f"{value:.6f}" for value in by_samples))


if __name__ == "__main__":
    main()
