// Which drafted nodes are accepted: what the references of `heavypath.kernels.verification` do.

#include <memory>

#include "filters.h"

namespace heavypath {

enum Method { GREEDY, NAIVE, RACE, REJECTION, HELD, K_SEQ, TRAVERSAL, HELD_TRAVERSAL };

struct Verification {
    int64_t batch, nodes, vocab, max_depth, method, independent;
    const int64_t *tokens, *parents, *ranks, *noise_rows;  // [B, N]; of parents and ranks sequences lie
    int64_t tree_step;                                     // this far apart: N, or 0 for all the same
    const float *target, *draft;      // [B, N, V]; the draft's is null for a root alone
    int64_t target_step, draft_step;  // from one sequence to the next
    Filters target_filters, draft_filters;
    const int64_t* seed;
    int64_t *path, *length, *next_token;  // [B, max_depth + 1], [B], [B]
    int64_t* bad;                         // side (0 target, 1 draft), sequence and node of a row without distribution
};

typedef std::vector<int64_t> Numbers;

// One sequence's tree.
struct Tree {
    const Verification& call;
    const int64_t sequence, count;
    const int64_t *tokens, *parents, *rows;
    Numbers order, place;           // all nodes by rank, and where each is in that
    std::vector<Numbers> children;  // in draw order, without absent ones

    Tree(const Verification& v, int64_t b)
        : call(v), sequence(b), count(v.nodes), tokens(v.tokens + b * v.nodes), parents(v.parents + b * v.tree_step),
          rows(v.noise_rows + b * v.nodes), order(v.nodes), place(v.nodes), children(v.nodes) {
        const int64_t* ranks = v.ranks + b * v.tree_step;
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return ranks[i] < ranks[j]; });
        for (int64_t i = 0; i < count; i++) {
            const int64_t node = order[i];
            place[node] = i;
            if (parents[node] >= 0 && tokens[node] >= 0) children[parents[node]].push_back(node);
        }
    }

    double coin(int64_t node) const {
        const int64_t* ranks = call.ranks + sequence * call.tree_step;
        return Philox(*call.seed).coin(rows[std::max<int64_t>(0, parents[node])], ranks[node]);
    }

    // The children of siblings of equal token, in draw order.
    Numbers below(const Numbers& equal) const {
        if (equal.size() == 1) return children[equal[0]];
        Numbers all;
        for (int64_t node : equal) all.insert(all.end(), children[node].begin(), children[node].end());
        std::sort(all.begin(), all.end(), [&](int64_t i, int64_t j) { return place[i] < place[j]; });
        return all;
    }

    // Those of siblings that have a node's token.
    Numbers alike(const Numbers& siblings, int64_t token) const {
        Numbers equal;
        for (int64_t node : siblings)
            if (tokens[node] == token) equal.push_back(node);
        return equal;
    }

    const float* logits(bool of_draft, int64_t node) const {
        return (of_draft ? call.draft + sequence * call.draft_step : call.target + sequence * call.target_step) +
               node * call.vocab;
    }

    void accept(int64_t node) const {
        Numbers up = {node};
        while (up.back() > 0) up.push_back(parents[up.back()]);
        int64_t* path = call.path + sequence * (call.max_depth + 1);
        std::fill(path, path + call.max_depth + 1, -1);
        std::copy(up.rbegin(), up.rend(), path);
        call.length[sequence] = up.size() - 1;
    }
};

// A row of logits that is no distribution.
struct NoDistribution {
    int64_t of_draft, node;
};

inline float largest_in(const Tree& tree, bool of_draft, int64_t node) {
    const float largest = largest_of(tree.logits(of_draft, node), tree.call.vocab);
    if (!std::isfinite(largest)) throw NoDistribution{of_draft, node};
    return largest;
}

inline std::vector<float> log_weights(const Tree& tree, bool of_draft, int64_t node) {
    std::vector<float> logs(tree.call.vocab);
    log_weights(tree.logits(of_draft, node), tree.call.vocab, largest_in(tree, of_draft, node),
                of_draft ? tree.call.draft_filters : tree.call.target_filters, logs.data());
    return logs;
}

constexpr double LITTLE = 0x1p-60;  // as in the reference
constexpr int SEARCH_STEPS = 12;    // likewise, for g of K-SEQ

// What is still to be emitted at one node, while its children are offered one after the other; see the reference.
struct Chain {
    const int64_t vocab;
    const bool tracks;  // which tokens were drawn
    std::vector<float> left, log_draft, draft;
    double factor, ending, leaving, largest = 0, mass = 1;
    std::vector<double> held;
    Numbers drawn;

    Chain(const Tree& tree, int64_t node, int64_t source, double weight)
        : vocab(tree.call.vocab), tracks(!tree.call.independent || tree.call.draft_filters.temperature == 0),
          left(log_weights(tree, false, node)), ending(weight), leaving(1 - weight) {
        powers_of_two(left.data(), vocab, left.data());
        factor = weight / sum_of(left.data(), vocab);
        if (tree.call.draft_filters.temperature > 0) draw_from(log_weights(tree, true, source));
    }

    // What the next children are drawn from: log2 of its distribution up to a constant.
    void draw_from(std::vector<float> logs) {
        log_draft = std::move(logs), draft.resize(vocab);
        largest = largest_of(log_draft.data(), vocab);
        for (int64_t v = 0; v < vocab; v++) draft[v] = log_draft[v] - float(largest);
        powers_of_two(draft.data(), vocab, draft.data());
        mass = sum_of(draft.data(), vocab);
    }

    bool was_drawn(int64_t token) const { return std::find(drawn.begin(), drawn.end(), token) != drawn.end(); }

    // The probability to take the next child; -1 if the draft could not have drawn it.
    double offer(int64_t token) {
        if (tracks && was_drawn(token)) return -1;
        double log_ratio = std::log2(factor);
        if (!log_draft.empty()) {
            if (mass < LITTLE) renew();
            const double log_q = log_draft[token];
            if (log_q == -INFINITY) return -1;
            log_ratio += std::log2(mass) - (log_q - largest);
        }
        if (left[token] == 0) return 0;
        log_ratio += std::log2(double(left[token]));
        return log_ratio < -126 ? 0 : log_ratio >= 0 ? 1 : std::exp2(log_ratio);
    }

    // Leave the child that was offered last; share: 1, or what is left of it if it is held.
    void pass_over(int64_t token, double share) {
        if (!log_draft.empty()) {
            const float covered = std::min(1 / (factor * mass), 0x1p120);
            for (int64_t v = 0; v < vocab; v += WIDTH) {
                const Floats rest = load(&left[v], vocab - v) - apart(load(&draft[v], vocab - v) * covered);
                store(&left[v], rest > 0.0f ? rest : Floats{}, vocab - v);
            }
            if (tracks) draft[token] = 0, mass = sum_of(draft.data(), vocab);
        }
        if (tracks) drawn.push_back(token);
        left[token] = 0;
        const double emitted = factor * sum_of(left.data(), vocab);
        const double total = leaving + std::accumulate(held.begin(), held.end(), 0.0) + emitted;
        if (total == 0) {
            ending *= share;
        } else {
            ending = emitted / total * share;
            share /= total;
            factor *= share, leaving *= share;
            for (double& weight : held) weight *= share;
        }
    }

    // What is left of the draft's distribution anew; uniform where its support is used up.
    void renew() {
        for (int64_t token : drawn) log_draft[token] = -INFINITY;
        if (*std::max_element(log_draft.begin(), log_draft.end()) == -INFINITY) {
            std::fill(log_draft.begin(), log_draft.end(), 0.0f);
            for (int64_t token : drawn) log_draft[token] = -INFINITY;
        }
        draw_from(std::move(log_draft));
    }

    // Offer all children; those that the draft could have drawn, whose weights are then in `held`.
    Numbers hold(const Tree& tree, const Numbers& children) {
        Numbers offered;
        for (int64_t child : children) {
            const double taken = offer(tree.tokens[child]);
            if (taken < 0) continue;
            offered.push_back(child);
            if (taken == 1) {  // nothing is left for the others
                ending = leaving = 0;
                std::fill(held.begin(), held.end(), 0.0);
                held.push_back(1);
                break;
            }
            pass_over(tree.tokens[child], 1 - taken);
            held.push_back(taken);
        }
        return offered;
    }
};

// The token after the last accepted node, drawn by what is left there, or else by the target's distribution.
void end_at(const Tree& tree, int64_t node, std::vector<float> left) {
    const int64_t vocab = tree.call.vocab;
    if (std::none_of(left.begin(), left.end(), [](float weight) { return weight != 0; })) {
        left = log_weights(tree, false, node);
        powers_of_two(left.data(), vocab, left.data());
    }
    Leaders leader(1);
    leader.offer_noisy(left.data(), vocab, Philox(*tree.call.seed), tree.rows[node], TARGET, [&](int64_t v, float gumbel) {
        return left[v] > 0 ? logarithm(Doubles{} + left[v])[0] + gumbel : -INFINITY;
    });
    tree.call.next_token[tree.sequence] = leader.sorted()[0].second;
    tree.accept(node);
}

// K-SEQ at one node: the accepted child, or -1 and what the recovered token is drawn by.
int64_t k_seq(const Tree& tree, int64_t node, const Numbers& children, std::vector<float>& left) {
    const int64_t vocab = tree.call.vocab;
    const std::vector<float> log_target = log_weights(tree, false, node);
    const std::vector<float> log_draft = log_weights(tree, true, tree.parents[children[0]]);
    std::vector<float> share(vocab), target(vocab), draft(vocab);
    powers_of_two(log_target.data(), vocab, target.data());
    powers_of_two(log_draft.data(), vocab, draft.data());
    const double target_mass = sum_of(target.data(), vocab), draft_mass = sum_of(draft.data(), vocab);
    for (float& weight : target) weight /= target_mass;
    for (float& weight : draft) weight /= draft_mass;
    int64_t count = 0;
    for (int64_t child : children) count += log_draft[tree.tokens[child]] > -INFINITY;
    double uncovered, refusing;
    const auto gap_at = [&](double g) {  // R(g) - F(g)
        for (int64_t v = 0; v < vocab; v++) share[v] = std::max(target[v] - apart(float(g) * draft[v]), 0.0f);
        uncovered = std::min(sum_of(share.data(), vocab), 1.0);
        refusing = std::pow(1 - (1 - uncovered) / g, count);
        return refusing - uncovered;
    };
    // Regula falsi with the Illinois rule: the least g is in [low, high], and high always satisfies the condition.
    double low = 1, high = 1, low_gap = gap_at(low);
    const double root = std::pow(uncovered, 1.0 / std::max<int64_t>(count, 1));
    for (int64_t child = 1; child < count; child++) high = 1 + root * high;
    double high_gap = gap_at(high);
    for (int step = 0, before = -1; step < SEARCH_STEPS && high > low; step++) {
        const double slope = high_gap - low_gap;
        const double between = high - high_gap * (high - low) / (slope == 0 ? 1 : slope);
        const double middle = std::min(std::max(between, low), high), gap = gap_at(middle);
        if (gap >= 0) {
            if (before == 1) low_gap /= 2;
            high = middle, high_gap = gap;
        } else {
            if (before == 0) high_gap /= 2;
            low = middle, low_gap = gap;
        }
        before = gap >= 0;
    }
    for (int64_t child : children) {
        const double log_q = log_draft[tree.tokens[child]], log_p = log_target[tree.tokens[child]];
        const double most = std::exp2(log_p - log_q) * draft_mass / target_mass / high;
        if (log_q > -INFINITY && tree.coin(child) < most) return child;
    }
    gap_at(high);
    const float part = std::min((1 - refusing) / std::max(1 - uncovered, 0x1p-1022), 1.0);
    left.resize(vocab);
    for (int64_t v = 0; v < vocab; v++) {
        const float covered = std::min(target[v], float(high) * draft[v]);
        left[v] = std::max(target[v] - apart(part * covered), 0.0f);
    }
    return -1;
}

// The accepted child of a node by a rule that asks for the draft's logits; -1, and what is left there, for none.
int64_t accepted(const Tree& tree, int64_t node, const Numbers& children, std::vector<float>& left) {
    const Verification& call = tree.call;
    if (children.empty()) return -1;
    if (call.method == K_SEQ) return k_seq(tree, node, children, left);
    Chain chain(tree, node, tree.parents[children[0]], 1);
    if (call.method == HELD && call.draft_filters.temperature > 0) {  // of point masses it is the same as rejection
        const Numbers offered = chain.hold(tree, children);
        const double coin = tree.coin(children[0]);
        double upto = 0;
        for (size_t i = 0; i < offered.size(); i++)
            if (coin < (upto += chain.held[i])) return offered[i];
    } else {
        for (int64_t child : children) {
            const double chance = chain.offer(tree.tokens[child]);
            if (chance < 0) continue;
            if (tree.coin(child) < chance) return child;
            chain.pass_over(tree.tokens[child], 1);
        }
    }
    left = std::move(chain.left);
    return -1;
}

// The token that the target chooses after a node, where it does so before it looks at the children.
int64_t chosen(const Tree& tree, int64_t node) {
    const Verification& call = tree.call;
    const float* x = tree.logits(false, node);
    const float largest = largest_in(tree, false, node);
    if (call.method == GREEDY) return best_of(x, call.vocab);
    std::vector<float> scores(call.vocab), weights(call.vocab);
    scores_of(x, call.vocab, largest, call.target_filters, scores.data());
    for (int64_t v = 0; v < call.vocab; v += WIDTH)
        store(&weights[v], exponential(load(&scores[v], call.vocab - v)), call.vocab - v);
    const uint32_t stream = call.method == RACE ? DRAFT : TARGET;
    Leaders leader(1);
    leader.offer_noisy(weights.data(), call.vocab, Philox(*call.seed), tree.rows[node], stream, [&](int64_t v, float gumbel) {
        return gumbel + scores[v];
    });
    return leader.sorted()[0].second;
}

// The walk down from the root, where each node decides by itself.
void walk(const Tree& tree) {
    const bool first = tree.call.method <= RACE;  // the token is chosen first
    Numbers reached = {0};
    int64_t node = 0;
    for (int64_t level = 0;; level++) {
        const Numbers children = level < tree.call.max_depth ? tree.below(reached) : Numbers();
        std::vector<float> left;
        int64_t child = -1;
        if (first) {
            const int64_t token = tree.call.next_token[tree.sequence] = chosen(tree, node);
            const Numbers alike = tree.alike(children, token);
            if (!alike.empty()) child = alike[0];
        } else {
            child = accepted(tree, node, children, left);
        }
        if (child < 0) return first ? tree.accept(node) : end_at(tree, node, left);
        node = child, reached = tree.alike(children, tree.tokens[child]);
    }
}

// Traversal of one sequence's tree, in post-order, as far as the node that it ends at.
struct Traversal {
    const Tree& tree;

    // A node whose children are being visited; of equal siblings the first.
    struct Visit {
        int64_t node, depth;
        double weight;
        Numbers children, offered;     // all, and of held ones those that the draft could have drawn
        std::unique_ptr<Chain> chain;  // null without children
        std::vector<double> shares;    // of held children
        int64_t last = -1;             // the child that was offered last, and is not passed over yet
        size_t next = 0;               // of those offered
    };

    // The way down is kept here, as a tree may be deeper than the thread's own stack.
    void run() const {
        std::vector<Visit> way;
        way.push_back(begun({0}, 1, 0));
        for (bool ended = false; !ended;) {
            Visit& visit = way.back();
            double share;
            const int64_t child = next_child(visit, share);
            if (child >= 0) {
                way.push_back(begun(alike(visit, child), share, visit.depth + 1));
            } else {
                ended = visit.chain ? ends_at(visit.node, visit.chain->ending, visit.chain->left)
                                    : ends_at(visit.node, visit.weight, {});
                way.pop_back();
            }
        }
    }

    Visit begun(const Numbers& equal, double weight, int64_t depth) const {
        Visit visit{equal[0], depth, weight};
        if (depth == tree.call.max_depth || !(weight > 0)) return visit;
        const Numbers& children = visit.children = visit.offered = tree.below(equal);
        if (children.empty()) return visit;
        // Of equal siblings the source is one that has children.
        visit.chain = std::make_unique<Chain>(tree, equal[0], tree.parents[children[0]], weight);
        if (tree.call.method == HELD_TRAVERSAL) hold(visit);
        return visit;
    }

    Numbers alike(const Visit& visit, int64_t child) const {
        return tree.call.independent ? tree.alike(visit.children, tree.tokens[child]) : Numbers{child};
    }

    // The next child to visit, with its share of what is left; -1 after the last one.
    int64_t next_child(Visit& visit, double& share) const {
        while (true) {
            if (visit.last >= 0) visit.chain->pass_over(tree.tokens[visit.last], 1);
            visit.last = -1;
            if (visit.next == visit.offered.size()) return -1;
            const int64_t child = visit.offered[visit.next++];
            if (tree.call.method == HELD_TRAVERSAL) {
                share = visit.shares[visit.next - 1];
            } else {
                share = visit.chain->offer(tree.tokens[child]);
                if (share < 0) continue;
                visit.last = child;
            }
            if (alike(visit, child)[0] == child) return child;
        }
    }

    void hold(Visit& visit) const {
        Chain& chain = *visit.chain;
        visit.offered = chain.hold(tree, visit.children);
        visit.shares.resize(visit.offered.size());
        double rest = chain.ending + chain.leaving;
        if (rest > 0) chain.ending /= rest;
        for (int64_t i = visit.offered.size() - 1; i >= 0; i--) {
            rest += chain.held[i];  // its own weight, those of the younger ones, and what is left
            visit.shares[i] = chain.held[i] > 0 ? chain.held[i] / rest : 0;
        }
    }

    bool ends_at(int64_t node, double ending, const std::vector<float>& left) const {
        if (node > 0 && !(tree.coin(node) < ending)) return false;
        end_at(tree, node, left);
        return true;
    }
};

}  // namespace heavypath

using namespace heavypath;

// 1 where all is well; 0 for a row that is no distribution, which `bad` then names.
extern "C" int64_t verify(const Verification* call) {
    for (int64_t b = 0; b < call->batch; b++) {
        const Tree tree(*call, b);
        try {
            if (call->method >= TRAVERSAL)
                Traversal{tree}.run();
            else
                walk(tree);
        } catch (const NoDistribution& found) {
            call->bad[0] = found.of_draft, call->bad[1] = b, call->bad[2] = found.node;
            return 0;
        }
    }
    return 1;
}
