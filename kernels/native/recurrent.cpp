// Layers with a recurrent state over the nodes of a tree: what the references of `heavypath.kernels.recurrent` do.
//
// A head's part of the state is read once for all nodes. Then each node, after its ancestors, takes of each of them
//
//     a = sum over d of k[i, d] k[j, d] e^(G[i, d] - G[j, d])        p likewise with q[i]
//     u[i] = beta[i] (v[i] - e^G[i] k[i] S0 - sum over j of a u[j])      out[i] = e^G[i] q[i] S0 + sum over j of p u[j]
//
// j is above i, and in `out` also i itself. G is that of the node's parent plus its own gate. Pairs that do not see each
// other cost nothing. Where a head has one gate for all columns, its exponential is a factor of the sum.

#include <vector>

#include "products.h"

namespace heavypath {

struct TreeRule {
    int64_t batch, nodes, before, heads, key_heads, key_columns, columns;
    int64_t gates;            // of a head: 1, or one for each key column
    int64_t delta;            // whether it is a delta rule: with normalised keys, and u as above; else u is the value
    const float *query, *key;          // [B, nodes, key_heads, key_columns]
    const float* earlier_key;          // [B, before, key_heads, key_columns]
    const float *value, *earlier_update;  // [B, nodes, heads, columns]; [B, before, heads, columns]
    const float* beta;                 // [B, nodes, heads]; null unless it is a delta rule
    const float* gate;                 // [B, nodes, heads, gates]
    double* totals;                    // [B, before + nodes, heads, gates]: G, of which the first `before` are given
    const uint8_t* mask;               // [B, nodes, before + nodes]
    const float* state;                // [B, heads, key_columns, columns]
    float *out, *update;               // [B, nodes, heads, columns]
    int64_t threads;
};

inline int64_t in_vectors(int64_t numbers) { return (numbers + WIDTH - 1) / WIDTH * WIDTH; }

// A row of queries or keys, with zeros behind it up to a whole vector.
inline void copy_row(const float* from, int64_t columns, bool normalised, float factor, float* to) {
    Floats squares = {};
    for (int64_t c = 0; c < columns; c += WIDTH) {
        const Floats some = load(from + c, columns - c);
        squares += some * some;
        store(to + c, some);
    }
    const float scale = normalised ? factor / std::sqrt(sum(squares) + 1e-6f) : 1.0f;
    for (int64_t c = 0; c < columns; c += WIDTH) store(to + c, load(to + c) * scale);
}

typedef double Doubles __attribute__((vector_size(8 * WIDTH)));

// e^(a - b) of the first `count` of WIDTH gates, and of those behind them 1.
inline Floats fade(const double* a, const double* b, int64_t count) {
    Doubles of_a = {}, of_b = {};
    if (count >= WIDTH)
        memcpy(&of_a, a, sizeof of_a), memcpy(&of_b, b, sizeof of_b);
    else
        memcpy(&of_a, a, sizeof(double) * count), memcpy(&of_b, b, sizeof(double) * count);
    return exponential(__builtin_convertvector(of_a - of_b, Floats));
}

inline void add_row(float factor, const float* row, int64_t columns, float* to) {
    for (int64_t c = 0; c < columns; c += WIDTH)
        store(to + c, load(to + c, columns - c) + factor * load(row + c, columns - c), columns - c);
}

void rule_of_head(const TreeRule& t, int64_t b, int64_t h) {
    const int64_t all = t.before + t.nodes, wide = in_vectors(t.key_columns), kh = h / (t.heads / t.key_heads);
    const float factor = 1 / std::sqrt(float(t.key_columns));
    const std::vector<double> nothing(t.gates);
    std::vector<float> queries(t.nodes * wide), keys(all * wide), faded(2 * t.nodes * wide);
    auto totals_of = [&](int64_t node) { return t.totals + ((b * all + node) * t.heads + h) * t.gates; };
    for (int64_t j = 0; j < all; j++) {
        const bool old = j < t.before;
        const int64_t row = (old ? b * t.before + j : b * t.nodes + j - t.before) * t.key_heads + kh;
        copy_row((old ? t.earlier_key : t.key) + row * t.key_columns, t.key_columns, t.delta, 1, &keys[j * wide]);
    }
    for (int64_t i = 0; i < t.nodes; i++) {
        const int64_t row = (b * t.nodes + i) * t.key_heads + kh;
        copy_row(t.query + row * t.key_columns, t.key_columns, t.delta, factor, &queries[i * wide]);
        const uint8_t* sees = t.mask + (b * t.nodes + i) * all;
        int64_t parent = t.before + i - 1;
        while (parent >= 0 && !sees[parent]) parent--;
        double* total = totals_of(t.before + i);
        for (int64_t g = 0; g < t.gates; g++)
            total[g] = t.gate[((b * t.nodes + i) * t.heads + h) * t.gates + g] + (parent < 0 ? 0 : totals_of(parent)[g]);
        const Floats lead = all_of(fade(total, nothing.data(), 1)[0]);
        for (int64_t c = 0; c < t.key_columns; c += WIDTH) {
            const Floats kept = t.gates > 1 ? fade(total + c, nothing.data() + c, t.key_columns - c) : lead;
            store(&faded[i * wide + c], load(&queries[i * wide + c]) * kept);
            store(&faded[(t.nodes + i) * wide + c], load(&keys[(t.before + i) * wide + c]) * kept);
        }
    }

    auto row_of = [&](float* rows, int64_t i) { return rows + ((b * t.nodes + i) * t.heads + h) * t.columns; };
    std::vector<float> block(t.key_columns * BLOCK), sums, right(t.nodes * t.columns);
    const float* state = t.state + (b * t.heads + h) * t.key_columns * t.columns;
    const int64_t rows = t.delta ? 2 * t.nodes : t.nodes;
    for (int64_t first = 0; first < t.columns; first += BLOCK) {
        const int64_t width = std::min<int64_t>(BLOCK, t.columns - first);
        for (int64_t k = 0; k < t.key_columns; k++) {
            const float* from = state + k * t.columns + first;
            std::copy(from, from + width, &block[k * BLOCK]);
        }
        sums.assign(rows * BLOCK, 0);
        const Piece<float> whole{block.data(), BLOCK, PARTS * BLOCK, t.key_columns};
        add_groups(rows, faded.data(), wide, whole, sums.data());
        for (int64_t i = 0; i < rows; i++) {
            float* to = i < t.nodes ? row_of(t.out, i) : &right[(i - t.nodes) * t.columns];
            std::copy(&sums[i * BLOCK], &sums[i * BLOCK] + width, to + first);
        }
    }

    for (int64_t i = 0; i < t.nodes; i++) {
        const uint8_t* sees = t.mask + (b * t.nodes + i) * all;
        const double* own = totals_of(t.before + i);
        float *out = row_of(t.out, i), *update = row_of(t.update, i), *read = &right[i * t.columns];
        for (int64_t j = 0; j <= t.before + i; j++) {
            if (!sees[j]) continue;
            const bool old = j < t.before, self = j == t.before + i;
            Floats by_key = {}, by_query = {};
            for (int64_t c = 0; c < t.key_columns; c += WIDTH) {
                Floats key = load(&keys[j * wide + c]);
                if (t.gates > 1) key *= fade(own + c, totals_of(j) + c, t.key_columns - c);
                by_query += key * load(&queries[i * wide + c]);
                by_key += key * load(&keys[(t.before + i) * wide + c]);
            }
            const float kept = t.gates > 1 ? 1.0f : fade(own, totals_of(j), 1)[0];
            if (self) {
                const float* value = t.value + ((b * t.nodes + i) * t.heads + h) * t.columns;
                const float beta = t.delta ? t.beta[(b * t.nodes + i) * t.heads + h] : 1.0f;
                for (int64_t c = 0; c < t.columns; c++) update[c] = t.delta ? beta * (value[c] - read[c]) : value[c];
            }
            const float* from = old ? t.earlier_update + ((b * t.before + j) * t.heads + h) * t.columns
                                    : row_of(t.update, j - t.before);
            if (t.delta && !self) add_row(kept * sum(by_key), from, t.columns, read);
            add_row(kept * sum(by_query), from, t.columns, out);
        }
    }
}

}  // namespace heavypath

extern "C" void tree_rule(const heavypath::TreeRule* rule) {
    const heavypath::TreeRule t = *rule;
#pragma omp parallel for schedule(static) num_threads(t.threads)
    for (int64_t each = 0; each < t.batch * t.heads; each++) rule_of_head(t, each / t.heads, each % t.heads);
}
