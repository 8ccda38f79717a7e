/* The hypotheses that were selected: see extending.c. */

#pragma once

#include "scores.h"

typedef struct {
    /* The hypotheses [sources, parents] that are extended. */
    const uint8_t *finished;
    const int64_t *length;
    const double *log_inclusion; /* null if it is not known */
    /* What was selected [sources, k]. */
    const int64_t *index;
    const uint8_t *present;
    const double *own_inclusion;
    const double *total; /* [sources, parents] */
    const int64_t *ends; /* [number] tokens that end a hypothesis */
    int64_t k, number, pad;
    /* The results [sources, k], and whether some total is not finite or some inclusion is no number. */
    int64_t *token, *longer, *parent;
    double *log_prob, *inclusion;
    uint8_t *ended, *is_present, *broken;
} extension;

void extend(const scores *s, const extension *e);
