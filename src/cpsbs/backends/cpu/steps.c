/* Several steps of a search in one call: what cpsbs.search.recursion.run does step by step, with a
   decoder whose layers are compiled, and a design that is. The call ends where something is to be
   done that is not compiled: a source has ended, the KV cache needs room, or a source is not an
   ordinary one for the design. */

#include <time.h>

#include "extending.h"
#include "layers.h"
#include "poisson.h"
#include "random.h"
#include "stratified.h"

/* What maps the latest tokens of rows to the scores of the next ones. */
typedef struct {
    const float *token, *position; /* embeddings [tokens, size] and [positions, size] or null */
    int64_t positions;
    double scale;            /* of the embeddings of tokens */
    const norm *first, *last; /* of the embeddings, and of the output of the layers; null for none */
    const stack *layers;
    const product *head;
    int64_t wide;      /* the largest output of a product in the layers */
    const float *bias; /* of distances: see places in layers.h */
    int64_t reach;
} decoder;

/* The KV cache: see cpsbs.models.transformers.direct.slots. */
typedef struct {
    int32_t *slot, *length, *source; /* [rows, stride], [rows], [rows] the slots of each row */
    int64_t stride, used, capacity;
    int64_t left; /* the number of steps until slots that no row needs are dropped */
    float *const *memory;
    /* What the encoder left: slots [sources, given_stride] and their numbers; or null. */
    const int32_t *given_slot, *given_number;
    int64_t given_stride, given_capacity;
    float *const *given_memory;
    const float *cosines, *sines; /* [stride, dim] of the rotation of each position; or null */
} cache;

enum { LARGEST, POISSON, STRATIFIED };

/* What a step consists of. */
enum { READING, SELECTION, EXTENSION, MODEL, PARTS_OF_A_STEP };

typedef struct {
    const decoder *model;
    cache *cache;
    /* The design, one of those above, with what it rests on. */
    int64_t rule;
    double full_share;
    const design *design;
    generator *const *random; /* [sources] */
    int64_t sources, k, tokens, length, terms, pad, most; /* most: how many steps may be passed */
    double temperature;
    const int64_t *ends; /* [number] tokens that end a hypothesis */
    int64_t number;
    /* The hypotheses [sources, k], at first those to extend. */
    int64_t *token, *longer, *parent;
    double *log_prob, *inclusion; /* inclusion: null for beam search */
    uint8_t *finished, *present;
    double *state; /* [3, sources, k] what stratified keeps of the last step */
    /* The rows, one for each open hypothesis. */
    const float *scores; /* [rows, tokens] */
    float *into;         /* [sources * k, tokens] for the scores of later steps */
    int64_t *row;        /* [sources, k] */
    /* The steps that were passed. */
    int64_t *parents, *words; /* [most, sources, k] */
    float *trace;             /* [most, sources, k, 3] or null */
    int64_t passed, count; /* their number, and that of the rows now */
    void *scratch;         /* for the layers: see run_layers */
    double seconds[PARTS_OF_A_STEP]; /* how long each part of the steps has taken */
} search;

/* Scratch memory of a call. */
typedef struct {
    float *maxima, *sums, *of_rows; /* [sources, k, chunks], with all terms; the same by rows */
    double *total, *offset, *value; /* [sources, k] */
    int64_t *index;                 /* [sources, k] what was selected */
    double *own;                    /* [sources, k] log pi of it */
    uint8_t *ones;                  /* [sources, k] */
    int64_t *token, *longer;        /* [sources, k] the hypotheses that are made of it */
    double *log_prob, *inclusion;
    uint8_t *finished, *present;
    float *x; /* [sources * k, size] */
    int32_t *slot, *length, *source, *entry, *fresh, *given, *position; /* the next rows */
} work;

static work work_for(const search *s, int64_t chunks, memory *m) {
    int64_t n = s->sources * s->k, table = n * chunks, real = n * sizeof(double);
    work w = {
        .maxima = room_for(m, table * sizeof(float)),
        .sums = room_for(m, table * s->terms * sizeof(float)),
        .of_rows = room_for(m, table * (s->terms + 1) * sizeof(float)),
        .total = room_for(m, real),
        .offset = room_for(m, real),
        .value = room_for(m, real),
        .index = room_for(m, real),
        .own = room_for(m, real),
        .ones = room_for(m, n),
        .token = room_for(m, real),
        .longer = room_for(m, real),
        .log_prob = room_for(m, real),
        .inclusion = room_for(m, real),
        .finished = room_for(m, n),
        .present = room_for(m, n),
        .x = room_for(m, n * s->model->layers->size * sizeof(float)),
        .slot = room_for(m, n * s->cache->stride * sizeof(int32_t)),
        .length = room_for(m, 6 * n * sizeof(int32_t)),
    };
    if (m->failed) return w;
    w.source = w.length + n, w.entry = w.source + n, w.fresh = w.entry + n, w.given = w.fresh + n;
    w.position = w.given + n;
    memset(w.ones, 1, n);
    for (int64_t i = 0; i < n; i++) w.entry[i] = (int32_t)i;
    return w;
}

static int is_open(const search *s, int64_t place) { return s->present[place] && !s->finished[place]; }

/* Read the scores of the rows, and say which row belongs to which hypothesis. */
static scores read_rows(const search *s, int64_t chunks, const work *w) {
    int64_t all = s->sources * s->k, n = 0;
    for (int64_t i = 0; i < all; i++) n += is_open(s, i);
    for (int64_t i = 0, next = 0; i < all; i++) s->row[i] = is_open(s, i) ? next++ : n;
    float *maxima = w->of_rows, *sums = maxima + n * chunks;
    read_scores(s->scores, n, s->tokens, s->length, s->terms, (float)(1 / s->temperature), maxima, sums);
    /* One that has ended offers token 0 alone, with the score 0. */
    for (int64_t i = 0; i < all * chunks; i++) {
        int64_t row = s->row[i / chunks], place = row * chunks + i % chunks, first = i % chunks == 0;
        w->maxima[i] = row < n ? maxima[place] : first ? 0.0f : -INFINITY;
        for (int64_t j = 0; j < s->terms; j++)
            w->sums[j * all * chunks + i] = row < n ? sums[j * n * chunks + place] : first ? 1.0f : 0.0f;
    }
    return (scores){
        .rows = s->scores,
        .row = s->row,
        .maxima = w->maxima,
        .sums = w->sums,
        .offset = w->offset,
        .n = n,
        .sources = s->sources,
        .parents = s->k,
        .tokens = s->tokens,
        .chunks = chunks,
        .length = s->length,
        .terms = s->terms,
        .temperature = s->temperature,
    };
}

static int64_t draw_by_strata(const search *s, const scores *x, const work *w) {
    int64_t n = s->sources * s->k, numbers = 3 + 2 * s->k + x->chunks + s->length;
    memory m = {0};
    stratified d = {.k = s->k, .full_share = s->full_share, .log_prob = s->log_prob, .inclusion = s->inclusion};
    d.offset = room_for(&m, n * sizeof(double));
    d.item = room_for(&m, n * sizeof(int64_t));
    d.weight = room_for(&m, n * sizeof(double));
    d.mass = room_for(&m, n * x->chunks * sizeof(float));
    d.number = room_for(&m, 3 * s->sources * sizeof(double));
    double *uniform = room_for(&m, s->sources * numbers * sizeof(double));
    int64_t fine = m.failed ? NO_MEMORY : stratified_targets(x, &d);
    if (fine > 0) {
        for (int64_t r = 0; r < s->sources; r++) draw_uniform(s->random[r], numbers, uniform + r * numbers);
        drawn out = {w->index, w->own, s->state, s->state + n, s->state + 2 * n};
        fine = draw_stratified(x, &d, uniform, &out);
    }
    release(&m);
    return fine;
}

/* Select k candidates of every source; return whether all sources are ordinary ones. */
static int64_t selects(const search *s, const scores *x, const work *w) {
    if (normalize(x, s->log_prob, w->total, w->offset) < 0) return NO_MEMORY;
    for (int64_t i = 0; i < s->sources * s->k; i++)
        if (!isfinite(w->total[i])) return 0;
    if (s->rule == LARGEST) return find_largest(x, s->k, w->value, w->index);
    if (s->rule == POISSON) return draw_poisson(x, s->design, s->random, w->index, w->own);
    return draw_by_strata(s, x, w);
}

/* Put what was selected in the place of the hypotheses. */
static void replace(const search *s, const scores *x, const work *w) {
    int64_t n = s->sources * s->k;
    uint8_t broken;
    extension e = {
        .finished = s->finished,
        .length = s->longer,
        .log_inclusion = s->inclusion,
        .index = w->index,
        .present = w->ones,
        .own_inclusion = w->own,
        .total = w->total,
        .ends = s->ends,
        .k = s->k,
        .number = s->number,
        .pad = s->pad,
        .token = s->token,
        .longer = w->longer,
        .parent = s->parent,
        .log_prob = w->log_prob,
        .inclusion = s->inclusion ? w->inclusion : 0,
        .ended = w->finished,
        .is_present = s->present,
        .broken = &broken,
    };
    extend(x, &e);
    memcpy(s->longer, w->longer, n * sizeof *s->longer);
    memcpy(s->log_prob, w->log_prob, n * sizeof *s->log_prob);
    memcpy(s->finished, w->finished, n);
    if (s->inclusion) memcpy(s->inclusion, w->inclusion, n * sizeof *s->inclusion);
}

/* The number of hypotheses that go on of the source with the most of them; 0 if one has none. */
static int64_t most_open(const search *s) {
    int64_t most = 0;
    for (int64_t r = 0; r < s->sources; r++) {
        int64_t count = 0;
        for (int64_t i = r * s->k; i < (r + 1) * s->k; i++) count += is_open(s, i);
        if (!count) return 0;
        most = count > most ? count : most;
    }
    return most;
}

static void remember(const search *s) {
    int64_t n = s->sources * s->k, at = s->passed * n;
    memcpy(s->parents + at, s->parent, n * sizeof *s->parents);
    memcpy(s->words + at, s->token, n * sizeof *s->words);
    for (int64_t i = 0; s->trace && i < n; i++)
        for (int64_t j = 0; j < 3; j++) s->trace[3 * (at + i) + j] = (float)s->state[j * n + i];
}

/* Give every open hypothesis a row, with its parent's slots and one more; return the number of rows,
   or 0 if there is no room or no position for them. */
static int64_t next_rows(const search *s, int64_t most, const work *w) {
    cache *c = s->cache;
    if (c->left == 0 || c->used + most > c->capacity) return 0;
    int64_t n = 0;
    for (int64_t r = 0; r < s->sources; r++)
        for (int64_t i = r * s->k, within = 0; i < (r + 1) * s->k; i++) {
            if (!is_open(s, i)) continue;
            int64_t before = s->row[r * s->k + s->parent[i]], length = c->length[before];
            if (length >= s->model->positions || length >= c->stride) return 0;
            int32_t *slot = w->slot + n * c->stride;
            memcpy(slot, c->slot + before * c->stride, length * sizeof *slot);
            slot[length] = w->fresh[n] = (int32_t)(c->used + within++);
            w->length[n] = (int32_t)length + 1;
            w->source[n] = c->source[before];
            n++;
        }
    c->left--;
    c->used += most;
    memcpy(c->slot, w->slot, n * c->stride * sizeof *c->slot);
    memcpy(c->length, w->length, n * sizeof *c->length);
    memcpy(c->source, w->source, n * sizeof *c->source);
    return n;
}

/* Compute the scores of n rows after the latest tokens of the open hypotheses. */
static void advance(search *s, int64_t n, const work *w) {
    const decoder *d = s->model;
    const cache *c = s->cache;
    int64_t size = d->layers->size, longest = c->stride > c->given_stride ? c->stride : c->given_stride;
    for (int64_t i = 0, r = 0; r < n; i++) {
        if (!is_open(s, i)) continue;
        const float *token = d->token + s->token[i] * size;
        for (int64_t j = 0; j < size; j++) w->x[r * size + j] = token[j] * (float)d->scale;
        r++;
    }
    /* A loop of its own: in one with the product, sums are rounded in another way than by torch. */
    for (int64_t r = 0; r < n; r++) w->position[r] = c->length[r] - 1;
    for (int64_t r = 0; d->position && r < n; r++) {
        const float *position = d->position + w->position[r] * size;
        for (int64_t j = 0; j < size; j++) w->x[r * size + j] += position[j];
    }
    if (d->first) normalize_rows(d->first, w->x, n, size, w->x);
    table own = {c->slot, c->stride, w->entry, c->length, c->source, c->capacity, c->memory};
    table given = {c->given_slot, c->given_stride, c->source, w->given, c->source, c->given_capacity,
                   c->given_memory};
    for (int64_t r = 0; c->given_slot && r < n; r++) w->given[r] = c->given_number[c->source[r]];
    places at = {w->position, c->cosines, c->sines, d->bias, d->reach};
    longest = (longest / LANES + 1) * LANES;
    run_layers(d->layers, w->x, n, &own, w->fresh, c->given_slot ? &given : 0, &at, d->wide, longest,
               s->scratch);
    if (d->last) normalize_rows(d->last, w->x, n, size, w->x);
    multiply(d->head, w->x, n, 0, s->into, s->scratch);
    s->scores = s->into;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Add the time since the last call to that of a part. */
static void add_time(search *s, int part, double *since) {
    double t = now();
    s->seconds[part] += t - *since;
    *since = t;
}

/* Take steps. Return 1 if the last one has been selected and the rest of it is to be done, or 0 if
   its scores are there and it is to be selected. */
int64_t take_steps(search *s) {
    int64_t chunks = (s->tokens + s->length - 1) / s->length, selected = 0;
    memory m = {0};
    work w = work_for(s, chunks, &m);
    if (m.failed) {
        release(&m);
        return NO_MEMORY;
    }
    double since = now();
    for (s->passed = 0;; s->passed++) {
        scores x = read_rows(s, chunks, &w);
        s->count = x.n;
        add_time(s, READING, &since);
        selected = selects(s, &x, &w);
        add_time(s, SELECTION, &since);
        if (selected <= 0) break;
        replace(s, &x, &w);
        int64_t most = most_open(s);
        if (!most || s->passed == s->most) break;
        int64_t rows = next_rows(s, most, &w);
        if (!rows) break;
        remember(s);
        add_time(s, EXTENSION, &since);
        advance(s, rows, &w);
        add_time(s, MODEL, &since);
    }
    if (selected > 0) add_time(s, EXTENSION, &since);
    release(&m);
    return selected;
}
