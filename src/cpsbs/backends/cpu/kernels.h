/* Attention to slots: see kernels.c. */

#pragma once

#include "vectors.h"

void put(const float *rows, int64_t stride, float *memory, int64_t capacity, const int32_t *source,
         const int32_t *slot, int64_t count, int64_t heads, int64_t dim);
void attend(const float *query, int64_t query_stride, const float *keys, const float *values,
            int64_t capacity, const int32_t *table, int64_t table_stride, const int32_t *table_row,
            const int32_t *length, const int32_t *source, int64_t rows, int64_t heads,
            int64_t group, int64_t dim, float scale, const float *bias, int64_t reach,
            const int32_t *position, float *weight, float *out);
