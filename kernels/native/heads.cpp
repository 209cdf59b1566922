// What trained heads do beside the pass of llama.cpp: the entries of an EAGLE head, what it keeps of the target's hidden
// states, and Medusa heads. The references are in `heavypath.speculative.drafts`: `heads.draft` and `medusa`.

#include <omp.h>

#include <algorithm>

#include "norms.h"
#include "products.h"

namespace heavypath {

// Entries of all that is new in the texts. Row i of a sequence is the entry of tokens i and i + 1.
struct RootEntries {
    int64_t batch, most, rows, row_bytes;          // rows: of the cache; bytes of a row of features, and of outputs
    const int64_t *root, *lengths, *drafted;       // [B]; drafted is null for 0
    int64_t* known;                                // [B], in place
    const int64_t* text;                           // [B, rows]
    const uint8_t *features, *outputs;             // [B, rows, F]
    int64_t text_step, features_step, outputs_step;  // from one sequence to the next, of the last two in bytes
    int64_t* present;                              // becomes n, the entries of each sequence
    int64_t *tokens, *entry_rows, *prefix;         // [B, n] twice; [B]
    uint8_t *mask, *given;                         // [B, n, most], [B, n, F]
};

inline void enter_roots(const RootEntries& e) {
    int64_t count = 1;
    for (int64_t b = 0; b < e.batch; b++) {
        if (e.drafted && e.drafted[b] > 0) continue;
        count = std::max(count, std::min(e.most, e.lengths[b] - e.known[b]));
        e.known[b] = e.lengths[b];
    }
    *e.present = count;
    for (int64_t b = 0; b < e.batch; b++) {
        const bool drafted = e.drafted && e.drafted[b] > 0;
        const int64_t length = e.lengths[b], first = drafted ? std::max<int64_t>(0, length - 1) : 0;
        e.prefix[b] = std::min(std::max(first, length - count), e.rows - e.most);
        for (int64_t i = 0; i < count; i++) {
            // Where there are not so many rows of entries, the first of them is made several times.
            const int64_t row = std::max(first, length - count + i), place = b * count + i;
            e.entry_rows[place] = row;
            e.tokens[place] = row + 1 < length ? e.text[b * e.text_step + row + 1] : e.root[b];
            for (int64_t j = 0; j < e.most; j++) e.mask[place * e.most + j] = e.prefix[b] + j <= row;
            uint8_t* given = e.given + place * e.row_bytes;
            if (drafted)
                memcpy(given, e.outputs + b * e.outputs_step + std::max<int64_t>(0, row - 1) * e.row_bytes, e.row_bytes);
            else if (length > 0)
                memcpy(given, e.features + b * e.features_step + row * e.row_bytes, e.row_bytes);
            else
                memset(given, 0, e.row_bytes);  // nothing is before a text of one token
        }
    }
}

// Entries of drafted nodes, which are given their parents' outputs.
struct NodeEntries {
    int64_t batch, count, row_bytes;
    const int64_t *lengths, *cache_rows, *positions, *parent_rows;  // [B]; of the nodes [B, n]
    const uint8_t* outputs;                                         // [B, rows, H]
    int64_t outputs_step;                                           // in bytes
    int64_t *prefix, *rows, *places;                                // [B]; [B, n] twice
    uint8_t* given;                                                 // [B, n, H]
};

inline void enter_nodes(const NodeEntries& e) {
    for (int64_t b = 0; b < e.batch; b++) {
        e.prefix[b] = std::max<int64_t>(0, e.lengths[b] - 1);  // the root's row
        const int64_t shift = e.lengths[b] - e.prefix[b];
        for (int64_t i = b * e.count; i < (b + 1) * e.count; i++) {
            e.rows[i] = e.cache_rows[i] - shift, e.places[i] = e.positions[i] - shift;
            const int64_t parent = e.parent_rows[i] - shift;
            memcpy(e.given + i * e.row_bytes, e.outputs + b * e.outputs_step + parent * e.row_bytes, e.row_bytes);
        }
    }
}

// Hidden states of tokens, and what is kept of them: features[b, row] = fc(joined([norm_0(tap_0); norm_1(tap_1); ...])).
template <typename Number>
struct Keep {
    int64_t batch, nodes, taps, width, columns;  // columns: of features
    const Number* const* tap;                    // [taps] of [B, N, width]
    const Norm<Number>* norm;                    // [taps]
    Norm<Number> joined;
    Weight<Number> fc;                           // without blocks: the states themselves
    const int64_t *tokens, *cache_rows;          // [B, N]
    Number* features;
    int64_t features_step;
    int64_t* text;                               // [B, rows], in which the tokens are kept; null for nowhere
    int64_t text_step;
    float* scratch;                              // [B, N, taps * width]
    int64_t threads;
};

template <typename Number>
void keep(const Keep<Number>& k) {
    const int64_t rows = k.batch * k.nodes, read = k.taps * k.width;
    auto place = [&](int64_t row) { return k.features + row / k.nodes * k.features_step + k.cache_rows[row] * k.columns; };
    for (int64_t row = 0; row < rows && k.text; row++) k.text[row / k.nodes * k.text_step + k.cache_rows[row]] = k.tokens[row];
#pragma omp parallel num_threads(k.threads)
    {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        for (int64_t row = rows * thread / threads; row < rows * (thread + 1) / threads; row++) {
            float* x = k.scratch + row * read;
            for (int64_t t = 0; t < k.taps; t++) {
                convert(k.tap[t] + row * k.width, k.width, x + t * k.width);
                normalize(x + t * k.width, k.width, k.norm[t], x + t * k.width);
            }
            normalize(x, read, k.joined, x);
            if (!k.fc.blocks) convert(x, read, place(row));
        }
#pragma omp barrier
        const int64_t count = k.fc.blocks ? k.fc.count() : 0;
        multiply(k.fc, count * thread / threads, count * (thread + 1) / threads, k.scratch, read, rows,
                 [&](int64_t row, int64_t first, const float* sums) {
                     convert(sums, std::min<int64_t>(BLOCK, k.columns - first), place(row) + first);
                 });
    }
}

// Medusa heads of the hidden state before each root: x += silu(layer(x)) for each layer, then logits = lm_head(x).
template <typename Number>
struct Medusa {
    int64_t batch, heads, layers, width, vocab;
    const Weight<Number>* layer;    // [layers, all heads]: `layer_step` from one layer to the next
    int64_t layer_step;
    const Weight<Number>* lm_head;  // of each head, or of the target where lm_head_step is 0
    int64_t lm_head_step;
    const int64_t* lengths;         // [B]
    const Number* states;           // [B, rows, width]
    int64_t states_step;
    Number* logits;                 // [B, any, V]
    int64_t logits_step;
    float* scratch;                 // [2, heads, B, width]
    int64_t threads;
};

template <typename Number>
void medusa(const Medusa<Number>& m) {
    const int64_t rows = m.heads * m.batch, size = rows * m.width;
#pragma omp parallel num_threads(m.threads)
    {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        for (int64_t row = rows * thread / threads; row < rows * (thread + 1) / threads; row++) {
            const int64_t b = row % m.batch, before = m.lengths[b] - 1;
            float* x = m.scratch + row * m.width;
            if (before >= 0)
                convert(m.states + b * m.states_step + before * m.width, m.width, x);
            else
                std::fill(x, x + m.width, 0.0f);  // nothing is before a text of one token
        }
#pragma omp barrier
        // Each product is of the rows of one head; a thread has whole blocks of some of them.
        auto products = [&](const Weight<Number>* weights, int64_t step, const float* x, auto finish) {
            const int64_t count = weights->count(), all = m.heads * count;
            const int64_t begin = all * thread / threads, end = all * (thread + 1) / threads;
            for (int64_t head = begin / count; head * count < end; head++) {
                const int64_t first_block = std::max<int64_t>(0, begin - head * count);
                const int64_t end_block = std::min(count, end - head * count);
                const float* rows_of_head = x + head * m.batch * m.width;
                multiply(weights[head * step], first_block, end_block, rows_of_head, m.width, m.batch,
                         [&](int64_t row, int64_t first, const float* sums) { finish(head, row, first, sums); });
            }
#pragma omp barrier
        };
        float *x = m.scratch, *next = m.scratch + size;
        for (int64_t layer = 0; layer < m.layers; layer++, std::swap(x, next)) {
            products(m.layer + layer * m.layer_step, 1, x, [&](int64_t head, int64_t row, int64_t first, const float* sums) {
                const int64_t at = (head * m.batch + row) * m.width + first, count = std::min<int64_t>(BLOCK, m.width - first);
                for (int64_t i = 0; i < count; i += WIDTH) {
                    const Floats inner = rounded<Number>(load(sums + i));
                    const Floats opened = rounded<Number>(inner / (1.0f + exponential(-inner)));
                    store(next + at + i, rounded<Number>(load(x + at + i, count - i) + opened), count - i);
                }
            });
        }
        products(m.lm_head, m.lm_head_step, x, [&](int64_t head, int64_t row, int64_t first, const float* sums) {
            Number* logits = m.logits + row * m.logits_step + head * m.vocab;
            convert(sums, std::min<int64_t>(BLOCK, m.vocab - first), logits + first);
        });
    }
}

}  // namespace heavypath

using namespace heavypath;

extern "C" {
void root_entries(const RootEntries* call) { enter_roots(*call); }
void node_entries(const NodeEntries* call) { enter_nodes(*call); }
void keep_fp32(const Keep<float>* call) { keep(*call); }
void keep_bf16(const Keep<BFloat>* call) { keep(*call); }
void medusa_fp32(const Medusa<float>* call) { medusa(*call); }
void medusa_bf16(const Medusa<BFloat>* call) { medusa(*call); }
}
