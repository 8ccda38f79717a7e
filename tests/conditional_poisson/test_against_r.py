"""The design, compared with R's package ``sampling``, which shares nothing with our code."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cpsbs import ConditionalPoisson

pytestmark = pytest.mark.slow

SCRIPT = """
suppressPackageStartupMessages(library(sampling))
options(digits = 17)
pik <- scan("{folder}/pik", quiet = TRUE)
n <- round(sum(pik))
w <- pik / (1 - pik)
q <- UPMEqfromw(w, n)
inclusion <- UPMEpikfromq(q)
write(inclusion, "{folder}/inclusion", ncolumns = 1)
write(t(UPMEpik2frompikw(inclusion, w)), "{folder}/joint_of_odds", ncolumns = 1)
write(UPMEpiktildefrompik(pik), "{folder}/tilde", ncolumns = 1)
write(t(UPmaxentropypi2(pik)), "{folder}/joint", ncolumns = 1)
"""


def run_r(pik: Tensor, folder: Path) -> dict[str, Tensor]:
    """Return R's inclusion probabilities for the odds of pik, and weights that make pik exact.

    Both come with their joint inclusion probabilities.
    """
    if shutil.which("Rscript") is None:
        pytest.skip("R is not installed (Debian: r-cran-sampling)")
    has = subprocess.run(
        ["Rscript", "-e", "quit(status = !requireNamespace('sampling', quietly = TRUE))"],
        capture_output=True,
    )
    if has.returncode:
        pytest.skip("R has no package 'sampling' (Debian: r-cran-sampling)")
    (folder / "pik").write_text("\n".join(f"{x:.17g}" for x in pik.tolist()))
    subprocess.run(["Rscript", "-e", SCRIPT.format(folder=folder)], check=True, cwd=folder)
    return {
        name: torch.tensor(
            [float(x) for x in (folder / name).read_text().split()], dtype=torch.float64
        )
        for name in ("inclusion", "joint_of_odds", "tilde", "joint")
    }


def targets(n: int, k: int, seed: int) -> Tensor:
    """Return inclusion probabilities between 0 and 1 that sum to k."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return ConditionalPoisson(x, k).log_inclusion.exp()


@pytest.mark.parametrize(("n", "k"), [(5, 2), (12, 5), (40, 8), (100, 30)])
def test_inclusion_from_weights(n: int, k: int, tmp_path: Path) -> None:
    """UPMEqfromw, UPMEpikfromq and UPMEpik2frompikw: the design with the odds of pik as weights.

    R's joint probabilities are differences of nearly equal numbers.
    """
    pik = targets(n, k, seed=n)
    r = run_r(pik, tmp_path)
    design = ConditionalPoisson.from_log_probs(pik.log(), k)
    torch.testing.assert_close(r["inclusion"], design.log_inclusion.exp(), rtol=1e-14, atol=0)
    joint = design.joint_log_inclusion(torch.arange(n)).exp()
    torch.testing.assert_close(r["joint_of_odds"].view(n, n), joint, rtol=1e-9, atol=0)


@pytest.mark.parametrize(("n", "k"), [(5, 2), (12, 5), (40, 8), (100, 30)])
def test_fit_and_joint_inclusion(n: int, k: int, tmp_path: Path) -> None:
    """UPMEpiktildefrompik and UPmaxentropypi2: the fitted design and its joint probabilities.

    R stops its own iteration at a total change of 1e-6, so that is what can be compared.
    """
    pik = targets(n, k, seed=n)
    r = run_r(pik, tmp_path)
    design = ConditionalPoisson.fit(pik, k)
    ours = torch.sigmoid(design.log_weights)
    difference = torch.logit(r["tilde"]) - torch.logit(ours)
    assert float((difference - difference.mean()).abs().max()) < 1e-6
    joint = design.joint_log_inclusion(torch.arange(n)).exp()
    torch.testing.assert_close(r["joint"].view(n, n), joint, rtol=2e-5, atol=0)
