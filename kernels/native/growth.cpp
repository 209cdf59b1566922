// The best slots below a level of growing trees, and the tree of the best slots of all levels: what the references of
// `heavypath.kernels.trees.growing` and `assembly` do. Products that feed a sum are rounded: values that tie must tie.

#include <numeric>

#include "rows.h"

namespace heavypath {

enum By { SLOT, NODE, BEAM };

struct Grow {
    int64_t batch, first, parents, most, count, slots, depth;  // the level above is slots first .. first + parents - 1
    int64_t by, noisy, threads;
    double temperature, threshold;
    const int64_t* drawn;                                // [B, parents, most], as the next two
    const float *drawn_keys, *drawn_logprobs;
    const float* logits;                                 // [B, parents, vocab]; null where values do not take them
    int64_t batch_stride, row_stride, vocab;
    const double* lines;                                 // base, and slope `line_step` behind it; null for none
    int64_t line_step;
    const int64_t *roots, *lengths, *noise_rows, *left;  // [B]
    int64_t *slot_parents, *ranks, *depths, *tokens;     // [B, slots], in place, as the next three
    double *values, *worths, *keys;
    const uint8_t* above;                                // [B, parents, first + parents]
    int64_t above_batch, above_row;
    uint8_t* mask;                                       // [B, count, first + parents + count]
    int64_t* fed;                                        // [5, B, count]: tokens, positions, cache, parents' and noise rows
};

struct Assembly {
    int64_t batch, slots, drafted, inner, trims, most;
    int64_t nodes;                                       // becomes how many of the `most` nodes are left
    const int64_t *parents, *ranks, *depths, *tokens;    // [B, slots], as the next one
    const double* values;
    const int64_t *lengths, *noise_rows;                 // [B]
    int64_t* out;                                        // [12, B, nodes], in the order of `Assembled`; room for `most`
};

// The smaller number; NaN if one is.
inline double lower(double a, double b) { return b < a || b != b ? b : a; }

// The first `count` of `total` places by falling value, equal ones by place.
inline std::vector<int64_t> best_first(const double* values, int64_t total, int64_t count) {
    std::vector<int64_t> order(total);
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int64_t a, int64_t b) {
        return values[a] > values[b] || (values[a] == values[b] && a < b);
    });
    order.resize(count);
    return order;
}

// What a row of logits at a temperature says of its distribution.
struct Law {
    float total;     // the logarithm of the sum of exponentials
    double squares;  // the sum of squared probabilities
};

inline Law law_of(const float* x, int64_t vocab, float temperature) {
    const float largest = largest_of(x, vocab) / temperature;
    if (!std::isfinite(largest)) return {largest, 0};
    double total = 0, squares = 0;
    for (int64_t begin = 0; begin < vocab; begin += 64 * WIDTH) {
        Floats sums = {}, squared = {};
        for (int64_t v = begin, end = std::min<int64_t>(vocab, begin + 64 * WIDTH); v < end; v += WIDTH) {
            Floats weight = exponential(load(x + v, end - v) / temperature - largest);
            for (int64_t lane = end - v; lane < WIDTH; lane++) weight[lane] = 0;
            sums += weight, squared += weight * weight;
        }
        total += sum(sums), squares += sum(squared);
    }
    return {largest + float(std::log(total)), squares / (total * total)};
}

// The values of the slots below a node, each the least so far, and the worths of the children drawn there. A slot's place
// is rank * parents + parent, so that equal values go by rank, then by parent.
inline void offer_slots(const Grow& g, int64_t b, int64_t parent, Law law, double* values, double* worths) {
    const int64_t row = b * g.parents + parent, at = b * g.slots + g.first + parent;
    const int64_t* tokens = g.drawn + row * g.most;
    const float* x = g.logits ? g.logits + b * g.batch_stride + parent * g.row_stride : nullptr;
    const float temperature = g.temperature;
    const double node = g.worths[at];
    double least = g.values[at], reached = 1, drawn = 0, drawn_squares = 0;  // by and of the siblings before
    for (int64_t k = 0; k < g.most; k++) {
        float logprob = -INFINITY;
        if (g.noisy)
            logprob = g.drawn_logprobs[row * g.most + k];
        else if (tokens[k] >= 0)
            logprob = x[tokens[k]] / temperature - law.total;
        const double prob = std::exp(double(logprob)), rest = 1 - drawn, remaining = rest < 0 ? 0 : rest;
        double value = remaining, worth = lower(prob, remaining);
        if (g.lines) {
            const double base = g.lines[k], slope = g.lines[g.line_step + k], left = remaining > 0 ? remaining : 1;
            const double accept = base + apart(slope * lower(prob / left, 1));
            const double again = (law.squares - drawn_squares) / (left * left);
            const double expected = base + apart(slope * lower(again < 0 ? 0 : again, 1));
            value = remaining > 0 ? reached * expected : 0, worth = reached * accept;
            reached *= 1 - accept, drawn_squares += apart(prob * prob);
        }
        drawn += prob;
        least = lower(least, tokens[k] < 0 ? 0 : node * (g.by == NODE ? worth : value));
        const int64_t place = k * g.parents + parent;
        values[place] = least != least ? -INFINITY : least, worths[place] = node * worth;
    }
}

// Keys and log-probabilities of the children of a node of a beam, -inf for those that are not there. A child's place is
// parent * most + rank.
inline void offer_children(const Grow& g, int64_t b, int64_t parent, double* keys, double* worths) {
    const int64_t row = (b * g.parents + parent) * g.most, at = b * g.slots + g.first + parent;
    const double phi = g.worths[at], u = g.keys[at];
    for (int64_t k = 0; k < g.most; k++) {
        const double logprob = phi + g.drawn_logprobs[row + k];
        double key = logprob;
        if (g.noisy) {
            const double below = g.drawn_keys[row + k] - g.drawn_keys[row];  // a difference of fp32
            const double rest = below > -0.69314718055994531 ? std::log(-std::expm1(below)) : std::log1p(-std::exp(below));
            const double z = u - (phi + g.drawn_keys[row + k]) + rest;
            key = u - (z < 0 ? 0 : z) - std::log1p(std::exp(-std::abs(z)));
        }
        const bool there = g.drawn[row + k] >= 0 && phi > -INFINITY;
        keys[parent * g.most + k] = !there ? -INFINITY : key != key ? INFINITY : key;
        worths[parent * g.most + k] = logprob;
    }
}

void grow_one(const Grow& g, int64_t b, const Law* laws) {
    const int64_t offered = g.parents * g.most, end = g.first + g.parents, own = b * g.slots, columns = end + g.count;
    std::vector<double> values(offered), worths(offered);
    for (int64_t parent = 0; parent < g.parents; parent++) {
        if (g.by == BEAM)
            offer_children(g, b, parent, values.data(), worths.data());
        else
            offer_slots(g, b, parent, laws ? laws[b * g.parents + parent] : Law{}, values.data(), worths.data());
    }
    const std::vector<int64_t> best = best_first(values.data(), offered, std::min(g.count, offered));
    std::vector<int64_t> children(g.by == BEAM ? g.parents : 0);  // of each parent, so far
    for (int64_t i = 0; i < g.count; i++) {
        int64_t parent = 0, rank = 0, token = -1;
        double value = 0, worth = -INFINITY, key = -INFINITY;
        if (g.by == BEAM) {
            const int64_t from = i < offered ? best[i] : 0, drawn = g.drawn[b * offered + from];
            if (i < offered && drawn >= 0 && g.worths[own + g.first + from / g.most] > -INFINITY)
                parent = from / g.most, token = drawn, value = 1, worth = worths[from], key = values[from];
            rank = children[parent]++;
        } else {
            parent = best[i] % g.parents, rank = best[i] / g.parents;
            token = g.drawn[(b * g.parents + parent) * g.most + rank];
            value = values[best[i]], worth = key = worths[best[i]];
        }
        const bool there = value > 0 && value >= g.threshold && g.depth < g.left[b];
        const int64_t slot = end + i, at = own + slot, all = g.batch * g.count, out = b * g.count + i;
        g.slot_parents[at] = g.first + parent, g.ranks[at] = rank, g.depths[at] = g.depth;
        g.tokens[at] = there ? token : -1, g.values[at] = there ? value : 0, g.worths[at] = worth, g.keys[at] = key;
        g.fed[out] = std::max<int64_t>(0, g.tokens[at]);
        g.fed[all + out] = g.lengths[b] + g.depth;
        g.fed[2 * all + out] = g.lengths[b] + slot;
        g.fed[3 * all + out] = g.lengths[b] + g.first + parent;
        g.fed[4 * all + out] = g.noise_rows[b] + slot;
        uint8_t* mask = g.mask + out * columns;
        memcpy(mask, g.above + b * g.above_batch + parent * g.above_row, end);
        memset(mask + end, 0, g.count);
        mask[slot] = 1;
    }
}

// The nodes of a tree in heavy-path order: place[node], and the size of each subtree.
inline void heavy_path_order(
    const std::vector<int64_t>& parent, const std::vector<int64_t>& rank, std::vector<int64_t>& place,
    std::vector<int64_t>& size) {
    const int64_t nodes = parent.size();
    std::fill(size.begin(), size.end(), 1);
    for (int64_t node = nodes - 1; node > 0; node--)
        if (parent[node] >= 0) size[parent[node]] += size[node];
    std::vector<int64_t> visit(nodes);  // by parent; siblings by falling size, then by rank
    std::iota(visit.begin(), visit.end(), 0);
    std::sort(visit.begin() + 1, visit.end(), [&](int64_t a, int64_t b) {
        if (parent[a] != parent[b]) return parent[a] < parent[b];
        if (size[a] != size[b]) return size[a] > size[b];
        return rank[a] != rank[b] ? rank[a] < rank[b] : a < b;
    });
    int64_t next = 0;  // the place of the next sibling; the root and absent nodes are the first family
    for (int64_t i = 0; i < nodes; i++) {
        const int64_t node = visit[i];
        if (i > 0 && parent[node] != parent[visit[i - 1]]) next = place[parent[node]] + 1;
        place[node] = next, next += size[node];
    }
}

void assemble_all(Assembly& a) {
    const int64_t most = a.most, all = a.batch * most;
    std::vector<int64_t> made(4 * all);  // slots, parents, ranks and subtrees' ends of all nodes
    std::vector<int64_t> number(a.drafted), parent(most), rank(most), place(most), size(most);
    int64_t largest = 0;
    for (int64_t b = 0; b < a.batch; b++) {
        const int64_t own = b * a.slots;
        std::vector<int64_t> kept = best_first(a.values + own, a.drafted, most);
        std::sort(kept.begin(), kept.end());
        std::fill(number.begin(), number.end(), 0);
        int64_t present = 0;
        for (int64_t node = 0; node < most; node++) {
            const int64_t slot = own + kept[node];
            const bool below = a.parents[slot] >= 0 && a.tokens[slot] >= 0;
            number[kept[node]] = node;
            parent[node] = below ? number[a.parents[slot]] : -1, rank[node] = below ? a.ranks[slot] : 0;
            present += a.tokens[slot] >= 0;
        }
        largest = std::max(largest, present);
        heavy_path_order(parent, rank, place, size);
        for (int64_t node = 0; node < most; node++) {
            int64_t* to = made.data() + b * most + place[node];
            to[0] = kept[node], to[all] = parent[node] < 0 ? -1 : place[parent[node]];
            to[2 * all] = rank[node], to[3 * all] = place[node] + size[node];
        }
    }
    a.nodes = a.trims ? largest : most;  // absent nodes come last
    for (int64_t b = 0; b < a.batch; b++) {
        for (int64_t node = 0; node < a.nodes; node++) {
            const int64_t* from = made.data() + b * most + node;
            const int64_t slot = from[0], token = a.tokens[b * a.slots + slot], length = a.lengths[b];
            const bool absent = from[all] < 0 && node > 0;
            const int64_t above = absent ? node - 1 : from[all], depth = absent ? 0 : a.depths[b * a.slots + slot];
            const int64_t inner = std::min(slot, a.inner - 1) + b * a.inner, fed = std::max<int64_t>(0, token);
            const int64_t fields[12] = {
                token, above, from[2 * all], depth, from[3 * all], slot, inner,
                fed, length + depth, length + node, length + above, a.noise_rows[b] + slot,
            };
            for (int64_t i = 0; i < 12; i++) a.out[(i * a.batch + b) * a.nodes + node] = fields[i];
        }
    }
}

}  // namespace heavypath

using namespace heavypath;

extern "C" void grow(const Grow* call) {
    const Grow& g = *call;
    for (int64_t b = 0; b < g.batch && g.first == 0; b++) {
        const int64_t root = b * g.slots;
        g.slot_parents[root] = -1, g.ranks[root] = 0, g.depths[root] = 0, g.tokens[root] = g.roots[b];
        g.values[root] = INFINITY, g.worths[root] = g.by != BEAM, g.keys[root] = 0;
    }
    const int64_t rows = g.logits ? g.batch * g.parents : 0;
    std::vector<Law> laws(rows);
    const bool worth_it = rows * g.vocab > 1 << 15;
#pragma omp parallel for num_threads(worth_it ? g.threads : 1)
    for (int64_t r = 0; r < rows; r++) {
        const float* x = g.logits + r / g.parents * g.batch_stride + r % g.parents * g.row_stride;
        laws[r] = law_of(x, g.vocab, g.temperature);
    }
    for (int64_t b = 0; b < g.batch; b++) grow_one(g, b, rows ? laws.data() : nullptr);
}

extern "C" void assemble(Assembly* call) { assemble_all(*call); }
