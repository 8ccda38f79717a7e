/* The layers of a decoder or an encoder, and what rows attend to: see layers.c. */

#pragma once

#include "products.h"

typedef struct {
    const float *weight, *bias; /* [d]; the bias may be null */
    double eps;
    int64_t centred; /* whether the mean is subtracted; an RMS norm does not */
} norm;

/* A layer; without cross-attention, query is null. */
typedef struct {
    norm own, cross, feed;
    const product *query_key_value, *out, *query, *cross_out, *up, *down;
    int64_t gate; /* the activation of the first half of what up makes, by which the second half is
                     multiplied; -1 for none */
} layer;

/* What each row attends to: see cpsbs.models.transformers.direct.slots.Table. */
typedef struct {
    const int32_t *slot;
    int64_t stride;
    const int32_t *entry, *length, *source;
    int64_t capacity;
    float *const *memory; /* the keys and values of all layers, in turns */
} table;

/* Where rows are in their sequences, and what depends on it. */
typedef struct {
    const int32_t *position;      /* [rows] */
    const float *cosines, *sines; /* [positions, dim] of the rotation of queries and keys; or null */
    const float *bias;            /* [heads, 2 reach + 1] what is added to the scores of keys from reach
                                     before the query to reach behind it, and of all beyond; or null */
    int64_t reach;
} places;

typedef struct {
    int64_t layers, norm_first, size, keys, group, dim; /* size: of a row */
    double scale;
    const layer *layer;
} stack;

void normalize_rows(const norm *n, const float *x, int64_t count, int64_t size, float *out);
void run_layers(const stack *s, float *x, int64_t count, const table *own, const int32_t *fresh,
                const table *given, const places *at, int64_t wide, int64_t longest, float *scratch);
