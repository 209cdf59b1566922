// RMS norm of a row, rounded where the modules of transformers round; and rows of a Number as fp32, and back.

#pragma once

#include <cstring>

#include "vectors.h"

namespace heavypath {

template <typename Number>
struct Norm {
    const Number* weight;  // null for none: the row stays as it is
    double epsilon;
};

template <typename Number>
void normalize(const float* x, int64_t columns, const Norm<Number>& norm, float* out) {
    if (!norm.weight) {
        memmove(out, x, sizeof(float) * columns);
        return;
    }
    Floats squares = {};
    for (int64_t i = 0; i < columns; i += WIDTH) {
        const Floats some = load(x + i, columns - i);
        squares += some * some;
    }
    const Floats scale = all_of(1 / std::sqrt(sum(squares) / columns + float(norm.epsilon)));
    for (int64_t i = 0; i < columns; i += WIDTH) {
        const Floats normed = rounded<Number>(load(x + i, columns - i) * scale);
        store(out + i, rounded<Number>(load(norm.weight + i, columns - i) * normed), columns - i);
    }
}

template <typename From, typename To>
void convert(const From* from, int64_t count, To* to) {
    for (int64_t i = 0; i < count; i += WIDTH) store(to + i, load(from + i, count - i), count - i);
}

}  // namespace heavypath
