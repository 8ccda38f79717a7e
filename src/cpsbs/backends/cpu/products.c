/* Products of rows with packed weights, in float32 and in int8, with what follows a product: bias,
   activation, residual. cpsbs.backends.cpu.products packs the weights in panels of 64 outputs. */

#include "products.h"
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#include <immintrin.h>
#define HAS_VNNI 1
#endif

#define PARTS (PANEL / LANES)
#define ROWS 6

/* x times the share of a normal distribution below x, to 2e-7 of it: a rational substitution in an
   exponent, as in Numerical Recipes. */
static inline vec gelu(vec x) {
    static const float c[] = {0.17087277f, -0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f,
                              -0.18628806f, 0.09678418f, 0.37409196f, 1.00002368f, -1.26551223f};
    ivec negative = x < 0.0f;
    vec z = larger(x, -x) * 0.70710678f, t = 1.0f / (1.0f + 0.5f * z), exponent = filled(c[0]);
    for (int i = 1; i < 10; i++) exponent = exponent * t + c[i];
    vec beyond = 0.5f * t * exponential(exponent - z * z), within = 1.0f - beyond;
    return x * (vec)(((ivec)beyond & negative) | ((ivec)within & ~negative));
}

/* The activation of x; the numbers are those of cpsbs.backends.cpu.products. */
static inline vec activated(vec x, int64_t activation) {
    if (activation == 1) return larger(filled(0), x); /* which is NaN where x is */
    if (activation == 0) return x;
    if (activation == 4) return gelu(x);
    /* What follows is x times a sigmoid: of x, or for gelu of another function. */
    vec y = x;
    if (activation == 3) y = 1.5957691216f * (x + 0.044715f * x * x * x);
    ivec negative = y < 0.0f;
    vec e = exponential((vec)(((ivec)y & negative) | ((ivec)-y & ~negative)));
    vec top = (vec)(((ivec)e & negative) | ((ivec)filled(1) & ~negative));
    return x * (top / (1.0f + e));
}

/* Write a panel of a row: what was summed, + bias, activated, + residual. */
static inline void finish(const product *p, const vec *sum, int64_t panel, const float *residual, float *out) {
    int64_t first = panel * PANEL;
    for (int part = 0; part < PARTS && first + part * LANES < p->outputs; part++) {
        int64_t at = first + part * LANES, left = p->outputs - at;
        vec x = sum[part];
        if (p->bias) x = x + some(p->bias + at, left, 0);
        if (p->activation) x = activated(x, p->activation);
        if (residual) x = x + some(residual + at, left, 0);
        if (left >= LANES) *(vec *)(out + at) = x;
        else
            for (int64_t i = 0; i < left; i++) out[at + i] = x[i];
    }
}

static inline __attribute__((always_inline)) void multiply_rows(
    const product *p, const float *x, int64_t panel, const float *residual, float *out, const int rows) {
    const vec *weight = (const vec *)p->weight + panel * p->inputs * PARTS;
    vec sum[ROWS][PARTS];
UNROLLED
    for (int r = 0; r < rows; r++)
UNROLLED
        for (int part = 0; part < PARTS; part++) sum[r][part] = filled(0);
    for (int64_t i = 0; i < p->inputs; i++, weight += PARTS)
UNROLLED
        for (int r = 0; r < rows; r++)
UNROLLED
            for (int part = 0; part < PARTS; part++) sum[r][part] += x[r * p->inputs + i] * weight[part];
UNROLLED
    for (int r = 0; r < rows; r++)
        finish(p, sum[r], panel, residual ? residual + r * p->outputs : 0, out + r * p->outputs);
}

#ifdef HAS_VNNI
static inline __attribute__((always_inline)) void multiply_bytes(
    const product *p, const uint8_t *x, const float *scale, int64_t panel, const float *residual, float *out,
    const int rows) {
    const __m512i *weight = (const __m512i *)p->weight + panel * (p->inputs / 4) * PARTS;
    const int32_t *less = p->correction + panel * PANEL;
    __m512i sum[ROWS][PARTS];
UNROLLED
    for (int r = 0; r < rows; r++)
UNROLLED
        for (int part = 0; part < PARTS; part++) sum[r][part] = _mm512_loadu_si512(less + part * LANES);
    for (int64_t i = 0; i < p->inputs; i += 4, weight += PARTS) {
        __m512i w[PARTS];
UNROLLED
        for (int part = 0; part < PARTS; part++) w[part] = _mm512_loadu_si512(weight + part);
UNROLLED
        for (int r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, x + r * p->inputs + i, sizeof four);
            __m512i same = _mm512_set1_epi32(four);
UNROLLED
            for (int part = 0; part < PARTS; part++)
                /* With the intrinsic, GCC 12 copies and spills the sums. */
                __asm__("vpdpbusd %2, %1, %0" : "+v"(sum[r][part]) : "v"(same), "v"(w[part]));
        }
    }
UNROLLED
    for (int r = 0; r < rows; r++) {
        vec total[PARTS];
UNROLLED
        for (int part = 0; part < PARTS; part++) {
            int64_t at = panel * PANEL + part * LANES;
            vec number = (vec)_mm512_cvtepi32_ps(sum[r][part]);
            total[part] = number * *(const vec *)(p->scale + at) * scale[r];
        }
        finish(p, total, panel, residual ? residual + r * p->outputs : 0, out + r * p->outputs);
    }
}
#endif

/* out [count, size] = the activation of the first half of each of the rows [count, 2 size], times its
   second half. The output may begin where the rows begin. */
void gate_rows(const float *rows, int64_t count, int64_t size, int64_t activation, float *out) {
    for (int64_t r = 0; r < count; r++, rows += 2 * size, out += size)
        for (int64_t i = 0; i < size; i += LANES) {
            int64_t left = size - i;
            vec x = activated(some(rows + i, left, 0), activation) * some(rows + size + i, left, 0);
            if (left >= LANES) *(vec *)(out + i) = x;
            else
                for (int64_t j = 0; j < left; j++) out[i + j] = x[j];
        }
}

/* Whether products are fast on this processor: they need the registers of AVX-512. */
int64_t multiplies_floats(void) {
#ifdef __AVX512F__
    return 1;
#else
    return 0;
#endif
}

int64_t multiplies_bytes(void) {
#ifdef HAS_VNNI
    return 1;
#else
    return 0;
#endif
}

#define EACH(F, ...)                          \
    switch (here) {                           \
    case 1: F(__VA_ARGS__, 1); break;         \
    case 2: F(__VA_ARGS__, 2); break;         \
    case 3: F(__VA_ARGS__, 3); break;         \
    case 4: F(__VA_ARGS__, 4); break;         \
    case 5: F(__VA_ARGS__, 5); break;         \
    default: F(__VA_ARGS__, 6); break;        \
    }

/* out = act(x W^T + b) + residual for rows x [count, in]; scratch has room for count * (in + 4)
   bytes. */
void multiply(const product *p, const float *x, int64_t count, const float *residual, float *out,
              void *scratch) {
    int64_t panels = (p->outputs + PANEL - 1) / PANEL;
    float *scale = scratch;
    uint8_t *bytes = (uint8_t *)(scale + count);
    if (p->scale) round_rows(x, count, p->inputs, bytes, scale);
    /* A block of rows stays in the cache for all panels, and a panel for all rows of the block. */
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t r = 0; r < count; r += ROWS) {
            int64_t here = count - r < ROWS ? count - r : ROWS;
            const float *more = residual ? residual + r * p->outputs : 0;
            float *into = out + r * p->outputs;
#ifdef HAS_VNNI
            if (p->scale) {
                EACH(multiply_bytes, p, bytes + r * p->inputs, scale + r, panel, more, into)
                continue;
            }
#endif
            EACH(multiply_rows, p, x + r * p->inputs, panel, more, into)
        }
}
