// The forward pass of a Llama-family model over tree nodes on a CPU, in one call: what `heavypath.speculative.models.llama`
// does with PyTorch's operations. Threads split the blocks of each product, and wait for each other between operations.
// The same of an EAGLE head over its entries, which are given hidden states beside their tokens: `drafts.heads.draft`.

#include <omp.h>

#include "attention.h"
#include "norms.h"

namespace heavypath {

template <typename Number>
struct Layer {
    Norm<Number> norm, mlp_norm, query_norm, key_norm;
    Norm<Number> beside;         // of x, where attention reads [norm(embedding); beside(x)]; else no weight
    Weight<Number> project;      // q, k and v
    Weight<Number> mix;
    Weight<Number> gate_and_up;  // in each block, BLOCK / 2 gates and as many of up
    Weight<Number> down;
    double scaling;
    int64_t window;        // 0 for none
    int64_t keeps_normed;  // whether beside(x) takes the place of x
};

template <typename Number>
struct Model {
    int64_t layers, hidden, heads, kv_heads, head_dim, intermediate;
    const Layer<Number>* layer;
    const Number* embedding;
    int64_t vocab;            // of the logits
    const int64_t* proposed;  // the tokens that the outputs of the head are, -inf for all others; null for all in order
    int64_t given;            // columns of the given states, 0 for none
    int64_t feeds_back_normed;
    Norm<Number> norm;
    Weight<Number> head;
    Weight<Number> join;  // makes x of [embedding; given]; without blocks the given states are x
};

template <typename Number>
struct Call {
    int64_t batch, nodes;
    const int64_t* present;  // how many of the nodes there are now, in the place of `nodes`; null for all
    const int64_t *tokens, *positions, *cache_rows;  // [B, N]
    const Number* rotary;                            // [positions, 2, D], or [2, positions, 2, D] with a rope_limit
    int64_t rotary_positions, rope_limit;            // -1 for none
    Number *keys, *values;                           // [B, layers, Hkv, rows, D], with rows of all columns
    int64_t cache_size, batch_stride, layer_stride, head_stride;  // cache_size: rows
    const int64_t* lengths;  // [B], or [1] for all
    int64_t length_step;     // 1 or 0
    const uint8_t* mask;     // [B or 1, N, columns]; or null, and then
    const int64_t* ends;     // [B or 1, N], of the nodes in depth-first order, node i sees j where j <= i < ends[j]
    int64_t own_masks, columns;  // whether each sequence has its own
    const Number* given;         // [B, N, given]
    float* scratch;
    int64_t wanted;       // of how many of each sequence's last nodes there are logits and outputs
    Number* logits;       // [B, wanted, V]; null leaves the head out
    Number* outputs;      // [B, rows, H]: what entries below are given of these nodes, in their cache rows; null for none
    int64_t outputs_stride;
    Number* const* taps;  // [layers + 1] places for hidden states [B, N, H], null for those not asked for
    int64_t threads;
};

inline int64_t whole_blocks(int64_t count) { return (count + BLOCK - 1) / BLOCK * BLOCK; }

// Where the intermediate results of a call lie, in fp32.
template <typename Number>
struct Scratch {
    int64_t normed_stride, projected_stride, mixed_stride, gated_stride, query_stride, room;
    float *hidden, *normed, *projected, *mixed, *gated, *own;
    int64_t own_floats, floats;

    Scratch(const Model<Number>& m, const Call<Number>& c) {
        const int64_t rows = c.batch * c.nodes;
        normed_stride = m.hidden + m.given;
        projected_stride = whole_blocks((m.heads + 2 * m.kv_heads) * m.head_dim);
        mixed_stride = m.heads * m.head_dim, gated_stride = whole_blocks(m.intermediate);
        query_stride = (m.head_dim + WIDTH - 1) / WIDTH * WIDTH;
        room = attention_room(c.cache_size + c.columns, m.head_dim);
        own_floats = (room + QUERIES * query_stride + (QUERIES * c.columns) / 4 + 16 + 15) / 16 * 16;
        float* next = c.scratch;
        auto take = [&](int64_t count) {
            float* taken = next;
            next += (count + 15) / 16 * 16;
            return taken;
        };
        hidden = take(rows * m.hidden), normed = take(rows * normed_stride), projected = take(rows * projected_stride);
        mixed = take(rows * mixed_stride), gated = take(rows * gated_stride), own = take(c.threads * own_floats);
        floats = next - c.scratch;
    }
};

// Turn a head [D] by cosine and sine [2, D], the sine with the signs of rotate_half.
template <typename Number>
void turn(float* x, const Number* turns, int64_t width) {
    const Number* sines = turns + width;
    const int64_t half = width / 2;
    for (int64_t i = 0; i < half; i += WIDTH) {
        const int64_t left = half - i;
        const Floats low = load(x + i, left), high = load(x + half + i, left);
        const Floats new_low = rounded<Number>(low * load(turns + i, left)) + rounded<Number>(high * load(sines + i, left));
        const Floats new_high = rounded<Number>(high * load(turns + half + i, left)) +
                                rounded<Number>(low * load(sines + half + i, left));
        store(x + i, rounded<Number>(new_low), left);
        store(x + half + i, rounded<Number>(new_high), left);
    }
}

template <typename Number>
struct Pass {
    const Model<Number>& m;
    const Call<Number>& c;
    const Scratch<Number>& s;
    const int64_t rows = c.batch * c.nodes;
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();

    int64_t begin_of(int64_t count) const { return count * thread / threads; }
    int64_t end_of(int64_t count) const { return count * (thread + 1) / threads; }

    template <typename Finish>
    void product(const Weight<Number>& weight, const float* x, int64_t stride, int64_t rows, Finish finish) const {
        multiply(weight, begin_of(weight.count()), end_of(weight.count()), x, stride, rows, finish);
#pragma omp barrier
    }

    // hidden += product
    void add_product(const Weight<Number>& weight, const float* x, int64_t stride) const {
        product(weight, x, stride, rows, [&](int64_t row, int64_t first, const float* sums) {
            float* to = s.hidden + row * m.hidden + first;
            const int64_t count = std::min<int64_t>(BLOCK, m.hidden - first);
            for (int64_t i = 0; i < count; i += WIDTH) {
                const Floats added = rounded<Number>(load(sums + i));
                store(to + i, rounded<Number>(load(to + i, count - i) + added), count - i);
            }
        });
    }

    void norm(const Norm<Number>& norm) const {
        for (int64_t row = begin_of(rows), end = end_of(rows); row < end; row++)
            normalize(s.hidden + row * m.hidden, m.hidden, norm, s.normed + row * s.normed_stride);
#pragma omp barrier
    }

    // Rotary embedding, in place, and the new rows of the cache.
    void rotate_and_store(const Layer<Number>& layer, int64_t index) const {
        const int64_t width = m.head_dim;
        for (int64_t row = begin_of(rows), end = end_of(rows); row < end; row++) {
            const int64_t sequence = row / c.nodes;
            const Number* rotary = c.rotary;
            if (c.rope_limit >= 0) {  // the largest position of a text decides
                const int64_t* positions = c.positions + sequence * c.nodes;
                if (*std::max_element(positions, positions + c.nodes) >= c.rope_limit)
                    rotary += c.rotary_positions * 2 * width;
            }
            rotary += c.positions[row] * 2 * width;
            float* head = s.projected + row * s.projected_stride;
            for (int64_t h = 0; h < m.heads + 2 * m.kv_heads; h++, head += width) {
                const bool is_query = h < m.heads, is_value = h >= m.heads + m.kv_heads;
                const Norm<Number>& norm = is_query ? layer.query_norm : layer.key_norm;
                if (!is_value) {
                    if (norm.weight) normalize(head, width, norm, head);
                    turn(head, rotary, width);
                }
                if (is_query) continue;
                Number* to = (is_value ? c.values : c.keys) + sequence * c.batch_stride + index * c.layer_stride +
                             (h - m.heads) % m.kv_heads * c.head_stride + c.cache_rows[row] * width;
                for (int64_t i = 0; i < width; i += WIDTH) store(to + i, load(head + i, width - i), width - i);
            }
        }
#pragma omp barrier
    }

    // Write which columns a node sees, and return the first row of the prefix that it sees.
    int64_t sees(const Layer<Number>& layer, int64_t sequence, int64_t node, int64_t length, uint8_t* own) const {
        const int64_t own_mask = c.own_masks ? sequence : 0;
        const int64_t* ends = c.ends + own_mask * c.columns;
        const uint8_t* mask = c.mask + (own_mask * c.nodes + node) * c.columns;
        int64_t seen = 0;
        for (int64_t j = c.columns - 1; j >= 0; j--) {
            own[j] = c.mask ? mask[j] : j <= node && node < ends[j];
            if (layer.window > 0 && own[j]) own[j] = seen++ < layer.window;
        }
        // A window holds the nearest of the nodes and, where that is not all of it, the last rows of the prefix.
        return layer.window > 0 ? std::max<int64_t>(0, length - std::max<int64_t>(0, layer.window - seen)) : 0;
    }

    void attention(const Layer<Number>& layer, int64_t index) const {
        const int64_t group = m.heads / m.kv_heads, queries = group * c.nodes, width = m.head_dim;
        const int64_t parts = (queries + QUERIES - 1) / QUERIES, items = c.batch * m.kv_heads * parts;
        float* room = s.own + thread * s.own_floats;
        float* scaled = room + s.room;
        uint8_t* visible = reinterpret_cast<uint8_t*>(scaled + QUERIES * s.query_stride);
        for (int64_t item = begin_of(items), end = end_of(items); item < end; item++) {
            const int64_t part = item % parts, kv_head = item / parts % m.kv_heads, sequence = item / parts / m.kv_heads;
            const int64_t length = c.lengths[sequence * c.length_step];
            const int64_t first = queries * part / parts, count = queries * (part + 1) / parts - first;
            Sight sights[QUERIES];
            float* out[QUERIES];
            for (int64_t q = 0; q < count; q++) {
                const int64_t node = (first + q) / group, head = kv_head * group + (first + q) % group;
                const int64_t row = sequence * c.nodes + node;
                const float* from = s.projected + row * s.projected_stride + head * width;
                for (int64_t i = 0; i < width; i += WIDTH)
                    store(scaled + q * s.query_stride + i, load(from + i, width - i) * float(layer.scaling));
                out[q] = s.mixed + row * s.mixed_stride + head * width;
                uint8_t* own = visible + q * c.columns;
                sights[q] = {sees(layer, sequence, node, length, own), own};
            }
            const int64_t place = sequence * c.batch_stride + index * c.layer_stride + kv_head * c.head_stride;
            attend<Number>(count, scaled, s.query_stride, sights, c.keys + place, c.values + place, width, length, c.columns,
                           room, out);
        }
#pragma omp barrier
    }

    void tap(int64_t number, const float* states) const {
        if (!c.taps || !c.taps[number]) return;
        for (int64_t row = begin_of(rows), end = end_of(rows); row < end; row++)
            convert(states + row * m.hidden, m.hidden, c.taps[number] + row * m.hidden);
    }

    void embed(int64_t row, float* to) const { convert(m.embedding + c.tokens[row] * m.hidden, m.hidden, to); }

    // x of each row: the token's embedding, or what a head makes of the given states.
    void enter() const {
        const bool joins = m.join.blocks;
        for (int64_t row = begin_of(rows), end = end_of(rows); row < end; row++) {
            float *x = s.hidden + row * m.hidden, *pair = s.normed + row * s.normed_stride;
            if (!m.given || joins) embed(row, joins ? pair : x);
            if (m.given) convert(c.given + row * m.given, m.given, joins ? pair + m.hidden : x);
        }
        // A thread norms the rows that it has embedded, so no barrier is needed here.
        if (!joins) return;
#pragma omp barrier
        product(m.join, s.normed, s.normed_stride, rows, [&](int64_t row, int64_t first, const float* sums) {
            const int64_t count = std::min<int64_t>(BLOCK, m.hidden - first);
            for (int64_t i = 0; i < count; i += WIDTH)
                store(s.hidden + row * m.hidden + first + i, rounded<Number>(load(sums + i)), count - i);
        });
    }

    // What queries, keys and values are made of, in `normed`.
    void before_attention(const Layer<Number>& layer) const {
        if (!layer.beside.weight) return norm(layer.norm);
        for (int64_t row = begin_of(rows), end = end_of(rows); row < end; row++) {
            float *x = s.hidden + row * m.hidden, *pair = s.normed + row * s.normed_stride;
            embed(row, pair);
            normalize(pair, m.hidden, layer.norm, pair);
            normalize(x, m.hidden, layer.beside, pair + m.hidden);
            if (layer.keeps_normed) memcpy(x, pair + m.hidden, sizeof(float) * m.hidden);
        }
#pragma omp barrier
    }

    // The last norm of the rows whose logits are wanted, side by side, and what entries below are given of them.
    void leave() const {
        const int64_t count = c.batch * c.wanted;
        for (int64_t row = begin_of(count), end = end_of(count); row < end; row++) {
            const int64_t sequence = row / c.wanted, from = (sequence + 1) * c.nodes - c.wanted + row % c.wanted;
            const float* x = s.hidden + from * m.hidden;
            float* normed = s.normed + row * s.normed_stride;
            normalize(x, m.hidden, m.norm, normed);
            if (c.outputs)
                convert(m.feeds_back_normed ? normed : x, m.hidden,
                        c.outputs + sequence * c.outputs_stride + c.cache_rows[from] * m.hidden);
            for (int64_t v = 0; c.logits && m.proposed && v < m.vocab; v += WIDTH)
                store(c.logits + row * m.vocab + v, all_of(-INFINITY), m.vocab - v);
        }
#pragma omp barrier
    }

    void run() const {
        enter();
        for (int64_t index = 0; index < m.layers; index++) {
            const Layer<Number>& layer = m.layer[index];
            tap(index, s.hidden);
            before_attention(layer);
            product(layer.project, s.normed, s.normed_stride, rows, [&](int64_t row, int64_t first, const float* sums) {
                for (int64_t i = 0; i < BLOCK; i += WIDTH)
                    store(s.projected + row * s.projected_stride + first + i, rounded<Number>(load(sums + i)));
            });
            rotate_and_store(layer, index);
            attention(layer, index);
            add_product(layer.mix, s.mixed, s.mixed_stride);
            norm(layer.mlp_norm);
            product(layer.gate_and_up, s.normed, s.normed_stride, rows, [&](int64_t row, int64_t first, const float* sums) {
                for (int64_t i = 0; i < BLOCK / 2; i += WIDTH) {
                    const Floats gate = rounded<Number>(load(sums + i)), up = rounded<Number>(load(sums + BLOCK / 2 + i));
                    const Floats gated = rounded<Number>(gate / (1.0f + exponential(-gate)));
                    store(s.gated + row * s.gated_stride + first / 2 + i, rounded<Number>(gated * up));
                }
            });
            add_product(layer.down, s.gated, s.gated_stride);
        }
        if (!c.logits && !c.outputs && !(c.taps && c.taps[m.layers])) return;
        leave();
        tap(m.layers, s.normed);
        if (!c.logits) return;
        product(m.head, s.normed, s.normed_stride, c.batch * c.wanted, [&](int64_t row, int64_t first, const float* sums) {
            const int64_t count = std::min<int64_t>(BLOCK, m.head.outputs - first);
            Number* logits = c.logits + row * m.vocab;
            if (!m.proposed) return convert(sums, count, logits + first);
            Number numbers[BLOCK];
            convert(sums, BLOCK, numbers);
            for (int64_t i = 0; i < count; i++) logits[m.proposed[first + i]] = numbers[i];
        });
    }
};

template <typename Number>
void run(const Model<Number>& model, Call<Number> call) {
    if (call.present) call.nodes = *call.present;
    const Scratch<Number> scratch(model, call);
#pragma omp parallel num_threads(call.threads)
    Pass<Number>{model, call, scratch}.run();
}

template <typename Number>
void product(const Weight<Number>& weight, const float* x, int64_t rows, Number* y, int64_t threads) {
#pragma omp parallel num_threads(threads)
    {
        const int64_t thread = omp_get_thread_num(), all = omp_get_num_threads(), count = weight.count();
        multiply(weight, count * thread / all, count * (thread + 1) / all, x, weight.columns, rows,
                 [&](int64_t row, int64_t first, const float* sums) {
                     convert(sums, std::min<int64_t>(BLOCK, weight.outputs - first), y + row * weight.outputs + first);
                 });
    }
}

}  // namespace heavypath

using namespace heavypath;

extern "C" {
int64_t block() { return BLOCK; }
int64_t parts() { return PARTS; }
int64_t tiles() { return has_tiles(); }

// y [rows, outputs] = x [rows, columns] by a weight, + its bias.
void product_fp32(const Weight<float>* weight, const float* x, int64_t rows, float* y, int64_t threads) {
    product(*weight, x, rows, y, threads);
}
void product_bf16(const Weight<BFloat>* weight, const float* x, int64_t rows, BFloat* y, int64_t threads) {
    product(*weight, x, rows, y, threads);
}

// Floats that a call needs as its scratch.
int64_t llama_scratch(const Model<float>* model, const Call<float>* call) {
    return Scratch<float>(*model, *call).floats;
}
void llama_fp32(const Model<float>* model, const Call<float>* call) { run(*model, *call); }
void llama_bf16(const Model<BFloat>* model, const Call<BFloat>* call) { run(*model, *call); }
}
