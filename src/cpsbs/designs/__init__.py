"""Sampling designs: rules that pick K of N weighted candidates and know how likely each was.

Each design has a module of its own, whose docstring explains the method. ``base`` defines what the
search expects of a design and how to write your own, ``variance`` estimates an error by joint
inclusion, and ``cpsbs.check_design`` checks a design.
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
"""The designs that come with the package, by name."""


DEFAULT_DESIGN = "stratified"
"""The design that is used where the caller names none."""


def design_named(design: str | Design) -> Design:
    """Return the design itself, or the one of that name with its default settings."""
    if isinstance(design, Design):
        return design
    if design not in DESIGNS:
        raise ValueError(
            f"design is {design!r}; it must be one of {', '.join(DESIGNS)}, or a Design object"
        )
    return DESIGNS[design]()


__all__ = [
    "DEFAULT_DESIGN",
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
