"""The example page of ``cpsbs explore`` in the documentation; run it to draw its data again.

Three sentences: the model is nearly sure of the first, the second is long and could be translated
in many ways, and the English of the third does not say who is flying. Each has the paper's design,
stochastic beam search, ``stratified`` and independent sampling, with fifty seeds.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import cpsbs
from cpsbs.explore import page
from cpsbs.explore.explorer import Explorer, together
from cpsbs.explore.record import Record
from cpsbs.explore.scene import Scene

SCENES = [
    Scene(
        "The room was too warm.",
        temperature=0.5,
        function="bleu",
        argument="La pièce était trop chaude.",
    ),
    Scene(
        "The old woman with the red umbrella nevertheless refused to let anybody into the house.",
        temperature=0.5,
        function="bleu",
        argument="La vieille dame au parapluie rouge refusa pourtant de laisser entrer quiconque "
        "dans la maison.",
    ),
    Scene("They are flying planes.", temperature=0.5, function="contains", argument="Elles"),
]
DESIGNS = ["stratified", "conditional-poisson", "gumbel-top-k", "independent"]
SEEDS = range(50)


DATA = Path(__file__).parent / "explore" / "example.json.xz"


def drawn() -> list[Record]:
    """Return a document for each sentence."""
    explorer = Explorer(cpsbs.load("en-fr", device="cpu"))
    documents = []
    for scene in SCENES:
        document = explorer.document(scene)
        each = together(scene)
        for design in DESIGNS:
            explorer.draw(document, design, SEEDS[0])
            for first in range(1, len(SEEDS), each):
                explorer.redraw(document, design, SEEDS[first : first + each])
        explorer.exact(document)
        documents.append(document.as_record())
    return documents


def example_page() -> str:
    """Return the page as HTML, from the data that are stored.

    Raises:
        ImportError: if the page has not been built.
    """
    documents = json.loads(lzma.decompress(DATA.read_bytes()))
    shown = {"model": "en-fr", "load": {"name": "en-fr"}, "seed": SEEDS[0], "chosen": DESIGNS}
    return page.html({"mode": "file", **shown, "documents": documents})


if __name__ == "__main__":
    DATA.write_bytes(lzma.compress(json.dumps(drawn(), separators=(",", ":")).encode()))
