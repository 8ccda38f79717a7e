/* Loops of a decoding step that torch has no fast call for: attention of few rows to few keys, and
   the rounding of rows to eight bits. compiled.py compiles this file and says what the arguments
   are. All matrices are row-major, and a stride is the number of elements between rows. */

#include "kernels.h"

/* What is added to the scores of the keys first, first + 1, ... of a query at this position. */
static inline vec biases(const float *bias, int64_t reach, int64_t first, int64_t position) {
    float found[LANES];
    for (int64_t j = 0; j < LANES; j++) {
        int64_t distance = first + j - position;
        distance = distance < -reach ? -reach : distance > reach ? reach : distance;
        found[j] = bias[reach + distance];
    }
    return *(const vec *)found;
}

static inline __attribute__((always_inline)) void attend_row(
    const float *query, const float *keys, const float *values, const int32_t *slot, int64_t count,
    float scale, const float *bias, int64_t reach, int64_t position, float *weight, float *out,
    const int dim) {
    const int parts = dim / LANES;
    const vec *q = (const vec *)query;
    vec most = filled(NOTHING);
    for (int64_t i = 0; i < count; i += LANES) {
        vec product[LANES];
        int64_t here = count - i < LANES ? count - i : LANES;
UNROLLED
        for (int64_t j = 0; j < LANES; j++) {
            /* Places behind the last one take its key, and count nothing. */
            const vec *key = (const vec *)(keys + (int64_t)slot[i + (j < here ? j : here - 1)] * dim);
            product[j] = q[0] * key[0];
            for (int d = 1; d < parts; d++) product[j] += q[d] * key[d];
        }
        vec score = scale * sums_of_each(product);
        if (bias) score += biases(bias, reach, i, position);
        for (int64_t j = here; j < LANES; j++) score[j] = NOTHING;
        *(vec *)(weight + i) = score;
        most = larger(most, score);
    }
    float largest = largest_of(most);
    vec totals = filled(0);
    for (int64_t i = 0; i < count; i += LANES) {
        vec x = *(vec *)(weight + i) - largest;
        x = exponential(x);
        *(vec *)(weight + i) = x;
        totals += x;
    }
    float over = 1.0f / sum_of(totals);
    /* Two sums in turns, because each waits for its last addition. */
    vec sum[dim / LANES], other[dim / LANES];
    for (int d = 0; d < parts; d++) sum[d] = other[d] = filled(0);
    int64_t i = 0;
    for (; i + 1 < count; i += 2) {
        const vec *value = (const vec *)(values + (int64_t)slot[i] * dim);
        const vec *next = (const vec *)(values + (int64_t)slot[i + 1] * dim);
        for (int d = 0; d < parts; d++) sum[d] += weight[i] * value[d], other[d] += weight[i + 1] * next[d];
    }
    if (i < count) {
        const vec *value = (const vec *)(values + (int64_t)slot[i] * dim);
        for (int d = 0; d < parts; d++) sum[d] += weight[i] * value[d];
    }
    for (int d = 0; d < parts; d++) ((vec *)out)[d] = (sum[d] + other[d]) * over;
}

/* out[r, h] = attention of query[r, h] to the slots table[table_row[r], :length[r]] of source[r]. Unless
   it is null, bias [heads, 2 reach + 1] has what is added to scores: see places in layers.h. Rows are
   in the order of their sources, so that a source's keys are read once from memory. */
void attend(const float *query, int64_t query_stride, const float *keys, const float *values,
            int64_t capacity, const int32_t *table, int64_t table_stride, const int32_t *table_row,
            const int32_t *length, const int32_t *source, int64_t rows, int64_t heads,
            int64_t group, int64_t dim, float scale, const float *bias, int64_t reach,
            const int32_t *position, float *weight, float *out) {
    for (int64_t first = 0, end; first < rows; first = end) {
        for (end = first + 1; end < rows && source[end] == source[first];) end++;
        for (int64_t h = 0; h < heads; h++) {
            int64_t start = (source[first] * heads + h) * capacity * dim;
            for (int64_t r = first; r < end; r++) {
                const int32_t *slot = table + table_row[r] * table_stride;
                for (int64_t g = 0; g < group; g++) {
                    int64_t place = (h * group + g) * dim;
                    const float *q = query + r * query_stride + place;
                    float *o = out + r * heads * group * dim + place;
                    const float *k = keys + start, *v = values + start;
                    const float *b = bias ? bias + (h * group + g) * (2 * reach + 1) : 0;
                    int64_t n = length[r], at = bias ? position[r] : 0;
                    switch (dim) {
                    case 32: attend_row(q, k, v, slot, n, scale, b, reach, at, weight, o, 32); break;
                    case 64: attend_row(q, k, v, slot, n, scale, b, reach, at, weight, o, 64); break;
                    case 128: attend_row(q, k, v, slot, n, scale, b, reach, at, weight, o, 128); break;
                    default: attend_row(q, k, v, slot, n, scale, b, reach, at, weight, o, dim);
                    }
                }
            }
        }
    }
}

/* memory[source[r], h, slot[r]] = rows[r, h]. */
void put(const float *rows, int64_t stride, float *memory, int64_t capacity, const int32_t *source,
         const int32_t *slot, int64_t count, int64_t heads, int64_t dim) {
    for (int64_t r = 0; r < count; r++)
        for (int64_t h = 0; h < heads; h++)
            memcpy(memory + ((source[r] * heads + h) * capacity + slot[r]) * dim,
                   rows + r * stride + h * dim, dim * sizeof(float));
}

/* rounded = 128 + rows / scale in integers, with scale = the largest |x| of a row / 127. */
void round_rows(const float *rows, int64_t count, int64_t dim, uint8_t *rounded, float *scale) {
    for (int64_t r = 0; r < count; r++) {
        const float *x = rows + r * dim;
        uint8_t *y = rounded + r * dim;
        vec most = filled(1e-30f), strange = filled(0.0f);
        for (int64_t i = 0; i < dim; i += LANES) {
            vec part = some(x + i, dim - i, 0.0f);
            most = larger(most, larger(part, -part));
            strange += part - part; /* NaN if some number is NaN or infinite, or else 0 */
        }
        float odd = sum_of(strange);
        if (odd != odd) { /* integers cannot express it: the scale makes all of the row NaN */
            scale[r] = NAN;
            memset(y, 128, dim);
            continue;
        }
        float largest = largest_of(most);
        scale[r] = largest / 127.0f;
        float over = 127.0f / largest;
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES)
            *(bytes *)(y + i) = __builtin_convertvector(
                __builtin_convertvector(*(const vec *)(x + i) * over + 128.5f, ivec), bytes);
        for (; i < dim; i++) y[i] = (uint8_t)(int32_t)(x[i] * over + 128.5f);
    }
}

/* out = product * scale of its row + bias + residual; bias and residual may be null. */
void finish_rows(const float *product, const float *scale, const float *bias, const float *residual,
                 int64_t count, int64_t dim, float *out) {
    for (int64_t r = 0; r < count; r++) {
        const float *x = product + r * dim, *more = residual + r * dim;
        float *y = out + r * dim, s = scale[r];
        if (bias && residual)
            for (int64_t i = 0; i < dim; i++) y[i] = x[i] * s + bias[i] + more[i];
        else if (bias)
            for (int64_t i = 0; i < dim; i++) y[i] = x[i] * s + bias[i];
        else if (residual)
            for (int64_t i = 0; i < dim; i++) y[i] = x[i] * s + more[i];
        else
            for (int64_t i = 0; i < dim; i++) y[i] = x[i] * s;
    }
}

/* For each chunk of a row of scores: its maximum, and sums[j] = the sum of e^{(j + 1)(x - maximum)
   over} for j < terms. The sums are [terms, count, chunks]. */
void read_scores(const float *rows, int64_t count, int64_t tokens, int64_t length, int64_t terms,
                 float over, float *maxima, float *sums) {
    int64_t chunks = (tokens + length - 1) / length;
    for (int64_t c = 0; c < count * chunks; c++) {
        int64_t first = c % chunks * length;
        int64_t size = tokens - first < length ? tokens - first : length;
        const float *x = rows + c / chunks * tokens + first;
        vec most = filled(-INFINITY);
        for (int64_t i = 0; i < size; i += LANES)
            most = larger(most, some(x + i, size - i, -INFINITY));
        float largest = largest_of(most);
        maxima[c] = largest;
        vec sum[4] = {filled(0), filled(0), filled(0), filled(0)};
        if (largest > -INFINITY) {
            for (int64_t i = 0; i < size; i += LANES) {
                vec y = (some(x + i, size - i, -INFINITY) - largest) * over;
                vec weight = exponential(y), power = weight;
                sum[0] += weight;
                if (terms > 1) { /* squares of weights below e^-20 do not count beside 1 */
                    weight = (vec)((ivec)weight & ~(y < -20.0f));
                    power = weight;
                }
                for (int64_t j = 1; j < terms; j++) {
                    power = power * weight;
                    sum[j] += power;
                }
            }
        } else
            for (int64_t i = 0; i < size; i++) sum[0][0] += x[i] != x[i] ? x[i] : 0.0f;
        for (int64_t j = 0; j < terms; j++) sums[j * count * chunks + c] = sum_of(sum[j]);
    }
}
