/* What a search's scores look like to compiled functions: see cpsbs.scores.reading.Chunks. */

#pragma once

#include "memory.h"
#include "vectors.h"

#define MOST_TERMS 4 /* power sums */

typedef struct {
    const float *rows;    /* [n, tokens] the scores as the model gives them */
    const int64_t *row;   /* [sources, parents] the row of each parent, n for none; null: in order */
    const float *maxima;  /* [sources, parents, chunks] */
    const float *sums;    /* [terms, sources, parents, chunks] */
    const double *offset; /* [sources, parents] */
    int64_t n, sources, parents, tokens, chunks, length, terms;
    double temperature;
} scores;

/* The largest candidates of a source, in ascending order of their numbers, and the chunks that were
   scanned for them. */
typedef struct {
    int64_t most;   /* how many candidates are wanted */
    int64_t stride; /* the room for the members of a chunk */
    int64_t found;  /* how many chunks were scanned */
    double lowest;  /* what the members are relative to */
    int32_t *chunk; /* [most] the chunks, ascending */
    float *member;  /* [most, stride] log-probabilities relative to lowest; -inf fills up */
    int32_t *place; /* [most] where each candidate is among the members */
    int64_t *item;  /* [most] the candidates */
    double *value;  /* [most] their log-probabilities */
    /* Scratch memory. */
    double *level;
    uint32_t *key;
    int32_t *some;
} head;

void read_scores(const float *rows, int64_t count, int64_t tokens, int64_t length, int64_t terms,
                 float over, float *maxima, float *sums);
int64_t normalize(const scores *s, const double *log_prob, double *total, double *offset);
int64_t find_largest(const scores *s, int64_t most, double *value, int64_t *item);
head head_for(const scores *s, int64_t most, memory *m);
int find_head(const scores *s, int64_t source, head *h);
void sum_outside(const scores *s, int64_t source, head *h, double unit, float odds, double *sums,
                 float *mass);
double score_of(const scores *s, int64_t source, int64_t item);
const float *row_of(const scores *s, int64_t source, int64_t parent);
