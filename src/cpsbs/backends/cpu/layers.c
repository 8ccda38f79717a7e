/* All layers of a step: what cpsbs.models.transformers.direct does block by block, in one call. */

#include <math.h>

#include "kernels.h"
#include "layers.h"

/* out = the rows x [count, size] less their means, over their standard deviations; or, if they are not
   centred, over their root mean squares. */
void normalize_rows(const norm *n, const float *x, int64_t count, int64_t size, float *out) {
    for (int64_t r = 0; r < count; r++, x += size, out += size) {
        vec sum = filled(0), square = filled(0);
        int64_t whole = size / LANES * LANES;
        for (int64_t i = 0; i < whole; i += LANES) sum += *(const vec *)(x + i);
        float mean = sum_of(sum), variance;
        for (int64_t i = whole; i < size; i++) mean += x[i];
        mean = n->centred ? mean / (float)size : 0;
        for (int64_t i = 0; i < whole; i += LANES) {
            vec y = *(const vec *)(x + i) - mean;
            square += y * y;
        }
        variance = sum_of(square);
        for (int64_t i = whole; i < size; i++) variance += (x[i] - mean) * (x[i] - mean);
        float over = 1 / sqrtf(variance / (float)size + (float)n->eps);
        for (int64_t i = 0; i < size; i++)
            out[i] = (x[i] - mean) * over * n->weight[i] + (n->bias ? n->bias[i] : 0.0f);
    }
}

/* Scratch memory: room for rows of each kind. */
typedef struct {
    float *input, *wide, *attended, *sum, *weight;
    void *rounded;
} room;

static void attend_to(const stack *s, const table *t, int64_t number, const float *query, int64_t stride,
                      int64_t count, const places *at, const room *m) {
    attend(query, stride, t->memory[2 * number], t->memory[2 * number + 1], t->capacity, t->slot, t->stride,
           t->entry, t->length, t->source, count, s->keys, s->group, s->dim, (float)s->scale,
           at ? at->bias : 0, at ? at->reach : 0, at ? at->position : 0, m->weight, m->attended);
}

/* Rotate the queries and keys of rows by the angles of their positions. */
static void rotate(const stack *s, const places *at, float *rows, int64_t stride, int64_t count) {
    int64_t half = s->dim / 2, heads = s->keys * (s->group + 1);
    for (int64_t r = 0; r < count; r++) {
        const float *restrict cosine = at->cosines + at->position[r] * s->dim;
        const float *restrict sine = at->sines + at->position[r] * s->dim;
        for (float *x = rows + r * stride; x < rows + r * stride + heads * s->dim; x += s->dim)
            for (int64_t i = 0; i < half; i++) {
                float one = x[i], other = x[i + half];
                x[i] = one * cosine[i] - other * sine[i];
                x[i + half] = other * cosine[i + half] + one * sine[i + half];
            }
    }
}

/* x = x + block(x), normalised before or after: the last product of a block and what surrounds it. */
static void add_block(const stack *s, const norm *n, const product *last, const float *given, int64_t count,
                      float *x, const room *m) {
    float *into = s->norm_first ? x : m->sum;
    multiply(last, given, count, x, into, m->rounded);
    if (!s->norm_first) normalize_rows(n, m->sum, count, s->size, x);
}

static const float *input_of(const stack *s, const norm *n, const float *x, int64_t count, const room *m) {
    if (!s->norm_first) return x;
    normalize_rows(n, x, count, s->size, m->input);
    return m->input;
}

/* Run all layers on the rows x [count, size], in place. New keys and values go to the slots
   fresh [count] of own; given has the encoder's, or is null; at says where the rows are. The scratch memory has room for count
   rows of 2 size + wide + heads dim numbers, count (largest input + 4) bytes, and longest numbers. */
void run_layers(const stack *s, float *x, int64_t count, const table *own, const int32_t *fresh,
                const table *given, const places *at, int64_t wide, int64_t longest, float *scratch) {
    int64_t heads = s->keys * s->group * s->dim, shared = s->keys * s->dim, all = heads + 2 * shared;
    room m = {.input = scratch, .sum = scratch + count * s->size};
    m.wide = m.sum + count * s->size;
    m.attended = m.wide + count * wide;
    m.weight = m.attended + count * heads;
    m.rounded = m.weight + longest;
    for (int64_t number = 0; number < s->layers; number++) {
        const layer *l = s->layer + number;
        multiply(l->query_key_value, input_of(s, &l->own, x, count, &m), count, 0, m.wide, m.rounded);
        if (at->cosines) rotate(s, at, m.wide, all, count);
        for (int64_t i = 0; i < 2; i++)
            put(m.wide + heads + i * shared, all, own->memory[2 * number + i], own->capacity, own->source,
                fresh, count, s->keys, s->dim);
        attend_to(s, own, number, m.wide, all, count, at, &m);
        add_block(s, &l->own, l->out, m.attended, count, x, &m);
        if (l->query && given) {
            multiply(l->query, input_of(s, &l->cross, x, count, &m), count, 0, m.wide, m.rounded);
            attend_to(s, given, number, m.wide, heads, count, 0, &m);
            add_block(s, &l->cross, l->cross_out, m.attended, count, x, &m);
        }
        multiply(l->up, input_of(s, &l->feed, x, count, &m), count, 0, m.wide, m.rounded);
        if (l->gate >= 0) gate_rows(m.wide, count, l->down->inputs, l->gate, m.wide);
        add_block(s, &l->feed, l->down, m.wide, count, x, &m);
    }
}
