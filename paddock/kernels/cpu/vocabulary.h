// From logits to what is asked of them: a draw, running sums over a vocabulary, and their gradient.
#pragma once

#include <vector>

#include "vectors.h"

namespace {

constexpr long BLOCK = 256;  // words whose probabilities are summed before a draw looks inside
constexpr double LAST = 1.0 - 0x1p-53;

// e^(x - top) of a block of words, and their sum.
inline float weigh(const float *x, float *weight, long count, float inverse, float top) {
    Floats sums{};
    for (long i = 0; i < count; i += LANES) {
        store(weight + i, exponential(load(x + i, count - i) * inverse - top), count - i);
        sums += load(weight + i, count - i);
    }
    return sum_of(sums);
}

// The place where the running sum first exceeds u x total; one of weight 0 is never taken.
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

inline long drawn_word(const float *x, long words, float inverse, float top, double u, float &total) {
    float room[BLOCK];
    std::vector<float> sums;
    sums.reserve((words + BLOCK - 1) / BLOCK);
    double mass = 0;
    for (long start = 0; start < words; start += BLOCK) {
        sums.push_back(weigh(x + start, room, std::min(BLOCK, words - start), inverse, top));
        mass += sums.back();
    }
    total = float(mass);
    double target = u * mass, before = 0, inside = 0;
    long block = first_above(sums.data(), long(sums.size()), target), count = std::min(BLOCK, words - block * BLOCK);
    for (long i = 0; i < block; i++) before += sums[i];
    weigh(x + block * BLOCK, room, count, inverse, top);
    for (long i = 0; i < count; i++) inside += room[i];
    double share = std::min((target - before) / sums[block], LAST);
    return block * BLOCK + first_above(room, count, share * inside);
}

// One more token for each row: see sampling.py. Temperature 0 comes as greedy, with inverse 1.
void draw(const float *logits, const double *numbers, int64_t *tokens, float *log_probs, int64_t *token,
          int64_t *drawn, bool *done, const int64_t *limit, const int64_t *stops, long rows, long words, long width,
          long stop_count, float inverse, bool greedy) {
#pragma omp parallel for if (rows * words > SMALL)
    for (long row = 0; row < rows; row++) {
        const float *x = logits + row * words;
        float top = top_of(x, words, inverse, LOWEST), total = 0;
        const long place = row * width + drawn[row];
        long word = drawn_word(x, words, inverse, top, greedy ? 0.0 : numbers[place], total);
        for (long i = 0; greedy && i < words; i++)
            if (x[i] == top) {
                word = i;
                break;
            }
        log_probs[place] = (x[word] * inverse - top) - std::log(total);
        tokens[place] = token[row] = word;
        bool ends = false;
        for (long i = 0; i < stop_count; i++) ends |= stops[i] == word;
        drawn[row] += !done[row];
        done[row] |= ends || drawn[row] == limit[row];
    }
}

// Adds a chunk of the vocabulary, from word `first` on, to a row's running numbers: see models/token_stats.py.
void gather(const float *logits, const int64_t *tokens, float *top, float *total, float *chosen, float *weighted,
            float *squared, long rows, long words, long first, float inverse) {
#pragma omp parallel for if (rows * words > SMALL)
    for (long row = 0; row < rows; row++) {
        const float *z = logits + row * words;
        float risen = top_of(z, words, inverse, top[row]);
        Floats sums{}, with_logs{}, squares{};
        for (long i = 0; i < words; i += LANES) {
            Floats x = load(z + i, words - i) * inverse - risen, e = exponential(x);
            if (words - i < LANES)
                for (long j = words - i; j < LANES; j++) e[j] = 0;
            sums += e;
            with_logs += e > 0 ? e * x : e;
            squares += e * e;
        }
        float shrink = exponential(top[row] - risen);
        if (weighted) weighted[row] = shrink * (weighted[row] + total[row] * (top[row] - risen)) + sum_of(with_logs);
        if (squared) squared[row] = shrink * shrink * squared[row] + sum_of(squares);
        total[row] = shrink * total[row] + sum_of(sums);
        top[row] = risen;
        long word = tokens[row] - first;
        if (word >= 0 && word < words) chosen[row] = z[word] * inverse;
    }
}

// outer ([v = y] - pi) - slope pi (log pi + H), times 1 - (z / cap)^2 where logits are capped.
template <class T>
void gradient(const float *logits, const int64_t *tokens, const float *normaliser, const float *entropy,
              const float *outer, const float *slope, T *out, long rows, long words, long first, float inverse,
              float bend) {
#pragma omp parallel for if (rows * words > SMALL)
    for (long row = 0; row < rows; row++) {
        const float *z = logits + row * words;
        T *to = out + row * words;
        float by = outer[row], of_entropy = slope ? slope[row] : 0.0f, h = slope ? entropy[row] : 0.0f;
        float less = normaliser[row];
        for (long i = 0; i < words; i += LANES) {
            Floats x = load(z + i, words - i) * inverse, log_pi = x - less, bent = x * bend;
            Floats d = -exponential(log_pi) * (by + of_entropy * (log_pi + h)) * (1.0f - bent * bent);
            store(to + i, d, words - i);
        }
        long word = tokens[row] - first;
        if (word >= 0 && word < words) {
            float x = z[word] * inverse, log_pi = x - less, bent = x * bend;
            float value = by - exponential(log_pi) * (by + of_entropy * (log_pi + h));
            store(to + word, all(value * (1.0f - bent * bent)), 1);
        }
    }
}

}  // namespace
