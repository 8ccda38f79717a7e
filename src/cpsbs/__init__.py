"""Conditional Poisson stochastic beam search: draw K sequences, and estimate expectations.

``load`` makes a model from a checkpoint and its tokenizer, ``search`` draws K sequences from a
model by a sampling design, ``estimate`` turns them into an expectation with an error bar,
``answers`` into a distribution over answers, ``mbr`` into a decision, and ``risk`` into a gradient.
"""

from typing import TYPE_CHECKING, Any

import cpsbs.interrupts  # noqa: F401, before the imports that take long
from cpsbs import functions, gradients, keys, utilities
from cpsbs.backends import release
from cpsbs.conditional_poisson.distribution import ConditionalPoisson
from cpsbs.contracts import check_design
from cpsbs.decisions.answers import Answers, answers
from cpsbs.decisions.decision import Decisions
from cpsbs.decisions.mbr import mbr
from cpsbs.decisions.risk import risk
from cpsbs.designs import DESIGNS, Design
from cpsbs.estimation.estimate import estimate
from cpsbs.estimation.forcing import log_prob
from cpsbs.estimation.inclusion import Inclusion, hindsight_inclusion, monte_carlo_inclusion
from cpsbs.estimation.metrics import diversity, sentence_bleu
from cpsbs.estimation.result import Estimate
from cpsbs.models import FunctionModel, SequenceModel, TableModel, TransformersModel
from cpsbs.models.checks import check_model
from cpsbs.randomness import split_seed
from cpsbs.search.api import search, search_each
from cpsbs.search.beams import Beams
from cpsbs.search.more import more, until
from cpsbs.search.path import Offer, Step
from cpsbs.text import TextModel, load

if TYPE_CHECKING:
    from cpsbs.generation import generate

__version__ = "0.2.0"

__all__ = [
    "DESIGNS",
    "Answers",
    "Beams",
    "ConditionalPoisson",
    "Decisions",
    "Design",
    "Estimate",
    "FunctionModel",
    "Inclusion",
    "Offer",
    "SequenceModel",
    "Step",
    "TableModel",
    "TextModel",
    "TransformersModel",
    "__version__",
    "answers",
    "check_design",
    "check_model",
    "diversity",
    "estimate",
    "functions",
    "generate",
    "gradients",
    "hindsight_inclusion",
    "keys",
    "load",
    "log_prob",
    "mbr",
    "monte_carlo_inclusion",
    "more",
    "release",
    "risk",
    "search",
    "search_each",
    "sentence_bleu",
    "split_seed",
    "until",
    "utilities",
]


def __getattr__(name: str) -> Any:
    """Import ``generate`` on first use, because it needs transformers."""
    if name == "generate":
        from cpsbs.generation import generate

        return generate
    raise AttributeError(f"module 'cpsbs' has no attribute {name!r}")
