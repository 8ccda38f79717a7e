/* A product with packed weights: see products.c. */

#pragma once

#include "vectors.h"

#define PANEL 64

typedef struct {
    const void *weight;        /* [panels, inputs, 64] float, or [panels, inputs / 4, 64, 4] int8 */
    const float *scale;        /* [panels * 64] of the weights; null for float */
    const int32_t *correction; /* [panels * 64] -128 * the sum of the weights of an output */
    const float *bias;         /* [outputs] or null */
    int64_t inputs, outputs, activation;
} product;

void multiply(const product *p, const float *x, int64_t count, const float *residual, float *out,
              void *scratch);
void gate_rows(const float *rows, int64_t count, int64_t size, int64_t activation, float *out);
void round_rows(const float *rows, int64_t count, int64_t dim, uint8_t *rounded, float *scale);
