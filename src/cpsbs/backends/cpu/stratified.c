/* Stratified samples of a beam's candidates: the formulas of cpsbs.designs.targets and
   cpsbs.designs.stratified, source by source. */

#include "stratified.h"

#define BELOW_ONE (1 - 0x1p-52)
#define TINY 0x1p-1000
#define MOST_LOG_WEIGHT 700.0

static void find_offsets(const scores *s, const stratified *d) {
    for (int64_t p = 0; p < s->sources * s->parents; p++)
        d->offset[p] = d->log_prob[p] == -INFINITY ? -INFINITY : s->offset[p] - d->inclusion[p];
}

static int find_targets(const scores *s, const stratified *d, int64_t source, head *h) {
    int64_t k = d->k, chunks = s->parents * s->chunks;
    if (!find_head(s, source, h)) return 0;
    int64_t *item = d->item + source * k;
    double *weight = d->weight + source * k, *number = d->number + 3 * source;
    for (int64_t i = 0; i < k; i++) {
        int64_t j = i;
        for (; j > 0 && weight[j - 1] < h->value[i]; j--) weight[j] = weight[j - 1], item[j] = item[j - 1];
        weight[j] = h->value[i], item[j] = h->item[i];
    }
    double reference = weight[k - 1], rest[MOST_TERMS];
    if (!(weight[0] < INFINITY && reference > -INFINITY)) return 0;
    sum_outside(s, source, h, reference, 0, rest, d->mass + source * chunks);
    if (!(rest[0] > 0 && rest[0] < INFINITY)) return 0;
    for (int64_t i = 0; i < k; i++) {
        double x = weight[i] - reference;
        weight[i] = exp(x > MOST_LOG_WEIGHT ? MOST_LOG_WEIGHT : x);
    }
    /* The number of heavy ones, from the sums without the largest, each from the smallest on. */
    double left = rest[0] > TINY ? rest[0] : TINY, sum = 0, scale = 0;
    int64_t heavy = 0;
    for (int64_t i = k - 1; i >= 0; i--) {
        sum += weight[i];
        double count = (double)(k - i), own = sum + left;
        /* All before the first light one are heavy, so the last one that is found here counts. */
        if (weight[i] * count < own || i == k - 1) scale = count / own, heavy = i;
        if (i == k - 1 && !(weight[i] * count < own)) heavy = k;
    }
    number[0] = reference, number[1] = scale, number[2] = (double)heavy;
    return 1;
}

/* Find the targets of all sources; return whether all of them are ordinary ones. */
int64_t stratified_targets(const scores *given, const stratified *d) {
    scores s = *given;
    s.offset = d->offset;
    find_offsets(given, d);
    memory m = {0};
    head h = head_for(&s, d->k, &m);
    int64_t source = 0;
    while (!m.failed && source < s.sources && find_targets(&s, d, source, &h)) source++;
    release(&m);
    return m.failed ? NO_MEMORY : source == s.sources;
}

/* The order of count uniform numbers in [0, 1): by buckets, in which few numbers change places. */
static void order_of(const double *uniform, int64_t count, int32_t *order, int32_t *room) {
    memset(room, 0, (count + 1) * sizeof *room);
    for (int64_t i = 0; i < count; i++) room[(int64_t)(uniform[i] * (double)count) + 1]++;
    for (int64_t i = 0; i < count; i++) room[i + 1] += room[i];
    for (int64_t i = 0; i < count; i++) order[room[(int64_t)(uniform[i] * (double)count)]++] = (int32_t)i;
    for (int64_t i = 1; i < count; i++) {
        int32_t x = order[i];
        int64_t j = i;
        for (; j > 0 && uniform[order[j - 1]] > uniform[x]; j--) order[j] = order[j - 1];
        order[j] = x;
    }
}

/* The random key of an item: see cpsbs.randomness.shuffle_keys. */
static int64_t shuffle_key(int64_t item, double uniform) {
    uint64_t x = (uint64_t)item * 0x2545F4914F6CDD1Dull + (uint64_t)(int64_t)(uniform * 0x1p53);
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return (int64_t)(x ^ x >> 31);
}

/* The first place whose number is larger than x, and at most the last one. */
static int64_t first_above(const double *ascending, int64_t count, double x) {
    int64_t low = 0, high = count - 1;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (ascending[middle] <= x) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Scratch memory for one source. */
typedef struct {
    int32_t *chunk, *token, *parent, *sort; /* orders, and room for finding them */
    int64_t *key, *known;                   /* [k] */
    uint8_t *taken;                         /* [length] */
    double *light, *until, *member;         /* [k], [parents, chunks], [length] */
    double *probable, *size, *end, *times, *share, *point; /* [parents] */
} room;

/* The candidate at a point among those of a parent that are not the K largest. */
static int64_t item_in_chunks(const scores *s, const stratified *d, int64_t source, int64_t parent, double at,
                              const double *uniform, int *shuffled, const room *m) {
    const double *until = m->until + parent * s->chunks, *number = d->number + 3 * source;
    int64_t place = first_above(until, s->chunks, at * BELOW_ONE), last = s->length - 1, n = 0;
    double begin = place ? until[place - 1] : 0, total = 0;
    int64_t first = m->chunk[place] * s->length;
    if (!*shuffled) order_of(uniform, s->length, m->token, m->sort);
    *shuffled = 1;
    double shift = d->offset[source * s->parents + parent] - number[0];
    int64_t item = parent * s->tokens + first;
    for (int64_t i = 0; i < s->length; i++) m->taken[i] = first + i >= s->tokens;
    for (int64_t j = 0; j < d->k; j++)
        if (m->known[j] >= item && m->known[j] - item < s->length) m->taken[m->known[j] - item] = 1;
    for (int64_t i = 0; i < s->length; i++) {
        int64_t token = m->token[i];
        m->member[i] = m->taken[token] ? -INFINITY : score_of(s, source, item + token) + shift;
    }
    exponentials(m->member, s->length, m->member);
    for (int64_t i = 0; i < s->length; i++) m->member[i] = total += m->member[i];
    double level = (at - begin) / number[1];
    level = level < 0 ? 0 : level;
    level = level < total * BELOW_ONE ? level : total * BELOW_ONE;
    while (n < last && m->member[n] <= level) n++;
    first += m->token[n];
    return parent * s->tokens + (first < s->tokens ? first : s->tokens - 1);
}

/* The offset of each parent in its stratum, spread over [0, 1): see cpsbs.designs.stratified. */
static void find_starts(const scores *s, double turn, const double *uniform, const room *m) {
    int64_t parents = s->parents;
    double whole = 0, end = 0;
    order_of(uniform, parents, m->parent, m->sort);
    for (int64_t p = 0; p < parents; p++) whole += m->share[p];
    whole = whole > TINY ? whole : TINY;
    for (int64_t i = 0; i < parents; i++) {
        int64_t p = m->parent[i];
        end += m->share[p];
        double even = fmod((end - uniform[parents + p] * m->share[p]) / whole + turn, 1.0);
        double least = floor(m->size[p]), rest = m->size[p] - least;
        m->point[p] = m->times[p] > least ? even * rest : rest + even * (1 - rest);
    }
}

static void draw_source(const scores *s, const stratified *d, int64_t source, const double *uniform,
                        const drawn *out, const room *m) {
    int64_t k = d->k, parents = s->parents, chunks = s->chunks;
    const double *number = d->number + 3 * source, *weight = d->weight + source * k;
    const double *offset = d->offset + source * parents;
    const float *mass = d->mass + source * parents * chunks;
    const int64_t *item = d->item + source * k;
    const double *of_parents = uniform + 3, *of_chunks = of_parents + 2 * parents;
    const double *of_tokens = of_chunks + chunks;
    int64_t heavy = (int64_t)number[2], *index = out->index + source * k;
    double scale = number[1], log_scale = log(scale) - number[0];
    /* On the interval of a parent lie its light candidates among the K largest, then all others. */
    for (int64_t i = 0; i < k; i++) {
        int64_t key = shuffle_key(item[i], uniform[1]), j = i;
        double light = i < heavy ? 0 : scale * weight[i];
        for (; j > 0 && m->key[j - 1] > key; j--)
            m->key[j] = m->key[j - 1], m->known[j] = m->known[j - 1], m->light[j] = m->light[j - 1];
        m->key[j] = key, m->known[j] = item[i], m->light[j] = light;
    }
    order_of(of_chunks, chunks, m->chunk, m->sort);
    double end = 0;
    for (int64_t p = 0; p < parents; p++) {
        double *until = m->until + p * chunks, sum = 0, choice = 0;
        for (int64_t c = 0; c < chunks; c++) until[c] = sum += scale * mass[p * chunks + m->chunk[c]];
        m->probable[p] = 0;
        for (int64_t i = 0; i < k; i++)
            if (m->known[i] / s->tokens == p)
                m->probable[p] += m->light[i], choice += m->light[i] * (1 - m->light[i]);
        m->size[p] = m->probable[p] + sum;
        m->end[p] = end += m->size[p];
        m->times[p] = 0;
        m->share[p] = (choice + sum) / d->full_share;
    }
    double total = end > TINY ? end : TINY, places = (double)(k - heavy > 1 ? k - heavy : 1);
    for (int64_t i = heavy; i < k; i++) {
        double point = (uniform[0] + (double)(i - heavy)) / places * total;
        m->times[index[i] = first_above(m->end, parents, point * BELOW_ONE)]++;
    }
    for (int64_t p = 0; p < parents; p++)
        m->share[p] = m->times[p] > 0 ? (m->share[p] < 1 ? m->share[p] : 1) : 0;
    find_starts(s, uniform[2], of_parents, m);
    int shuffled = 0;
    for (int64_t i = 0; i < heavy; i++) index[i] = item[i];
    for (int64_t i = heavy, before = 0, latest = -1; i < k; i++) {
        int64_t p = index[i];
        before = p == latest ? before + 1 : 0;
        latest = p;
        double at = m->point[p] + (double)before, most = m->size[p] * BELOW_ONE;
        at = at < most ? at : most;
        if (at < m->probable[p]) {
            double sum = 0;
            for (int64_t j = 0; j < k; j++) {
                if (m->known[j] / s->tokens != p || !(m->light[j] > 0)) continue;
                index[i] = m->known[j];
                if ((sum += m->light[j]) > at) break;
            }
        } else
            index[i] = item_in_chunks(s, d, source, p, at - m->probable[p], of_tokens, &shuffled, m);
    }
    for (int64_t i = 0; i < k; i++) m->light[i] = i >= heavy; /* from here on whether it was drawn */
    for (int64_t i = 1; i < k; i++) {
        int64_t x = index[i], j = i;
        double light = m->light[i];
        for (; j > 0 && index[j - 1] > x; j--) index[j] = index[j - 1], m->light[j] = m->light[j - 1];
        index[j] = x, m->light[j] = light;
    }
    for (int64_t i = 0, o = source * k; i < k; i++, o++) {
        int64_t p = index[i] / s->tokens;
        if (!m->light[i]) {
            out->log_inclusion[o] = out->start[o] = out->inside[o] = out->share[o] = 0;
            continue;
        }
        double target = score_of(s, source, index[i]) + offset[p] + log_scale;
        double inside = log(m->times[p] / m->size[p]) + (target < 0 ? target : 0);
        out->log_inclusion[o] = target < 0 ? target : 0;
        out->start[o] = fmod((m->end[p] - m->size[p]) * places / total, 1.0);
        out->inside[o] = inside < 0 ? inside : 0;
        out->share[o] = exp(-log_scale);
    }
}

/* Draw k candidates of each source with uniform [sources, 3 + 2 parents + chunks + length]. */
int64_t draw_stratified(const scores *given, const stratified *d, const double *uniform, const drawn *out) {
    scores s = *given;
    s.offset = d->offset;
    int64_t parents = s.parents, chunks = s.chunks, length = s.length, k = d->k;
    int64_t longest = chunks > length ? chunks : length;
    longest = longest > parents ? longest : parents;
    int64_t reals = k + parents * chunks + length + DOUBLES + 6 * parents;
    memory all = {0};
    double *real = room_for(&all, reals * sizeof *real);
    int64_t *integer = room_for(&all, 2 * k * sizeof *integer);
    int32_t *order = room_for(&all, (chunks + length + parents + longest + 1) * sizeof *order);
    uint8_t *taken = room_for(&all, length);
    if (all.failed) {
        release(&all);
        return NO_MEMORY;
    }
    room m = {.taken = taken, .chunk = order, .token = order + chunks, .key = integer, .known = integer + k};
    m.light = real;
    m.parent = m.token + length;
    m.sort = m.parent + parents;
    m.until = m.light + k;
    m.member = m.until + parents * chunks;
    m.probable = m.member + length + DOUBLES;
    m.size = m.probable + parents;
    m.end = m.size + parents;
    m.times = m.end + parents;
    m.share = m.times + parents;
    m.point = m.share + parents;
    for (int64_t r = 0; r < s.sources; r++)
        draw_source(&s, d, r, uniform + r * (3 + 2 * parents + chunks + length), out, &m);
    release(&all);
    return 1;
}
