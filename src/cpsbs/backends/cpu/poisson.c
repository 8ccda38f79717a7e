/* Conditional Poisson samples of a beam's candidates, as in cpsbs.conditional_poisson, whose formulas
   these are: the head and the tail of each source, the tilt, the law of the number of heads, flips,
   items of the tail, and inclusion probabilities. Where a source is not an ordinary one, a function
   says so, and torch does all of it. */

#include "poisson.h"

static double log_weight(const design *d, double log_p) {
    if (log_p > 0) log_p = 0;
    return d->odds ? log_p - log(-expm1(log_p)) : log_p;
}

/* The sum of 1/(1 + e^-(x + shift)). */
static float sum_of_sigmoids(const float *x, int64_t count, float shift) {
    vec total = filled(0);
    for (int64_t i = 0; i < count; i += LANES) {
        vec y = some(x + i, count - i, -INFINITY) + shift;
        ivec negative = y < 0.0f;
        vec e = exponential((vec)(((ivec)y & negative) | ((ivec)-y & ~negative)));
        vec top = (vec)(((ivec)e & negative) | ((ivec)filled(1) & ~negative));
        total += top / (1.0f + e);
    }
    return sum_of(total);
}

/* The odds u of the largest item of the tail, from above, after some rounds. */
static double bound_on_odds(const double *weight, int64_t size, double wanted, double mass, int rounds) {
    double u = wanted / (size - wanted);
    for (; rounds > 0; rounds--) {
        double expected = mass * (u / (1 + u));
        for (int64_t i = 0; i < size; i++) expected += weight[i] * u / (1 + weight[i] * u);
        if (wanted < expected) u *= wanted / expected;
    }
    return u;
}

/* The power sums of the odds from those of the probabilities: r^j = the sum over m >= j of
   C(m - 1, j - 1) p^m. */
static void mix(double *sums, int64_t terms, double unit) {
    for (int64_t j = 0; j < terms; j++) {
        double factor = 1;
        for (int64_t m = j + 1; m < terms; m++) {
            factor *= unit * m / (m - j);
            sums[j] += factor * sums[m];
        }
    }
}

/* The tilt at which K - 1/2 heads are expected, on a grid; see solve_tilt. */
static float tilt_of(const design *d, const float *y, double largest, const double *sums, int64_t terms) {
    float low = (float)d->low, high = (float)(d->limit - (float)largest), wanted = (float)(d->k - 0.5);
    if (high > (float)d->high) high = (float)d->high;
    float left = 0, few = 0;
    for (int64_t i = 0; i <= d->cells; i++) {
        float tilt = low + (high - low) * ((float)i / (float)d->cells);
        float u = -expf(tilt + (float)largest), power = u, heads = 0;
        for (int64_t j = 0; j < terms; j++, power *= u) heads -= (float)sums[j] * power;
        heads += sum_of_sigmoids(y, d->size, tilt);
        if (i && (heads >= wanted || i == d->cells)) {
            float share = (wanted - few) / (heads - few);
            share = share != share ? 0.5f : share < 0 ? 0 : share > 1 ? 1 : share;
            return share < 0.5f ? left + share * (tilt - left) : tilt - (tilt - left) * (1 - share);
        }
        left = tilt;
        few = heads;
    }
    return left;
}

/* The product of the characteristic functions of the coins, and the law of the tail. */
static void find_law(const design *d, const double *coin, const double *other, double tilt, double largest,
                     const double *sums, int64_t terms, double *scratch, const law *l, int64_t source) {
    int64_t half = d->half;
    double *re = scratch, *im = re + half, *tail_re = im + half, *tail_im = tail_re + half;
    for (int64_t i = 0; i < half; i++) re[i] = 1, im[i] = 0;
    for (int64_t n = 0; n < d->size; n++)
        for (int64_t i = 0; i < half; i++) {
            double a = other[n] + coin[n] * d->cosine[i], b = coin[n] * d->sine[i], x = re[i];
            re[i] = x * a - im[i] * b;
            im[i] = x * b + im[i] * a;
        }
    double u = -exp(tilt + largest), power = u;
    for (int64_t i = 0; i < half; i++) tail_re[i] = tail_im[i] = 0;
    for (int64_t j = 0; j < terms; j++, power *= u) {
        double term = -sums[j] * power / (j + 1);
        for (int64_t i = 0; i < half; i++) {
            tail_re[i] += term * d->wave[j * half + i];
            tail_im[i] += term * d->turn[j * half + i];
        }
    }
    exponentials(tail_re, half, tail_re);
    double total = 0, *turned = l->turned + source * half * 2;
    for (int64_t i = 0; i < half; i++) {
        double size = tail_re[i], angle = tail_im[i];
        double a = tail_re[i] = size * cos(angle), b = tail_im[i] = size * sin(angle);
        double x = re[i] * a - im[i] * b, y = re[i] * b + im[i] * a;
        turned[2 * i] = x * d->rotation[2 * i] - y * d->rotation[2 * i + 1];
        turned[2 * i + 1] = x * d->rotation[2 * i + 1] + y * d->rotation[2 * i];
        total += turned[2 * i];
    }
    l->number[4 * source + 3] = log(total);
    double most = 0, *acceptance = l->acceptance + source * (d->k + 2);
    for (int64_t c = 0; c <= d->k; c++) {
        double p = 0;
        for (int64_t i = 0; i < half; i++) {
            const double *back = d->inverse + 2 * (i * (d->k + 1) + c);
            p += tail_re[i] * back[0] - tail_im[i] * back[1];
        }
        acceptance[c] = p > 0 ? p : 0;
        most = acceptance[c] > most ? acceptance[c] : most;
    }
    for (int64_t c = 0; c <= d->k; c++) acceptance[c] /= most;
    acceptance[d->k + 1] = 0;
}

/* The K-th and the next largest of the numbers. */
static void find_kth(const double *x, int64_t count, int64_t k, double *sorted, double *kth, double *next) {
    int64_t n = 0;
    for (int64_t i = 0; i < count; i++) {
        if (n == k + 1 && x[i] <= sorted[k]) continue;
        int64_t j = n < k + 1 ? n++ : k;
        for (; j > 0 && sorted[j - 1] < x[i]; j--) sorted[j] = sorted[j - 1];
        sorted[j] = x[i];
    }
    *kth = sorted[k - 1];
    *next = sorted[k];
}

/* Fill in the law of a source; return whether it is an ordinary one. */
static int prepare(const scores *s, const design *d, int64_t source, head *h, double *scratch, const law *l) {
    int64_t size = d->size, chunks = s->parents * s->chunks;
    double *x = scratch, *weight = x + size, *coin = l->coin + source * size, *other = weight + size;
    float *y = (float *)(other + size), *mass = y + size;
    if (!find_head(s, source, h)) return 0;
    double least = INFINITY, reference, next, sums[MOST_TERMS];
    for (int64_t i = 0; i < size; i++) {
        x[i] = log_weight(d, h->value[i]);
        least = x[i] < least ? x[i] : least;
        if (!(x[i] < INFINITY)) return 0;
    }
    find_kth(x, size, d->k, weight, &reference, &next);
    if (!(next > -INFINITY && least > -INFINITY)) return 0;
    double unit = (least - reference) + reference, largest = unit - reference;
    for (int64_t i = 0; i < size; i++) {
        weight[i] = x[i] - reference - (least - reference);
        x[i] -= reference;
        y[i] = (float)x[i];
    }
    exponentials(weight, size, weight);
    sum_outside(s, source, h, unit, d->odds ? (float)exp(unit) : 0, sums, mass);
    int enough = 0;
    for (int rounds = 1; rounds <= 4 && !enough; rounds += 3) {
        double u = bound_on_odds(weight, size, d->k + 0.5, sums[0], rounds);
        if (d->odds) u += exp(unit);
        double lacking = sums[s->terms - 1] * pow(u, s->terms + 1) / (1 - u) / (s->terms + 1);
        enough = u < 1 && lacking <= d->enough;
    }
    if (!enough) return 0;
    if (d->odds) mix(sums, s->terms, exp(unit));
    double tilt = tilt_of(d, y, largest, sums, s->terms), odds = exp(tilt + largest);
    if (!(sums[1] * odds * odds <= d->spread)) return 0;
    for (int64_t i = 0; i < size; i++) weight[i] = x[i] + tilt;
    exponentials(weight, size, weight);
    for (int64_t i = 0; i < size; i++) {
        other[i] = 1 / (1 + weight[i]);
        coin[i] = weight[i] * other[i];
    }
    double *number = l->number + 4 * source, *share = l->share + source * chunks, total = 0;
    number[0] = reference, number[1] = unit, number[2] = tilt;
    find_law(d, coin, other, tilt, largest, sums, s->terms, other + size + size + chunks, l, source);
    for (int64_t c = 0; c < chunks; c++) share[c] = total += mass[c];
    total = total > 0x1p-1000 ? total : 0x1p-1000;
    for (int64_t c = 0; c < chunks; c++) share[c] = source + share[c] / total;
    memcpy(l->item + source * size, h->item, size * sizeof *h->item);
    return 1;
}

/* Fill in the laws of all sources; return whether all of them are ordinary ones. */
int64_t poisson_laws(const scores *s, const design *d, const law *l) {
    memory m = {0};
    head h = head_for(s, d->size, &m);
    int64_t chunks = s->parents * s->chunks, source = 0;
    double *scratch = room_for(&m, (4 * d->size + 2 * chunks + 4 * d->half) * sizeof *scratch);
    while (!m.failed && source < s->sources && prepare(s, d, source, &h, scratch, l)) source++;
    release(&m);
    return m.failed ? NO_MEMORY : source == s->sources;
}

/* Flip the coins of sources of batch [count] with uniform [count, tries, size + 1]. For those with
   an attempt that is accepted: put the items into picked [sources, k], their number into heads
   [sources], and 1 into accepted [count]. */
void poisson_flips(const design *d, const law *l, const int64_t *batch, int64_t count, int64_t tries,
                   const double *uniform, int64_t *picked, int64_t *heads, uint8_t *accepted) {
    for (int64_t a = 0; a < count; a++) {
        int64_t r = batch[a], size = d->size, k = d->k;
        const double *coin = l->coin + r * size, *acceptance = l->acceptance + r * (k + 2);
        accepted[a] = 0;
        for (int64_t t = 0; t < tries && !accepted[a]; t++) {
            const double *u = uniform + (a * tries + t) * (size + 1);
            int64_t number = 0;
            for (int64_t i = 0; i < size; i++) number += u[i + 1] < coin[i];
            if (!(u[0] < acceptance[number < k + 1 ? number : k + 1])) continue;
            accepted[a] = 1;
            heads[r] = 0;
            for (int64_t i = 0; i < size; i++)
                if (u[i + 1] < coin[i]) picked[r * k + heads[r]++] = l->item[r * size + i];
        }
    }
}

/* An item of the tail of a source, in proportion to its weight, from two numbers in [0, 1). */
static int64_t tail_item(const scores *s, const design *d, const law *l, int64_t r, const double *uniform,
                         double *weight) {
    int64_t chunks = s->parents * s->chunks, low = 0, high = chunks - 1;
    const double *share = l->share + r * chunks;
    double target = uniform[0] - s->sources * 0x1p-52;
    target = (target > 0 ? target : 0) + r;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (share[middle] <= target) low = middle + 1;
        else high = middle;
    }
    int64_t parent = low / s->chunks, first = low % s->chunks * s->length;
    int64_t size = s->tokens - first < s->length ? s->tokens - first : s->length;
    const int64_t *in_head = l->item + r * d->size;
    double offset = s->offset[r * s->parents + parent], unit = l->number[4 * r + 1], total = 0;
    first += parent * s->tokens;
    int64_t n = 0, last = d->size;
    while (n < last) {
        int64_t middle = (n + last) / 2;
        if (in_head[middle] < first) n = middle + 1;
        else last = middle;
    }
    for (int64_t i = 0; i < size; i++) {
        double x = -INFINITY;
        if (n < d->size && in_head[n] == first + i) n++;
        else x = log_weight(d, score_of(s, r, first + i) + offset) - unit;
        weight[i] = x;
    }
    exponentials(weight, size, weight);
    for (int64_t i = 0; i < size; i++) weight[i] = total += weight[i];
    double level = uniform[1] * total * (1 - 0x1p-52);
    int64_t found = 0;
    while (found < size - 1 && weight[found] <= level) found++;
    return first + found;
}

/* Put items of the tail into the places of picked [sources, k] from heads [sources] on, for the
   sources of batch [count], with uniform [count, k, 2]. Those without a repeated item are sorted and
   count as filled [count]. */
int64_t poisson_fill(const scores *s, const design *d, const law *l, const int64_t *batch, int64_t count,
                     const double *uniform, const int64_t *heads, int64_t *picked, uint8_t *filled) {
    memory m = {0};
    double *weight = room_for(&m, s->length * sizeof *weight);
    for (int64_t a = 0; !m.failed && a < count; a++) {
        int64_t r = batch[a], k = d->k, *own = picked + r * k;
        filled[a] = 1;
        for (int64_t i = heads[r]; i < k; i++) {
            own[i] = tail_item(s, d, l, r, uniform + (a * k + i) * 2, weight);
            for (int64_t j = heads[r]; j < i; j++) filled[a] &= own[j] != own[i];
        }
        for (int64_t i = 1; filled[a] && i < k; i++) {
            int64_t x = own[i], j = i;
            for (; j > 0 && own[j - 1] > x; j--) own[j] = own[j - 1];
            own[j] = x;
        }
    }
    release(&m);
    return m.failed ? NO_MEMORY : 1;
}

/* log pi of the items picked [sources, k]. */
void poisson_inclusion(const scores *s, const design *d, const law *l, const int64_t *picked, double *out) {
    for (int64_t r = 0; r < s->sources; r++) {
        const double *number = l->number + 4 * r, *turned = l->turned + r * d->half * 2;
        for (int64_t i = 0; i < d->k; i++) {
            int64_t item = picked[r * d->k + i];
            double log_p = score_of(s, r, item) + s->offset[r * s->parents + item / s->tokens];
            double x = log_weight(d, log_p) - number[0] + number[2], e = exp(-fabs(x));
            double p = x < 0 ? e / (1 + e) : 1 / (1 + e), q = x < 0 ? 1 / (1 + e) : e / (1 + e);
            double without = 0, with = 0;
            for (int64_t n = 0; n < d->half; n++) {
                double over = 1 / ((q - p) * (q - p) + p * q * d->lift[n]);
                without += over * (turned[2 * n] * d->cosine[n] - turned[2 * n + 1] * d->sine[n]);
                with += over * turned[2 * n];
            }
            double others = log(q * without + p * with), log_coin = x < 0 ? x - log1p(e) : -log1p(e);
            double value = log_coin + others - number[3];
            out[r * d->k + i] = value > 0 ? 0 : value; /* NaN stays */
        }
    }
}

/* A source whose attempts all fail has weights that are not numbers; torch sees to it then. */
#define MOST_ROUNDS 64

/* Put a sample into picked [sources, k] from the law of a source; return whether that succeeded. */
static int64_t draw_source(const scores *s, const design *d, const law *l, int64_t r, generator *random,
                       int64_t *picked, int64_t *heads, double *uniform) {
    int64_t tries = d->tries;
    uint8_t done = 0;
    for (int round = 0; !done && round < MOST_ROUNDS; round++) {
        draw_uniform(random, tries * (d->size + 1), uniform);
        poisson_flips(d, l, &r, 1, tries, uniform, picked, heads, &done);
        tries = 2 * tries < d->most_tries ? 2 * tries : d->most_tries;
    }
    if (!done) return 0;
    done = heads[r] == d->k;
    for (int round = 0; !done && round < MOST_ROUNDS; round++) {
        draw_uniform(random, 2 * d->k, uniform);
        if (poisson_fill(s, d, l, &r, 1, uniform, heads, picked, &done) < 0) return NO_MEMORY;
    }
    return done;
}

/* Draw a sample of each source with its own random numbers: the items picked [sources, k], and their
   log pi. Return whether all sources are ordinary ones. */
int64_t draw_poisson(const scores *s, const design *d, generator *const *random, int64_t *picked,
                     double *inclusion) {
    int64_t sources = s->sources, size = d->size, chunks = s->parents * s->chunks;
    int64_t numbers = d->most_tries * (size + 1);
    numbers = numbers > 2 * d->k ? numbers : 2 * d->k;
    int64_t each = size + d->k + 2 + chunks + 2 * d->half + 4;
    memory m = {0};
    double *real = room_for(&m, (sources * each + numbers) * sizeof *real);
    int64_t *integer = room_for(&m, sources * (size + 1) * sizeof *integer);
    if (m.failed) {
        release(&m);
        return NO_MEMORY;
    }
    double *uniform = real + sources * each;
    int64_t *heads = integer + sources * size;
    law l = {.item = integer, .coin = real};
    l.acceptance = l.coin + sources * size;
    l.share = l.acceptance + sources * (d->k + 2);
    l.turned = l.share + sources * chunks;
    l.number = l.turned + sources * 2 * d->half;
    int64_t fine = poisson_laws(s, d, &l);
    for (int64_t r = 0; fine > 0 && r < sources; r++)
        fine = draw_source(s, d, &l, r, random[r], picked, heads, uniform);
    if (fine > 0) poisson_inclusion(s, d, &l, picked, inclusion);
    release(&m);
    return fine;
}
