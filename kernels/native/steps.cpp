// What a step does between forward passes, on a few numbers of each sequence: what the references of
// `heavypath.kernels.trees.levels`, `cache_compaction` and `commit` do.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace heavypath {

struct First {
    int64_t batch, nodes;
    const int64_t *previous, *root, *lengths;       // [B]
    int64_t *tokens, *cache_rows, *parent_rows;     // [B, 2]
    uint8_t* mask;                                  // [B, 2, nodes]
};

struct Place {
    int64_t batch, given, children, drawn, whole;
    int64_t* tokens;                              // [B, tokens_step], in place
    int64_t tokens_step;
    const int64_t *noise_rows;                    // [B, noise_step]
    int64_t noise_step;
    const int64_t *roots, *lengths, *left;        // [B]
    const int64_t* drawn_tokens;                  // [B, drawn]
    const int64_t *child, *draw;                  // [children]
    const int64_t *node, *parent, *depth;         // [given]
    int64_t* out;                                 // [5, B, given]: tokens, positions, cache, parents' and noise rows
};

struct Alike {
    int64_t batch, nodes, given;
    const int64_t* tokens;        // [B, nodes]
    int64_t* texts;               // [B, nodes], in place
    const int64_t *node, *parent;  // [given]
    int64_t* first;               // [B, given]
};

struct RowCopies {
    int64_t batch, count, row_bytes, from_batch, from_row, to_batch, to_row;  // strides in bytes
    const uint8_t* from;
    uint8_t* to;
    const int64_t* places;  // [count]
};

struct Rows {
    uint8_t* first;  // of a cache [B, heads, rows, D], in bytes as its strides
    int64_t batch_stride, head_stride, row_stride, row_bytes, heads;
};

struct Compaction {
    int64_t batch, path_length, caches;
    const int64_t *path, *length, *prefix;  // [B, P], [B], [B]
    const Rows* cache;
};

// The rows of `State.numbers`.
enum Field { ROOT, PREVIOUS, LENGTHS, PRODUCED, LEFT, STEPS, NODES, MEMBER };

struct Commit {
    int64_t batch, nodes, path_length, stops, branching, vocab;
    int64_t* numbers;        // rows `number_step` apart
    int64_t number_step;
    int64_t* output;         // rows `output_step` apart
    int64_t output_step;
    const int64_t* stop;
    uint8_t* seen;           // rows `seen_step` apart; vocab is 0 where nobody asks
    int64_t seen_step;
    int64_t* counts;         // two rows `counts_step` apart
    int64_t counts_step;
    const int64_t *tokens, *parents, *ranks, *depths;  // [B, N]; of the last three sequences lie
    int64_t tree_step;                                 // this far apart: N, or 0 for all the same
    const int64_t *path, *length, *after;
};

inline void commit_one(const Commit& c, int64_t b) {
    auto number = [&](Field field) -> int64_t& { return c.numbers[field * c.number_step + b]; };
    const int64_t *path = c.path + b * c.path_length, *tokens = c.tokens + b * c.nodes;
    const int64_t length = c.length[b], after = c.after[b], left = number(LEFT), step = b * c.tree_step;
    const bool active = left > 0;
    auto emitted = [&](int64_t place) { return place < length ? tokens[path[place + 1]] : after; };
    int64_t until = c.path_length + 1;  // tokens up to the first end-of-sequence token
    for (int64_t place = 0; place <= length && until > c.path_length; place++)
        if (std::find(c.stop, c.stop + c.stops, emitted(place)) != c.stop + c.stops) until = place + 1;
    const int64_t most = std::min(length + 1, left), count = std::max<int64_t>(0, std::min(most, until));
    for (int64_t place = 0; place < count; place++) {
        const int64_t token = emitted(place);
        c.output[number(MEMBER) * c.output_step + number(PRODUCED) + place] = token;
        if (c.vocab && token >= 0) c.seen[b * c.seen_step + token] = 1;
    }
    for (int64_t node = 1; active && node < c.nodes; node++) {
        const int64_t above = std::max<int64_t>(0, c.depths[step + node] - 1);  // an absent node may have depth 0
        if (above + 1 >= c.path_length || tokens[node] < 0 || path[above] != c.parents[step + node]) continue;
        const int64_t slot = above * c.branching + c.ranks[step + node];
        c.counts[slot]++;
        c.counts[c.counts_step + slot] += path[above + 1] == node;
    }
    number(PREVIOUS) = tokens[path[length]];
    number(ROOT) = std::max<int64_t>(after, 0);
    number(LENGTHS) += active ? length + 1 : 0;
    number(STEPS) += active;
    number(NODES) += active ? c.nodes : 0;
    number(PRODUCED) += count;
    number(LEFT) = active && after < 0 ? -1 : until <= most ? 0 : left - count;
}

}  // namespace heavypath

using namespace heavypath;

extern "C" {
void first_nodes(const First* call) {
    for (int64_t b = 0; b < call->batch; b++) {
        for (int64_t i = 0; i < 2; i++) {
            const int64_t row = std::max<int64_t>(0, call->lengths[b] - 1 + i), place = 2 * b + i;
            call->tokens[place] = (i ? call->root : call->previous)[b];
            call->cache_rows[place] = row;
            call->parent_rows[place] = row - 1;
            for (int64_t j = 0; j < call->nodes; j++)
                call->mask[place * call->nodes + j] = row == call->lengths[b] + j;
        }
    }
}

void place(const Place* call) {
    const int64_t all = call->batch * call->given;
    for (int64_t b = 0; b < call->batch; b++) {
        int64_t *tokens = call->tokens + b * call->tokens_step, *out = call->out + b * call->given;
        tokens[0] = call->roots[b];
        for (int64_t i = 0; i < call->children; i++)
            tokens[call->child[i]] = call->drawn_tokens[b * call->drawn + call->draw[i]];
        for (int64_t i = 0; i < call->given; i++) {
            const int64_t node = call->node[i], depth = call->depth[i];
            if (call->whole && depth > std::max<int64_t>(0, call->left[b] - 1)) tokens[node] = -1;
            out[i] = std::max<int64_t>(0, tokens[node]);
            out[all + i] = call->lengths[b] + depth;
            out[2 * all + i] = call->lengths[b] + node;
            out[3 * all + i] = call->lengths[b] + call->parent[i];
            out[4 * all + i] = call->noise_rows[b * call->noise_step + node];
        }
    }
}

void alike(const Alike* call) {
    for (int64_t b = 0; b < call->batch; b++) {
        const int64_t* tokens = call->tokens + b * call->nodes;
        int64_t *texts = call->texts + b * call->nodes, *first = call->first + b * call->given;
        for (int64_t i = 0; i < call->given; i++) {
            int64_t j = 0;
            while (texts[call->parent[j]] != texts[call->parent[i]] || tokens[call->node[j]] != tokens[call->node[i]]) j++;
            first[i] = j;
        }
        for (int64_t i = 0; i < call->given; i++) texts[call->node[i]] = call->node[first[i]];
    }
}

void copy_rows(const RowCopies* call) {
    for (int64_t b = 0; b < call->batch; b++)
        for (int64_t i = 0; i < call->count; i++)
            memcpy(call->to + b * call->to_batch + call->places[i] * call->to_row,
                   call->from + b * call->from_batch + i * call->from_row, call->row_bytes);
}

void compact(const Compaction* call) {
    std::vector<uint8_t> kept;
    for (int64_t b = 0; b < call->batch; b++) {
        const int64_t *path = call->path + b * call->path_length, length = call->length[b];
        int64_t stays = 0;  // nodes that are in place already
        while (stays < length && path[stays + 1] == stays + 1) stays++;
        if (stays == length) continue;
        for (const Rows* cache = call->cache; cache < call->cache + call->caches; cache++) {
            kept.resize((length - stays) * cache->row_bytes);
            for (int64_t head = 0; head < cache->heads; head++) {
                uint8_t* rows = cache->first + b * cache->batch_stride + head * cache->head_stride +
                                call->prefix[b] * cache->row_stride;
                for (int64_t j = stays; j < length; j++)  // all are read before any is written
                    memcpy(&kept[(j - stays) * cache->row_bytes], rows + path[j + 1] * cache->row_stride, cache->row_bytes);
                for (int64_t j = stays; j < length; j++)
                    memcpy(rows + (j + 1) * cache->row_stride, &kept[(j - stays) * cache->row_bytes], cache->row_bytes);
            }
        }
    }
}

void commit(const Commit* call) {
    for (int64_t b = 0; b < call->batch; b++) commit_one(*call, b);
}
}
