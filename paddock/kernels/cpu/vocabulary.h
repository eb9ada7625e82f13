// From logits to what is asked of them: a draw, running sums over a vocabulary, and their gradient.
#pragma once

#include <vector>

#include "vectors.h"

namespace {

constexpr long BLOCK = 256;  // tokens whose probabilities are summed before a draw goes into a block
constexpr double LAST = 1.0 - 0x1p-53;

// e^(x - top) of a block of tokens, and their sum.
inline float weigh(const float *x, float *weight, long count, float inverse, float top) {
    Floats sums{};
    for (long i = 0; i < count; i += LANES) {
        store(weight + i, exponential(load(x + i, count - i) * inverse - top), count - i);
        sums += load(weight + i, count - i);
    }
    return sum_of(sums);
}

// The index where the running sum first exceeds u x total; one of weight 0 is never taken.
template <class N> inline long first_above(const N *weight, long count, double target) {
    double running = 0;
    long last = 0;
    for (long i = 0; i < count; i++) {
        running += weight[i];
        if (weight[i] > 0) last = i;
        if (running > target) return i;
    }
    return last;
}

inline long drawn_token(const float *x, long vocab_size, float inverse, float top, double u, float &total) {
    float room[BLOCK];
    std::vector<float> sums;
    sums.reserve((vocab_size + BLOCK - 1) / BLOCK);
    double mass = 0;
    for (long start = 0; start < vocab_size; start += BLOCK) {
        sums.push_back(weigh(x + start, room, std::min(BLOCK, vocab_size - start), inverse, top));
        mass += sums.back();
    }
    total = float(mass);
    double target = u * mass, before = 0, inside = 0;
    long block = first_above(sums.data(), long(sums.size()), target);
    long count = std::min(BLOCK, vocab_size - block * BLOCK);
    for (long i = 0; i < block; i++) before += sums[i];
    weigh(x + block * BLOCK, room, count, inverse, top);
    for (long i = 0; i < count; i++) inside += room[i];
    double share = std::min((target - before) / sums[block], LAST);
    return block * BLOCK + first_above(room, count, share * inside);
}

// One more token for each row: see sampling.py. Temperature 0 comes as greedy, with inverse 1.
void draw(const float *logits, const double *numbers, int64_t *tokens, float *log_probs, int64_t *token,
          int64_t *drawn, bool *done, const int64_t *limit, const int64_t *stops, long rows, long vocab_size,
          long width, long stop_count, float inverse, bool greedy) {
#pragma omp parallel for if (rows * vocab_size > SMALL)
    for (long row = 0; row < rows; row++) {
        const float *x = logits + row * vocab_size;
        float top = top_of(x, vocab_size, inverse, LOWEST), total = 0;
        const long index = row * width + drawn[row];
        long id = drawn_token(x, vocab_size, inverse, top, greedy ? 0.0 : numbers[index], total);
        for (long i = 0; greedy && i < vocab_size; i++)
            if (x[i] == top) {
                id = i;
                break;
            }
        log_probs[index] = (x[id] * inverse - top) - std::log(total);
        tokens[index] = token[row] = id;
        bool ends = false;
        for (long i = 0; i < stop_count; i++) ends |= stops[i] == id;
        drawn[row] += !done[row];
        done[row] |= ends || drawn[row] == limit[row];
    }
}

// Adds a chunk of the vocabulary, from token `first` on, to a row's running numbers: see models/token_stats.py.
void gather(const float *logits, const int64_t *tokens, float *top, float *total, float *chosen, float *weighted,
            float *squared, long rows, long columns, long first, float inverse) {
#pragma omp parallel for if (rows * columns > SMALL)
    for (long row = 0; row < rows; row++) {
        const float *z = logits + row * columns;
        float risen = top_of(z, columns, inverse, top[row]);
        Floats sums{}, with_logs{}, squares{};
        for (long i = 0; i < columns; i += LANES) {
            Floats x = load(z + i, columns - i) * inverse - risen, e = exponential(x);
            if (columns - i < LANES)
                for (long j = columns - i; j < LANES; j++) e[j] = 0;
            sums += e;
            with_logs += e > 0 ? e * x : e;
            squares += e * e;
        }
        float shrink = exponential(top[row] - risen);
        if (weighted) weighted[row] = shrink * (weighted[row] + total[row] * (top[row] - risen)) + sum_of(with_logs);
        if (squared) squared[row] = shrink * shrink * squared[row] + sum_of(squares);
        total[row] = shrink * total[row] + sum_of(sums);
        top[row] = risen;
        long id = tokens[row] - first;
        if (id >= 0 && id < columns) chosen[row] = z[id] * inverse;
    }
}

// outer ([v = y] - pi) - slope pi (log pi + H), times 1 - (z / cap)^2 where logits are capped.
template <class T>
void gradient(const float *logits, const int64_t *tokens, const float *normaliser, const float *entropy,
              const float *outer, const float *slope, T *out, long rows, long columns, long first, float inverse,
              float bend) {
#pragma omp parallel for if (rows * columns > SMALL)
    for (long row = 0; row < rows; row++) {
        const float *z = logits + row * columns;
        T *to = out + row * columns;
        float by = outer[row], of_entropy = slope ? slope[row] : 0.0f, h = slope ? entropy[row] : 0.0f;
        float less = normaliser[row];
        for (long i = 0; i < columns; i += LANES) {
            Floats x = load(z + i, columns - i) * inverse, log_pi = x - less, bent = x * bend;
            Floats d = -exponential(log_pi) * (by + of_entropy * (log_pi + h)) * (1.0f - bent * bent);
            store(to + i, d, columns - i);
        }
        long id = tokens[row] - first;
        if (id >= 0 && id < columns) {
            float x = z[id] * inverse, log_pi = x - less, bent = x * bend;
            float value = by - exponential(log_pi) * (by + of_entropy * (log_pi + h));
            store(to + id, all(value * (1.0f - bent * bent)), 1);
        }
    }
}

}  // namespace
