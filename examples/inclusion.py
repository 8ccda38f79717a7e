"""Draw from a conditional Poisson design, and compare observed with exact inclusion probabilities.

    python examples/inclusion.py

This is the sampling design alone; ``cpsbs sample`` uses it at every step of a search.
"""

from __future__ import annotations

import torch

from cpsbs import ConditionalPoisson

K, DRAWS, SEED = 3, 50_000, 0
WORDS = ["bicycle", "bike", "cycle", "velocipede", "motorbike", "scooter", "horse", "unicycle"]
PROBABILITIES = [0.62, 0.21, 0.08, 0.04, 0.02, 0.015, 0.01, 0.005]


def main() -> None:
    """Print a table of exact and observed inclusion probabilities."""
    log_p = torch.tensor(PROBABILITIES, dtype=torch.float64).log()
    design = ConditionalPoisson.from_log_probs(log_p, K)
    samples = design.sample((DRAWS,), torch.Generator().manual_seed(SEED))
    exact = design.log_inclusion.exp()
    observed = torch.bincount(samples.flatten(), minlength=len(WORDS)) / DRAWS
    error = (exact * (1 - exact) / DRAWS).sqrt()

    print(f"{K} of {len(WORDS)} words, without replacement, weights p/(1 - p); {DRAWS:,} samples\n")
    print(f"{'word':<11} {'p':>6} {'exact π':>9} {'observed':>9}  {'off by':>9}")
    for i, word in enumerate(WORDS):
        z = float((observed[i] - exact[i]) / error[i])
        bar = "█" * round(30 * float(exact[i]))
        print(
            f"{word:<11} {PROBABILITIES[i]:>6.3f} {exact[i]:>9.4f} {observed[i]:>9.4f} "
            f"{z:>+6.1f} s.e.  {bar}"
        )
    print(f"\nSum of π: {exact.sum():.12f}.  Entropy of the design: {design.entropy():.4f} nats.")
    words = ", ".join(WORDS[i] for i in samples[0].tolist())
    print(f"The first sample: {words}, with probability {design.log_prob(samples[0]).exp():.4f}.")

    log_weights = 3 * torch.randn(10**6, generator=torch.Generator().manual_seed(SEED))
    large = ConditionalPoisson(log_weights, 20)
    sample = large.sample(generator=torch.Generator().manual_seed(SEED))
    total = large.log_inclusion.exp().sum()
    print(f"\n20 of 1,000,000 items: {sample[:6].tolist()}…, sum of all π {total:.12f}.")


if __name__ == "__main__":
    main()
