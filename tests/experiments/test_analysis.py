"""Numbers and verdicts from rows whose answers are known."""

from __future__ import annotations

import math

import pytest

from cpsbs.experiments.analysis import Estimates, inclusion_error, runtimes, trade_offs
from cpsbs.experiments.claims import claims
from cpsbs.experiments.plan import ESTIMATORS, QUICK
from cpsbs.experiments.store import Row

SCALE = QUICK


def rows(cpsbs_off: float) -> list[Row]:
    """The truth is 0.5; every design is off by ±0.1, CPSBS by another number."""
    made: list[Row] = []
    for line in SCALE.lines:
        for temperature in SCALE.temperatures:
            key = {"line": line, "temperature": temperature, "nucleus": None}
            base = key | {"k": SCALE.baseline_size, "design": "independent", "normalized": False}
            for f in ("BLEU", "entropy", "entropy RB"):
                made += [base | {"f": f, "value": v} for v in (0.4, 0.6)]
                for k in SCALE.sizes:
                    for design in ESTIMATORS:
                        off = cpsbs_off if design == "conditional-poisson" else 0.1
                        for normalized in (False, True):
                            cell = key | {"k": k, "design": design, "normalized": normalized}
                            values = (0.5 - off, 0.5 + off)
                            made += [cell | {"f": f, "value": v} for v in values]
    return made


def test_errors_and_deviations() -> None:
    found = Estimates(rows(0.3), SCALE, "BLEU", normalized=True)
    assert found.truth[1500, 0.1].value == pytest.approx(0.5)
    assert found.truth[1500, 0.1].variance == pytest.approx(0.02)
    assert found.spread[1500, 0.1, 2, "stratified", None].deviation == pytest.approx(0.02**0.5)
    errors = found.rmse()
    assert errors[0.1, 2, "conditional-poisson"] == pytest.approx(0.3)
    assert errors[0.5, 5, "gumbel-top-k"] == pytest.approx(0.1)


@pytest.mark.parametrize(("off", "verdict", "ratio"), [(0.01, "yes", "0.10"), (0.3, "no", "3.00")])
def test_verdicts_follow_the_numbers(off: float, verdict: str, ratio: str) -> None:
    varies, *_ = claims(["bleu"], rows(off), SCALE)
    assert varies.verdict == verdict
    assert f"in {12 if verdict == 'yes' else 0} of 12 cells" in varies.measured
    small, warm, _ = claims(["rmse"], rows(off), SCALE)[:3]
    assert small.verdict == verdict
    assert f"τ ≤ 0.2: {ratio} in the median" in small.measured
    assert warm.verdict == ("no" if verdict == "yes" else "yes")
    assert ("do not come up" in warm.measured) == (verdict == "no")


def test_trade_offs_times_and_inclusion() -> None:
    one = {"k": 5, "design": "diverse", "temperature": 1.0, "strength": 0.3}
    scores = {"diversity": 1.0, "min": 0.1, "mean": 0.2, "max": 0.3}
    found = trade_offs([one | scores, one | scores | {"mean": 0.4, "diversity": 2.0}])
    assert found[5, "diverse", 0.3].mean == pytest.approx(0.3)
    assert found[5, "diverse", 0.3].diversity == 1.5
    timed = {"device": "d", "design": "top-k", "k": 2}
    lines = [(1, 1.0), (1, 3.0), (1, 9.0), (2, 5.0)]
    assert runtimes([timed | {"line": n, "seconds": s} for n, s in lines]) == {
        ("d", "top-k", 2): 4.0
    }
    off = [{"temperature": 1.0, "runs": 1, "value": v, "truth": 1.0} for v in (math.e, 1 / math.e)]
    assert inclusion_error(off) == {(1.0, 1): pytest.approx(1.0)}
