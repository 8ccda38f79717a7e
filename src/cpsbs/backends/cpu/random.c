/* Uniform random numbers from the state of a torch.Generator, the same ones that torch would draw. */

#include "random.h"

#define SIZE 624
#define SHIFT 397

static inline uint64_t twisted(uint64_t one, uint64_t next) {
    return (((one & 0x80000000u) | (next & 0x7fffffffu)) >> 1) ^ (next & 1 ? 0x9908b0dfu : 0u);
}

static void twist(generator *g) {
    uint64_t *x = g->state;
    for (int i = 0; i < SIZE; i++) x[i] = x[(i + SHIFT) % SIZE] ^ twisted(x[i], x[(i + 1) % SIZE]);
    g->left = SIZE;
    g->next = 0;
}

static inline uint32_t draw_bits(generator *g) {
    if (--g->left == 0) twist(g);
    uint32_t y = (uint32_t)g->state[g->next++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ y >> 18;
}

/* count float64 numbers in [0, 1), as Tensor.uniform_ draws them. */
void draw_uniform(generator *g, int64_t count, double *out) {
    for (int64_t i = 0; i < count; i++) {
        uint64_t high = draw_bits(g), both = high << 32 | draw_bits(g);
        out[i] = (double)(both & ((1ull << 53) - 1)) * 0x1p-53;
    }
}
