/* The random numbers of a torch.Generator for CPUs: see random.c. */

#pragma once

#include <stdint.h>

/* The bytes of Generator.get_state(), as torch lays them out: a Mersenne Twister (MT19937). */
typedef struct {
    uint64_t seed;
    int32_t left, seeded; /* left: how many numbers are left, + 1 */
    uint64_t next, state[624];
    double normal[3];
    int32_t normal_is_valid;
} generator;

void draw_uniform(generator *g, int64_t count, double *out);
