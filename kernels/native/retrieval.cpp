// Drafts that look tokens up: what followed a node's last tokens in its own text, as the plain form of
// `heavypath.speculative.drafts.lookup` says, and in a sorted corpus too, as `heavypath.kernels.retrieval` does.
//
// A cache row of a token has the M tokens before it in keys, and itself after M - 1 of these in values; -1 is before the
// text. What is proposed goes into rows of logits that are -inf elsewhere: a place there and its weight, whose logarithm
// the caller takes. Of a step's first nodes only the last is asked about: `first` is the number of the others.
//
// A text has an index: the latest place of each token, and before each place the one before it with the same token. So
// a step reads the new tokens once, and of a node the places of its own token: 4 bytes and up to M comparisons each.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace heavypath {

struct Asked {
    int64_t batch, nodes, first, longest, vocab, rows;
    int64_t step, head;                                      // of keys and values: a text's stride, where tokens begin
    const int64_t *tokens, *cache_rows, *parent_rows;        // [B, nodes]
    const int64_t* lengths;                                  // [B], of texts before their roots
    int64_t *keys, *values;                                  // [B, 1 or 2, rows, M]
    int64_t* known;                                          // [B], tokens in the index
    int32_t *latest, *earlier;                               // [B, V] and [B, rows], -1 for none
    float* out;                                              // [B, nodes - first, V]
    int64_t* places;                                         // of what is proposed, in all of out
    float* weights;
};

struct Lookup {
    Asked asked;
    int64_t shortest;
};

struct Retrieval {
    Asked asked;
    int64_t renews, size;      // whether ranges are found anew for the token before the first node
    const int32_t* followers;  // [size], see `corpus`
    const int64_t* steps;
};

constexpr size_t PLACES = 32;  // most places of a longest match that count: R of `latest`
constexpr double PRIOR = 256, LEAST = 1. / 1024, UNIT = 1 << 30;
constexpr int64_t IN_TEXT = 64, MOST = 256;

// The tokens of a node in its row: those of its parent, moved by one, and its own.
static void write_tokens(int64_t token, int64_t row, int64_t parent, int64_t longest, int64_t* keys, int64_t* values) {
    int64_t *before = keys + row * longest, *own = values + row * longest;
    for (int64_t i = 0; i < longest; i++) before[i] = parent < 0 ? -1 : values[parent * longest + i];
    for (int64_t i = 0; i + 1 < longest; i++) own[i] = before[i + 1];
    own[longest - 1] = token;
}

// Take the tokens that a text has got since the last call into its index.
static void take_in(const Asked& asked, int64_t b) {
    const int64_t* values = asked.values + b * asked.step + asked.head;
    const int64_t text = asked.lengths[b] + 1;
    int32_t *latest = asked.latest + b * asked.vocab, *earlier = asked.earlier + b * asked.rows;
    int64_t& known = asked.known[b];
    if (known > text) known = 0;
    if (known == 0) std::fill(latest, latest + asked.vocab, -1);
    for (; known < text; known++) {
        int32_t& last = latest[values[known * asked.longest + asked.longest - 1]];
        earlier[known] = last;
        last = known;
    }
}

// Calls found(token, length) for the tokens of a text after one like a node's own, the latest first: the `length` tokens
// before each are the node's last ones. It ends where found returns false.
template <typename Found>
static void each_match(const Asked& asked, int64_t b, int64_t node_row, Found found) {
    const int64_t longest = asked.longest, root = asked.lengths[b];
    const int64_t* values = asked.values + b * asked.step + asked.head;
    const int64_t* own = values + (node_row + 1) * longest - 1;  // the node's token, behind those before it
    const int32_t* earlier = asked.earlier + b * asked.rows;
    for (int64_t row = asked.latest[b * asked.vocab + *own]; row >= 0; row = earlier[row]) {
        if (row == root) continue;  // after which there is nothing yet
        const int64_t* there = values + (row + 1) * longest - 1;
        int64_t length = 1;
        while (length < longest && own[-length] >= 0 && there[-length] == own[-length]) length++;
        if (!found(there[longest], length)) return;
    }
}

static int64_t less(const int64_t* steps, int64_t size, int64_t wanted) {
    return std::lower_bound(steps, steps + size, wanted) - steps;
}

// The ranges of a row, [lo_k, hi_k) of its last k tokens, by those tokens.
static void renew(const Retrieval& call, const int64_t* tokens, int64_t* low, int64_t* high) {
    const int64_t longest = call.asked.longest;
    for (int64_t k = 0; k < longest; k++) low[k] = 0, high[k] = call.size;
    for (int64_t k = longest - 1; k >= 0; k--) {
        const int64_t token = tokens[longest - 1 - k], first = (token + 1) * call.size;
        for (int64_t i = k; i < longest; i++) {
            low[i] = token < 0 ? 0 : less(call.steps, call.size, first + low[i]);
            high[i] = token < 0 ? 0 : less(call.steps, call.size, first + high[i]);
        }
    }
}

// The ranges of a node by those of its parent's row.
static void write_ranges(const Retrieval& call, int64_t token, int64_t row, int64_t parent, int64_t* lows, int64_t* highs) {
    const int64_t longest = call.asked.longest, first = (token + 1) * call.size;
    for (int64_t k = 0; k < longest; k++) {
        const bool has = k > 0 && parent >= 0;
        const int64_t low = has ? lows[parent * longest + k - 1] : 0;
        const int64_t high = has ? highs[parent * longest + k - 1] : k == 0 ? call.size : 0;
        lows[row * longest + k] = less(call.steps, call.size, first + low);
        highs[row * longest + k] = less(call.steps, call.size, first + high);
    }
}

// Sums by token, which are zero again after `take`.
struct Sums {
    std::vector<int64_t> of, tokens;

    void add(int64_t token, int64_t weight) {
        if (weight == 0) return;
        if (of[token] == 0) tokens.push_back(token);
        of[token] += weight;
    }
};

static thread_local Sums sums;

// What followed the last tokens of one node; the law is in `followers`. Returns how many tokens.
static int64_t followers_of(const Retrieval& call, int64_t b, int64_t row, int64_t* places, float* weights, int64_t first) {
    const Asked& asked = call.asked;
    const int64_t longest = asked.longest;
    const int64_t *low = asked.keys + b * asked.step + row * longest, *high = asked.values + b * asked.step + row * longest;
    static thread_local std::vector<std::pair<int64_t, int64_t>> matches;
    std::vector<int64_t> times(longest), in_text(longest), with_shorter(longest + 1);
    matches.clear();
    each_match(asked, b, row, [&](int64_t token, int64_t length) {
        matches.emplace_back(token, length);
        times[length - 1]++;
        return true;
    });
    for (int64_t k = longest - 2; k >= 0; k--) times[k] += times[k + 1];
    double left = 1;
    for (int64_t k = longest - 1; k >= 0 && left >= LEAST; k--) {
        const int64_t n = high[k] - low[k], taken = std::max<int64_t>(std::min(n, MOST), 1);
        const double prior = PRIOR / ((k + 1) * (k + 1)), one = left / (n + IN_TEXT * times[k] + prior);
        left = one * prior;
        in_text[k] = one * IN_TEXT * UNIT;
        const int64_t weight = one * (double(n) / taken) * UNIT;
        for (int64_t i = 0; weight > 0 && i < std::min(n, MOST); i++) {
            const int64_t follower = call.followers[low[k] + (n <= MOST ? i : i * n / MOST)];
            if (follower > 0) sums.add(follower - 1, weight);
        }
    }
    for (int64_t k = 0; k < longest; k++) with_shorter[k + 1] = with_shorter[k] + in_text[k];
    for (const auto& [token, length] : matches) sums.add(token, with_shorter[length]);
    int64_t count = 0;
    for (int64_t token : sums.tokens) {
        places[count] = first + token;
        weights[count++] = float(sums.of[token]) * float(1 / UNIT);
        sums.of[token] = 0;
    }
    sums.tokens.clear();
    return count;
}

// What followed the longest suffix of one node that occurred, the latest occurrence with most weight.
static int64_t latest_of(const Lookup& call, int64_t b, int64_t row, int64_t* places, float* weights, float* out) {
    const Asked& asked = call.asked;
    int64_t best = 0, followed[PLACES];  // the latest first
    size_t occurrences = 0;
    each_match(asked, b, row, [&](int64_t token, int64_t length) {
        if (length > best) best = length, occurrences = 0;
        if (length == best && occurrences < PLACES) followed[occurrences++] = token;
        return best < asked.longest || occurrences < PLACES;
    });
    if (best < call.shortest) return 0;
    int64_t count = 0;
    while (occurrences > 0) {  // the smallest weights first
        float& sum = out[followed[--occurrences]];
        const float weight = std::ldexp(1.f, -int(occurrences + 1));
        if (sum < 0) places[count++] = &sum - asked.out, sum = 0;
        sum += weight;
    }
    for (int64_t i = 0; i < count; i++) weights[i] = asked.out[places[i]];
    return count;
}

extern "C" {
// Both return how many places there are.
int64_t look_up(const Lookup* call) {
    const Asked& asked = call->asked;
    const int64_t rows = asked.nodes - asked.first;
    std::fill(asked.out, asked.out + asked.batch * rows * asked.vocab, -INFINITY);
    int64_t count = 0;
    for (int64_t b = 0; b < asked.batch; b++) {
        int64_t *keys = asked.keys + b * asked.step, *values = asked.values + b * asked.step;
        for (int64_t i = b * asked.nodes; i < (b + 1) * asked.nodes; i++)
            write_tokens(asked.tokens[i], asked.cache_rows[i], asked.parent_rows[i], asked.longest, keys, values);
        take_in(asked, b);
        for (int64_t i = 0; i < rows; i++) {
            float* out = asked.out + (b * rows + i) * asked.vocab;
            const int64_t row = asked.cache_rows[b * asked.nodes + asked.first + i];
            count += latest_of(*call, b, row, asked.places + count, asked.weights + count, out);
        }
    }
    return count;
}

int64_t retrieve(const Retrieval* call) {
    const Asked& asked = call->asked;
    const int64_t rows = asked.nodes - asked.first, longest = asked.longest;
    std::fill(asked.out, asked.out + asked.batch * rows * asked.vocab, -INFINITY);
    if (int64_t(sums.of.size()) < asked.vocab) sums.of.resize(asked.vocab);
    int64_t count = 0;
    for (int64_t b = 0; b < asked.batch; b++) {
        int64_t *lows = asked.keys + b * asked.step, *highs = asked.values + b * asked.step;
        int64_t *keys = lows + asked.head, *values = highs + asked.head;
        const int64_t before = asked.parent_rows[b * asked.nodes] * longest;
        if (call->renews && before >= 0) renew(*call, values + before, lows + before, highs + before);
        for (int64_t i = b * asked.nodes; i < (b + 1) * asked.nodes; i++) {
            write_ranges(*call, asked.tokens[i], asked.cache_rows[i], asked.parent_rows[i], lows, highs);
            write_tokens(asked.tokens[i], asked.cache_rows[i], asked.parent_rows[i], longest, keys, values);
        }
        take_in(asked, b);
        for (int64_t i = 0; i < rows; i++) {
            const int64_t row = asked.cache_rows[b * asked.nodes + asked.first + i], first = (b * rows + i) * asked.vocab;
            count += followers_of(*call, b, row, asked.places + count, asked.weights + count, first);
        }
    }
    return count;
}
}
}  // namespace heavypath
