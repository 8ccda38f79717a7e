/* The hypotheses that were selected among the extensions of others: cpsbs.search.recursion._extended. */

#include "extending.h"

void extend(const scores *s, const extension *e) {
    *e->broken = 0;
    for (int64_t i = 0; i < s->sources * s->parents; i++) *e->broken |= !isfinite(e->total[i]);
    for (int64_t i = 0; i < s->sources * e->k; i++) {
        int64_t source = i / e->k, item = e->index[i], parent = item / s->tokens;
        int64_t place = source * s->parents + parent, token = item % s->tokens;
        int present = e->present[i], finished = e->finished[place];
        if (finished || !present) token = e->pad;
        int ends = 0;
        for (int64_t n = 0; n < e->number; n++) ends |= token == e->ends[n];
        e->parent[i] = parent;
        e->token[i] = token;
        e->longer[i] = present ? e->length[place] + !finished : 0;
        e->is_present[i] = present;
        e->ended[i] = present && (finished || ends);
        e->log_prob[i] = present ? score_of(s, source, item) + s->offset[place] : -INFINITY;
        if (!e->inclusion) continue;
        e->inclusion[i] = e->log_inclusion[place] + e->own_inclusion[i];
        *e->broken |= present && isnan(e->inclusion[i]);
    }
}
