/* Vectors of 16 numbers, and functions of them; compiled.py says how files here are compiled. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint8_t bytes __attribute__((vector_size(16), aligned(1), may_alias));

#define LANES 16
#define NOTHING -1e30f

typedef float half_vec __attribute__((vector_size(32), aligned(4), may_alias));
typedef float quarter_vec __attribute__((vector_size(16), aligned(4), may_alias));

static inline float sum_of(vec x) {
    half_vec low, high;
    memcpy(&low, &x, sizeof low), memcpy(&high, (char *)&x + sizeof low, sizeof high);
    low += high;
    quarter_vec first, second;
    memcpy(&first, &low, sizeof first), memcpy(&second, (char *)&low + sizeof first, sizeof second);
    first += second;
    return (first[0] + first[2]) + (first[1] + first[3]);
}

/* Vectors stay in registers only if loops over them are unrolled early. */
#define UNROLLED _Pragma("GCC unroll 16")

#ifdef __clang__
#define SHUFFLED(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLED(x, y, ...) __builtin_shuffle(x, y, (ivec){__VA_ARGS__})
#endif

/* The sums of LANES vectors, which are overwritten: in each round two vectors become one, in which
   each of them has half as many numbers left. */
static inline __attribute__((always_inline)) vec sums_of_each(vec *x) {
UNROLLED
    for (int i = 0; i < 8; i++)
        x[i] = SHUFFLED(x[i], x[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               SHUFFLED(x[i], x[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
UNROLLED
    for (int i = 0; i < 4; i++)
        x[i] = SHUFFLED(x[i], x[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               SHUFFLED(x[i], x[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
UNROLLED
    for (int i = 0; i < 2; i++)
        x[i] = SHUFFLED(x[i], x[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               SHUFFLED(x[i], x[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return SHUFFLED(x[0], x[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           SHUFFLED(x[0], x[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

static inline vec filled(float x) {
    vec all;
    for (int i = 0; i < LANES; i++) all[i] = x;
    return all;
}

/* e^x for x <= 0, to a unit in the last place or two; 0 below -87, and NaN for NaN. */
static inline vec exponential(vec x) {
    ivec counts = ~(x < -87.0f); /* all bits of a lane are set, or none */
    x = (vec)((ivec)x & counts);
    ivec power = __builtin_convertvector(x * 1.44269504f - 0.5f, ivec);
    vec n = __builtin_convertvector(power, vec);
    vec f = x - n * 0.693359375f;
    f = f - n * -2.12194440e-4f;
    vec p = filled(1.9875691500e-4f);
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    p = p * (vec)((power + 127) << 23);
    return (vec)((ivec)p & counts);
}

static inline vec larger(vec x, vec y) {
    ivec first = x > y;
    return (vec)(((ivec)x & first) | ((ivec)y & ~first));
}

static inline float largest_of(vec x) {
    float largest = x[0];
    for (int i = 1; i < LANES; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

/* The next LANES numbers, or those that are left, followed by others. */
static inline vec some(const float *x, int64_t left, float other) {
    if (left >= LANES) return *(const vec *)x;
    vec found = filled(other);
    for (int64_t i = 0; i < left; i++) found[i] = x[i];
    return found;
}

/* Eight doubles at a time. */
typedef double dvec __attribute__((vector_size(64), aligned(8), may_alias));
typedef int64_t lvec __attribute__((vector_size(64), aligned(8), may_alias));

#define DOUBLES 8
#define MOST_EXPONENT 700.0

/* e^x to a unit in the last place or two, as in Cephes; 0 below -700, e^700 above 700, and NaN for
   NaN. */
static inline dvec exponential_of_doubles(dvec x) {
    const dvec most = {MOST_EXPONENT, MOST_EXPONENT, MOST_EXPONENT, MOST_EXPONENT,
                       MOST_EXPONENT, MOST_EXPONENT, MOST_EXPONENT, MOST_EXPONENT};
    lvec counts = ~(x < -MOST_EXPONENT), large = x > MOST_EXPONENT;
    x = (dvec)(((lvec)x & counts & ~large) | ((lvec)most & large));
    lvec power = __builtin_convertvector(x * 1.4426950408889634074 + 1024.5, lvec) - 1024;
    dvec n = __builtin_convertvector(power, dvec);
    dvec f = x - n * 6.93145751953125e-1;
    f = f - n * 1.42860682030941723212e-6;
    dvec square = f * f;
    dvec p = (1.26177193074810590878e-4 * square + 3.02994407707441961300e-2) * square + 1.0;
    dvec q = 3.00198505138664455042e-6 * square + 2.52448340349684104192e-3;
    q = (q * square + 2.27265548208155028766e-1) * square + 2.0;
    p *= f;
    dvec e = 1.0 + 2.0 * p / (q - p);
    e = e * (dvec)((power + 1023) << 52);
    return (dvec)((lvec)e & counts);
}

/* e^x for count numbers. */
static inline void exponentials(const double *x, int64_t count, double *out) {
    int64_t i = 0;
    for (; i + DOUBLES <= count; i += DOUBLES)
        *(dvec *)(out + i) = exponential_of_doubles(*(const dvec *)(x + i));
    if (i == count) return;
    dvec rest = {0};
    for (int64_t j = i; j < count; j++) rest[j - i] = x[j];
    rest = exponential_of_doubles(rest);
    for (int64_t j = i; j < count; j++) out[j] = rest[j - i];
}
