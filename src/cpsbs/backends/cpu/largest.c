/* The largest candidates of a source: they lie in the chunks with the largest maxima, and only these
   are scanned (cpsbs.scores.largest). */

#include "scores.h"

/* The largest difference of log-probabilities for which float32 is precise enough. */
#define FLOAT32_RANGE 1000.0

/* An integer that grows with x. */
static inline uint32_t key_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The most-th largest of the keys, bit by bit: as many as wanted are at least as large. */
static uint32_t threshold(const uint32_t *key, int64_t count, int64_t most) {
    uint32_t found = 0;
    for (int bit = 31; bit >= 0; bit--) {
        uint32_t next = found | 1u << bit;
        int32_t larger = 0;
        for (int64_t i = 0; i < count; i++) larger += key[i] >= next;
        if (larger >= most) found = next;
    }
    return found;
}

/* Put the places of the most largest keys into place, ascending. */
static void places_of_largest(const uint32_t *key, int64_t count, int64_t most, int32_t *place) {
    uint32_t last = threshold(key, count, most);
    int64_t above = 0, n = 0;
    for (int64_t i = 0; i < count; i++) above += key[i] > last;
    int64_t equal = most - above; /* so many of those that are equal to the last one */
    for (int64_t i = 0; i < count && n < most; i++)
        if (key[i] > last || (key[i] == last && equal-- > 0)) place[n++] = (int32_t)i;
}

head head_for(const scores *s, int64_t most, memory *m) {
    head h = {.most = most, .stride = (s->length + LANES - 1) / LANES * LANES};
    int64_t chunks = s->parents * s->chunks, members = most * h.stride;
    int64_t keys = chunks > members ? chunks : members;
    h.chunk = room_for(m, most * sizeof *h.chunk);
    h.member = room_for(m, members * sizeof *h.member);
    h.place = room_for(m, most * sizeof *h.place);
    h.item = room_for(m, most * sizeof *h.item);
    h.value = room_for(m, most * sizeof *h.value);
    h.level = room_for(m, chunks * sizeof *h.level);
    h.key = room_for(m, keys * sizeof *h.key);
    h.some = room_for(m, (members + 1) * sizeof *h.some);
    return h;
}

/* The scores of a parent, or null if its one candidate is token 0, with the score 0. */
const float *row_of(const scores *s, int64_t source, int64_t parent) {
    int64_t place = source * s->parents + parent;
    if (s->row) place = s->row[place];
    return place == s->n ? 0 : s->rows + place * s->tokens;
}

/* The score / temperature of a candidate. */
double score_of(const scores *s, int64_t source, int64_t item) {
    int64_t token = item % s->tokens;
    const float *x = row_of(s, source, item / s->tokens);
    if (!x) return token ? -INFINITY : 0.0;
    return x[token] / s->temperature;
}

/* Put the members of the j-th chunk, relative to the lowest, where they belong. */
static void scan(const scores *s, int64_t source, head *h, int64_t j) {
    int64_t parent = h->chunk[j] / s->chunks, first = h->chunk[j] % s->chunks * s->length;
    int64_t size = s->tokens - first < s->length ? s->tokens - first : s->length;
    float top = s->maxima[source * s->parents * s->chunks + h->chunk[j]];
    float over = 1 / s->temperature, level = h->level[h->chunk[j]] - h->lowest;
    float *into = h->member + j * h->stride;
    const float *x = row_of(s, source, parent);
    if (!x) {
        for (int64_t i = 0; i < h->stride; i++) into[i] = -INFINITY;
        into[0] = level;
        return;
    }
    for (int64_t i = 0; i < size; i++) into[i] = (x[first + i] - top) * over + level;
    for (int64_t i = size; i < h->stride; i++) into[i] = -INFINITY;
}

/* Find the most probable candidates of a source; return whether that is possible here. */
int find_head(const scores *s, int64_t source, head *h) {
    int64_t chunks = s->parents * s->chunks, most = h->most;
    const float *maxima = s->maxima + source * chunks;
    const double *offset = s->offset + source * s->parents;
    if (chunks <= most) return 0;
    double top = -INFINITY;
    for (int64_t p = 0; p < s->parents; p++)
        for (int64_t c = p * s->chunks; c < (p + 1) * s->chunks; c++) {
            double level = maxima[c] / s->temperature + offset[p];
            h->level[c] = level;
            top = level > top ? level : top;
        }
    if (!(top > -INFINITY && top < INFINITY)) return 0;
    for (int64_t c = 0; c < chunks; c++) h->key[c] = key_of((float)(h->level[c] - top));
    places_of_largest(h->key, chunks, most, h->chunk);
    h->lowest = top;
    h->found = 0;
    for (int64_t j = 0; j < most; j++) {
        double level = h->level[h->chunk[j]];
        if (level == -INFINITY) continue; /* nothing is in it */
        h->chunk[h->found++] = h->chunk[j];
        h->lowest = level < h->lowest ? level : h->lowest;
    }
    if (top - h->lowest > FLOAT32_RANGE) return 0;
    for (int64_t j = 0; j < h->found; j++) scan(s, source, h, j);
    /* If there are enough chunks, as many members are at least as large as the lowest maximum. */
    int64_t members = h->found * h->stride, count = 0;
    for (int64_t i = 0; i < members; i++) {
        h->some[count] = (int32_t)i;
        count += h->member[i] >= 0.0f;
    }
    if (count < most) {
        count = 0;
        for (int64_t i = 0; i < members; i++) {
            h->some[count] = (int32_t)i;
            count += h->member[i] > -INFINITY;
        }
        if (count < most) return 0;
    }
    for (int64_t i = 0; i < count; i++) h->key[i] = key_of(h->member[h->some[i]]);
    places_of_largest(h->key, count, most, h->place);
    for (int64_t i = 0; i < most; i++) {
        h->place[i] = h->some[h->place[i]];
        int64_t c = h->chunk[h->place[i] / h->stride], parent = c / s->chunks;
        int64_t token = c % s->chunks * s->length + h->place[i] % h->stride;
        h->item[i] = parent * s->tokens + token;
        h->value[i] = score_of(s, source, h->item[i]) + offset[parent];
    }
    return 1;
}

/* sums[j] = the sum of e^{(j + 1)(score + offset - unit)} outside the head; mass: what is in each
   chunk, of odds if they are e^unit at the unit, else of probabilities. */
void sum_outside(const scores *s, int64_t source, head *h, double unit, float odds, double *sums,
                 float *mass) {
    int64_t chunks = s->parents * s->chunks, all = s->sources * chunks;
    const float negligible = 3.2935e-10f; /* the fourth power of less is subnormal */
    for (int64_t j = 0; j < s->terms; j++) sums[j] = 0;
    for (int64_t i = 0; i < h->most; i++) h->member[h->place[i]] = -INFINITY;
    float again[MOST_TERMS], shift = (float)(h->lowest - unit);
    int64_t next = 0;
    for (int64_t c = 0; c < chunks; c += LANES) {
        int64_t here = chunks - c < LANES ? chunks - c : LANES;
        vec level = filled(-INFINITY);
        for (int64_t i = 0; i < here; i++) {
            double x = h->level[c + i] - unit;
            level[i] = x > 0 ? 0.0f : (float)x;
        }
        vec weight = exponential(level);
        vec part[MOST_TERMS], power = (vec)((ivec)weight & (weight > negligible));
        vec small = power;
        for (int64_t j = 0; j < s->terms; j++) {
            const float *x = s->sums + j * all + source * chunks + c;
            if (j) power = power * small;
            part[j] = some(x, here, 0.0f) * (j ? power : weight);
        }
        for (; next < h->found && h->chunk[next] < c + here; next++) {
            const float *x = h->member + next * h->stride;
            vec sum[MOST_TERMS] = {filled(0), filled(0), filled(0), filled(0)};
            for (int64_t i = 0; i < h->stride; i += LANES) {
                vec w = exponential(*(const vec *)(x + i) + shift);
                sum[0] += w;
                w = (vec)((ivec)w & (w > negligible));
                vec p = w;
                for (int64_t j = 1; j < s->terms; j++) {
                    p = p * w;
                    sum[j] += p;
                }
            }
            for (int64_t j = 0; j < s->terms; j++) again[j] = sum_of(sum[j]);
            for (int64_t j = 0; j < s->terms; j++) part[j][h->chunk[next] - c] = again[j];
        }
        for (int64_t j = 0; j < s->terms; j++)
            for (int64_t i = 0; i < here; i++) sums[j] += part[j][i];
        vec first = part[s->terms - 1];
        if (odds > 0) /* with p = U x, the odds are U x + (U x)^2 + (U x)^3 ... */
            for (int64_t j = s->terms - 2; j >= 0; j--) first = part[j] + first * odds;
        else
            first = part[0];
        for (int64_t i = 0; i < here; i++) mass[c + i] = first[i];
    }
}

/* Write the most largest candidates [sources, most] and their log-probabilities, in descending
   order; return whether that is possible here. */
int64_t find_largest(const scores *s, int64_t most, double *value, int64_t *item) {
    memory m = {0};
    head h = head_for(s, most, &m);
    int64_t r = 0;
    for (; !m.failed && r < s->sources; r++) {
        if (!find_head(s, r, &h)) break;
        double *v = value + r * most;
        int64_t *n = item + r * most;
        for (int64_t i = 0; i < most; i++) {
            int64_t j = i;
            for (; j > 0 && v[j - 1] < h.value[i]; j--) v[j] = v[j - 1], n[j] = n[j - 1];
            v[j] = h.value[i], n[j] = h.item[i];
        }
    }
    release(&m);
    return m.failed ? NO_MEMORY : r == s->sources;
}

/* total = log of the sum of e^score over the tokens of each parent, and offset = log_prob - total. */
int64_t normalize(const scores *s, const double *log_prob, double *total, double *offset) {
    memory m = {0};
    double *weight = room_for(&m, s->chunks * sizeof *weight);
    for (int64_t p = 0; !m.failed && p < s->sources * s->parents; p++) {
        const float *maxima = s->maxima + p * s->chunks, *sums = s->sums + p * s->chunks;
        float top = -INFINITY;
        for (int64_t c = 0; c < s->chunks; c++) top = maxima[c] > top ? maxima[c] : top;
        if (top == INFINITY || top == -INFINITY) top = 0;
        for (int64_t c = 0; c < s->chunks; c++)
            weight[c] = ((double)maxima[c] - top) / s->temperature;
        exponentials(weight, s->chunks, weight);
        double sum = 0;
        for (int64_t c = 0; c < s->chunks; c++) sum += weight[c] * sums[c];
        total[p] = log(sum) + top / s->temperature;
        offset[p] = log_prob[p] - total[p];
    }
    release(&m);
    return m.failed ? NO_MEMORY : 1;
}
