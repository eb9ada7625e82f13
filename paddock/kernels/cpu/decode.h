// Attention of one query a sequence, over keys and values that lie in two pieces: its prompt's, shared, and its own.
#pragma once

#include <vector>

#include "vectors.h"

namespace {

constexpr long MOST_VECTORS = 64;  // of a head

// Where the tokens of each sequence lie: see arguments.py.
struct Pieces {
    const int32_t *prompt, *prompt_length, *answer;
    const int64_t *length;
};

// The queries of one sequence that share a key head, over its tokens. N vectors make a head; 0: another number.
template <class T, int N>
void attend_head(const T *q, const T *keys, const T *values, T *out, Pieces at, long row, long head, long key_heads,
                 long group, long any_dim, float scale, float softcap, long window, const float *sinks,
                 std::vector<float> &room) {
    const long dim = N ? N * LANES : any_dim, vectors = N ? N : (dim + LANES - 1) / LANES, stride = key_heads * dim;
    const long end = at.length[row] + 1, prompt = at.prompt_length[row];
    const long first = window > 0 && end > window ? end - window : 0, count = end - first;
    const long shared = at.prompt[row], own = at.answer[row] - prompt;
    if (long(room.size()) < count + LANES) room.resize(count + LANES);
    float *scores = room.data();
    Floats query[N ? N : MOST_VECTORS], total[N ? N : MOST_VECTORS];
    auto part = [&](const T *from, long n) { return N ? load(from + n * LANES) : load(from + n * LANES, dim - n * LANES); };
    auto token_at = [&](long t) { return (first + t < prompt ? shared : own) + first + t; };
    for (long g = 0; g < group; g++) {
        const long place = ((row * key_heads + head) * group + g) * dim;
        float top = sinks ? sinks[head * group + g] : LOWEST;
        for (long n = 0; n < vectors; n++) query[n] = part(q + place, n), total[n] = Floats{};
        for (long t = 0; t < count; t++) {
            const T *key = keys + token_at(t) * stride + head * dim;
            Floats products = query[0] * part(key, 0);
            for (long n = 1; n < vectors; n++) products += query[n] * part(key, n);
            float score = sum_of(products) * scale;
            scores[t] = softcap > 0 ? softcap * tangent(score / softcap) : score;
            top = scores[t] > top ? scores[t] : top;
        }
        float mass = sinks ? exponential(sinks[head * group + g] - top) : 0;
        for (long t = count; t < count + LANES; t++) scores[t] = LOWEST;
        Floats masses{};
        for (long t = 0; t < count; t += LANES) {
            Floats p = exponential(load(scores + t) - top);
            masses += p;
            store(scores + t, through<T>(p));
        }
        mass += sum_of(masses);
        for (long t = 0; t < count; t++) {
            const T *value = values + token_at(t) * stride + head * dim;
            for (long n = 0; n < vectors; n++) total[n] += scores[t] * part(value, n);
        }
        for (long n = 0; n < vectors; n++) store(out + place + n * LANES, total[n] / mass, dim - n * LANES);
    }
}

template <class T>
void decode_attention(const T *q, const T *keys, const T *values, T *out, const int32_t *prompt,
                      const int32_t *prompt_length, const int32_t *answer, const int64_t *length, const float *sinks,
                      long rows, long key_heads, long group, long dim, float scale, float softcap, long window) {
    Pieces at{prompt, prompt_length, answer, length};
    auto attend = dim == 64 ? attend_head<T, 4> : dim == 128 ? attend_head<T, 8> : attend_head<T, 0>;
#pragma omp parallel
    {
        std::vector<float> room;  // of a thread, for as long as this takes
#pragma omp for schedule(dynamic, 8)
        for (long job = 0; job < rows * key_heads; job++)
            attend(q, keys, values, out, at, job / key_heads, job % key_heads, key_heads, group, dim, scale, softcap,
                   window, sinks, room);
    }
}

}  // namespace
