"""Sampling designs: rules that pick K of N weighted candidates and know how likely each was.

Each has a module of its own. ``base`` says what the search expects of a design, ``variance`` has
the error estimate by joint inclusion, and ``cpsbs.contracts`` checks a design of one's own.
"""

from cpsbs.designs.arithmetic import Arithmetic
from cpsbs.designs.base import Design
from cpsbs.designs.calibrated import Calibrated
from cpsbs.designs.conditional_poisson import ConditionalPoissonDesign
from cpsbs.designs.diverse import Diverse
from cpsbs.designs.gumbel import GumbelTopK
from cpsbs.designs.independent import Independent
from cpsbs.designs.stratified import Stratified
from cpsbs.designs.sum_and_sample import SumAndSample
from cpsbs.designs.top_k import TopK
from cpsbs.scores.candidates import Candidates, Selection

DESIGNS: dict[str, type[Design]] = {
    design.name: design
    for design in (
        ConditionalPoissonDesign,
        Calibrated,
        Stratified,
        GumbelTopK,
        Independent,
        Arithmetic,
        SumAndSample,
        TopK,
        Diverse,
    )
}
"""All designs by name."""


def design_named(design: str | Design) -> Design:
    """A design, given as an object or by its name, with its usual settings."""
    if isinstance(design, Design):
        return design
    if design not in DESIGNS:
        raise ValueError(f"design is {design!r}; allowed are {', '.join(DESIGNS)}, or a Design")
    return DESIGNS[design]()


__all__ = [
    "DESIGNS",
    "Arithmetic",
    "Calibrated",
    "Candidates",
    "ConditionalPoissonDesign",
    "Design",
    "Diverse",
    "GumbelTopK",
    "Independent",
    "Selection",
    "Stratified",
    "SumAndSample",
    "TopK",
    "design_named",
]
