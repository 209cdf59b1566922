// The k largest of keys, such as score + G with G Gumbel noise, without the noise of tokens that cannot be among them.
//
//     G = -log(-log(1 - u)) <= -log u,    because -log(1 - u) >= u
//
// So with w = exp(score) a key reaches the k-th largest one so far, t, only if u <= w exp(-t). That takes a product and
// a comparison. Few tokens pass, and only theirs need the two logarithms. Where w exp(-t) is below the least u, 2^-33,
// not even words of noise are needed.

#pragma once

#include "rows.h"

namespace heavypath {

// The k largest of the keys offered so far, in a heap whose first is the least; of equal keys the first places.
class Leaders {
  public:
    typedef std::pair<double, int64_t> Leader;  // key and place

    explicit Leaders(int64_t k) : k(k) {}

    // What a key must reach to be among them.
    double least() const { return int64_t(held.size()) < k ? -INFINITY : held.front().first; }

    // Keys of -inf are left out.
    void offer(double key, int64_t place) {
        if (!(key > -INFINITY) || k == 0) return;
        if (int64_t(held.size()) == k) {
            if (!before({key, place}, held.front())) return;
            std::pop_heap(held.begin(), held.end(), before);
            held.pop_back();
        }
        held.push_back({key, place});
        std::push_heap(held.begin(), held.end(), before);
    }

    void offer_all(const float* keys, int64_t count) {
        for (int64_t v = 0; v < count; v += WIDTH) {
            const int64_t some = std::min<int64_t>(WIDTH, count - v);
            if (!any(load(keys + v, some) >= float(least()))) continue;
            for (int64_t i = v; i < v + some; i++) offer(keys[i], i);
        }
    }

    // Offer key(v, G) of each token v. weights: exp(key(v, 0)), 0 where it is too small for fp32.
    template <typename Key>
    void offer_noisy(const float* weights, int64_t count, const Philox& philox, int64_t row, uint32_t stream, Key key) {
        // The largest key is at least the largest score - log(16.7), since -log(1 - u) <= 16.7.
        const double sure = k == 1 ? std::log(largest_of(weights, count)) - 2.82 : -INFINITY;
        double bound = NAN;
        float factor = 0;
        for (int64_t first = 0; first < count; first += QUADS) {
            const int64_t some = std::min<int64_t>(QUADS, count - first);
            const double reached = std::max(sure, least());
            if (reached != bound) bound = reached, factor = float(1.001 * std::exp(-bound));  // more than rounding errs
            const bool open = bound < -60;  // too low to tell by weights
            Floats limits[2];               // of u
            for (int half = 0; half < 2; half++)
                limits[half] = load(weights + first + half * WIDTH, std::max<int64_t>(0, some - half * WIDTH)) * factor;
            bool passes = any((limits[0] >= 0x1p-33f) | (limits[1] >= 0x1p-33f));
            for (int64_t i = 0; open && i < some; i++) passes |= key(first + i, 0.0f) > -INFINITY;
            if (!passes) continue;
            uint32_t words[QUADS];
            philox.block(words, first, row, stream);
            Ints below = {};
            for (int half = 0; half < 2; half++) {
                Words own;
                memcpy(&own, words + half * WIDTH, sizeof own);
                below |= __builtin_convertvector(same_bits<Ints>(own >> 8), Floats) * 0x1p-24f <= limits[half];
            }
            if (!open && !any(below)) continue;
            for (int64_t part = 0; part < some; part += LANES) {
                Bits own;
                memcpy(&own, words + part, sizeof own);
                const Singles noise = gumbels(own);
                for (int64_t lane = 0; lane < LANES && part + lane < some; lane++)
                    offer(key(first + part + lane, noise[lane]), first + part + lane);
            }
        }
    }

    // All of them, from the largest on. Nothing can be offered afterwards.
    const std::vector<Leader>& sorted() {
        std::sort_heap(held.begin(), held.end(), before);
        return held;
    }

  private:
    static bool before(const Leader& a, const Leader& b) {
        return a.first > b.first || (a.first == b.first && a.second < b.second);
    }

    static bool any(Ints mask) {
        const Longs pairs = same_bits<Longs>(mask);
        uint64_t found = 0;
        for (int lane = 0; lane < LANES; lane++) found |= pairs[lane];
        return found;
    }

    int64_t k;
    std::vector<Leader> held;
};

}  // namespace heavypath
