/* Conditional Poisson samples: see poisson.c. */

#pragma once

#include "random.h"
#include "scores.h"

/* The constants of a design: see cpsbs.backends.cpu.poisson. */
typedef struct {
    int64_t k, size, half, cells;    /* K, the items of the head, points of the circle, grid */
    int64_t odds;                    /* whether weights are odds rather than probabilities */
    int64_t tries, most_tries;       /* how many attempts are made at first, and later at most */
    double low, high, limit, spread; /* bounds of the tilt, log odds and spread of the tail */
    double enough;                   /* what may be cut off the series of the tail */
    const double *cosine, *sine, *lift, *rotation, *inverse; /* Circle; complex: in turns */
    const double *wave, *turn;       /* [terms, half] cos j theta - 1 and sin j theta */
} design;

/* What is known of each source: its head, and the law of the number of heads. */
typedef struct {
    int64_t *item;      /* [sources, size] the head, ascending */
    double *coin;       /* [sources, size] the probabilities of its coins */
    double *acceptance; /* [sources, k + 2] */
    double *share;      /* [sources, parents * chunks] source + share of the tail up to a chunk */
    double *turned;     /* [sources, half, 2] the terms of P(S = K) */
    double *number;     /* [sources, 4] reference, unit, tilt, log P(S = K) */
} law;

int64_t draw_poisson(const scores *s, const design *d, generator *const *random, int64_t *picked,
                     double *inclusion);
