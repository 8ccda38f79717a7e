/* Stratified samples: see stratified.c. */

#pragma once

#include "scores.h"

typedef struct {
    int64_t k;
    double full_share;
    const double *log_prob, *inclusion; /* [sources, parents] log p and the sum of log pi so far */
    /* What is found of each source. Weights are relative to e^reference. */
    double *offset;  /* [sources, parents] what is added to a score to get the log of a weight */
    int64_t *item;   /* [sources, k] the largest candidates, in descending order */
    double *weight;  /* [sources, k] their weights */
    float *mass;     /* [sources, parents * chunks] the weights of all others, by chunks */
    double *number;  /* [sources, 3] reference, c, number of heavy candidates */
} stratified;

/* What was drawn [sources, k]: candidates in ascending order, log pi, and the design's state. */
typedef struct {
    int64_t *index;
    double *log_inclusion, *start, *inside, *share;
} drawn;

int64_t stratified_targets(const scores *given, const stratified *d);
int64_t draw_stratified(const scores *given, const stratified *d, const double *uniform, const drawn *out);
