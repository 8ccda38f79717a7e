"""Computes BLEU and chrF of a translation model on test sets.

    python -m training.evaluate --model FOLDER --json FILE newstest2014.en newstest2014.fr [EN FR …]

It uses the beam search of transformers and sacrebleu with its defaults, so that the scores can be
compared with those of others.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from benchmarks.tables import into_readme


@torch.no_grad()
def translations(
    model: Any, tokenizer: Any, texts: list[str], beams: int, batch_size: int
) -> list[str]:
    """Return the best translation of each text; batches have texts of similar length."""
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    found = [""] * len(texts)
    for begin in range(0, len(texts), batch_size):
        rows = order[begin : begin + batch_size]
        inputs = tokenizer([texts[i] for i in rows], return_tensors="pt", padding=True)
        longest = min(200, 10 + 3 * inputs["input_ids"].shape[1] // 2)
        out = model.generate(**inputs.to(model.device), num_beams=beams, max_new_tokens=longest)
        for i, text in zip(
            rows, tokenizer.batch_decode(out, skip_special_tokens=True), strict=True
        ):
            found[i] = text
    return found


def main() -> None:
    """Translate the test sets, and print their scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "files", type=Path, nargs="+", help="test sets: source and reference files in turn"
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--beams", type=int, default=5, help="beam size")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--json", type=Path, help="also write the scores to this file")
    parser.add_argument("--card", type=Path, help="also fill in the table of this model card")
    parser.add_argument(
        "--translations", type=Path, help="also write the translations to this folder"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    if len(given.files) % 2:
        parser.error(
            f"there are {len(given.files)} files; give a reference file for every source file"
        )
    dtype = torch.float16 if given.device.startswith("cuda") else torch.float32
    model = AutoModelForSeq2SeqLM.from_pretrained(given.model, dtype=dtype).to(given.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    results = []
    for source, reference in zip(given.files[::2], given.files[1::2], strict=True):
        texts = source.read_text(encoding="utf-8").splitlines()
        references = reference.read_text(encoding="utf-8").splitlines()
        found = translations(model, tokenizer, texts, given.beams, given.batch_size)
        row: dict[str, Any] = {"set": source.stem, "sentences": len(texts), "beams": given.beams}
        for metric in (BLEU(), CHRF()):
            score = metric.corpus_score(found, [references])
            row[score.name] = score.score
            row[f"{score.name} signature"] = str(metric.get_signature())
        print(json.dumps(row), flush=True)
        results.append(row)
        if given.translations:
            given.translations.mkdir(parents=True, exist_ok=True)
            text = "\n".join(found) + "\n"
            (given.translations / f"{source.stem}.txt").write_text(text, encoding="utf-8")
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")
    if given.card:
        card = given.card.read_text(encoding="utf-8")
        given.card.write_text(into_readme(card, {"scores": shown(results)}), encoding="utf-8")


def shown(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the table of the model card: scores with two digits, without signatures."""
    return [
        {
            name: f"{value:.2f}" if isinstance(value, float) else value
            for name, value in row.items()
            if not name.endswith("signature")
        }
        for row in results
    ]


if __name__ == "__main__":
    main()
