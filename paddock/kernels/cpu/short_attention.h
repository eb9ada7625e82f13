// Attention of short sequences, causal each, that may see a common first one before themselves.
// See models/attention/short_attention.py.
#pragma once

#include <utility>
#include <vector>

#include "vectors.h"

namespace {

// C [R, 16 V] = A [R, depth] B [depth, 16 V], or added to C: tiles that stay in registers.
template <int R, int V>
inline void product_tile(const float *a, long a_row, long a_step, const float *b, long b_row, float *c, long c_row,
                         long depth, bool add) {
    Floats sums[R][V];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < V; n++) sums[r][n] = add ? load(c + r * c_row + n * LANES) : Floats{};
    for (long k = 0; k < depth; k++) {
        Floats row[V];
        for (int n = 0; n < V; n++) row[n] = load(b + k * b_row + n * LANES);
        for (int r = 0; r < R; r++)
            for (int n = 0; n < V; n++) sums[r][n] += a[r * a_row + k * a_step] * row[n];
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < V; n++) store(c + r * c_row + n * LANES, sums[r][n]);
}

constexpr long TILE = 4;  // rows of a product at a time

template <int R>
inline void product_row(const float *a, long a_row, long a_step, const float *b, long b_row, float *c, long c_row,
                        long vectors, long depth, bool add) {
    for (; vectors >= 4; vectors -= 4, b += 4 * LANES, c += 4 * LANES)
        product_tile<R, 4>(a, a_row, a_step, b, b_row, c, c_row, depth, add);
    if (vectors) (vectors == 1 ? product_tile<R, 1> : vectors == 2 ? product_tile<R, 2> : product_tile<R, 3>)(
        a, a_row, a_step, b, b_row, c, c_row, depth, add);
}

// The same for at most TILE rows and any number of vectors.
void product(const float *a, long a_row, long a_step, const float *b, long b_row, float *c, long c_row, long rows,
             long vectors, long depth, bool add) {
    (rows == 1 ? product_row<1> : rows == 2 ? product_row<2> : rows == 3 ? product_row<3> : product_row<4>)(
        a, a_row, a_step, b, b_row, c, c_row, vectors, depth, add);
}

// Sequences of a stream [tokens, heads, dim], group by group: all of a group see the tokens of its first as well.
struct PromptGroups {
    const int64_t *sequences;  // [sequences, 2]: first token, tokens
    const int64_t *ends;       // [prompt_groups + 1]: where each begins among them, and where the last one ends
    long key_heads, group, dim, wide;  // group: query heads of a key head
    // wide: keys of the longest sequence with those before it, in whole vectors
};

// One key head of one group. Keys and values of the first sequence stay; behind them come another one's own.
template <class T> struct PromptGroup {
    PromptGroups all;
    long head, before = 0;
    std::vector<float> keys, turned_keys, values, turned_values, query, grad, p, ds, dk, dv;

    PromptGroup(PromptGroups all, long head, bool backward) : all(all), head(head) {
        size_t tokens = all.wide * all.dim, pairs = all.wide * all.wide;
        for (auto *room : {&turned_keys, &values}) room->resize(tokens);
        query.resize(tokens);
        p.resize(backward ? pairs : TILE * all.wide);
        if (!backward) return;
        for (auto *room : {&keys, &turned_values, &grad, &dk, &dv}) room->resize(tokens);
        ds.resize(pairs);
    }

    const T *key(const T *stream, long token) const { return stream + (token * all.key_heads + head) * all.dim; }
    long query_at(long token, long g) const { return ((token * all.key_heads + head) * all.group + g) * all.dim; }

    void read(const T *k, const T *v, long start, long count) {
        long wide = all.wide, dim = all.dim, end = before + count;
        for (long t = 0; t < count; t++)
            for (long i = 0; i < dim; i += LANES) {
                Floats one = load(key(k, start + t) + i), other = load(key(v, start + t) + i);
                long row = before + t;
                for (int j = 0; j < LANES; j++) turned_keys[(i + j) * wide + row] = one[j];
                store(&values[row * dim + i], other);
                if (keys.empty()) continue;
                store(&keys[row * dim + i], one);
                for (int j = 0; j < LANES; j++) turned_values[(i + j) * wide + row] = other[j];
            }
        for (long i = 0; i < dim; i++)
            for (long row = end; row < vectors_of(end) * LANES; row++) {
                turned_keys[i * wide + row] = 0;
                if (!keys.empty()) turned_values[i * wide + row] = 0;
            }
    }

    void read_rows(const T *stream, long start, long count, long g, std::vector<float> &to) {
        for (long t = 0; t < count; t++)
            for (long i = 0; i < all.dim; i += LANES)
                store(&to[t * all.dim + i], load(stream + query_at(start + t, g) + i));
    }

    // e^(score - largest) of some queries of a sequence, 0 behind what each sees; the sum of each row.
    void weigh_rows(long first, long rows, float scale, float *to, float *mass) {
        long wide = all.wide, vectors = vectors_of(before + first + rows);
        product(&query[first * all.dim], all.dim, 1, turned_keys.data(), wide, to, wide, rows, vectors, all.dim, false);
        for (long r = 0; r < rows; r++) {
            float *row = to + r * wide;
            long seen = before + first + r + 1;
            for (long j = seen; j < vectors * LANES; j++) row[j] = LOWEST;
            float top = top_of(row, seen, scale, LOWEST);
            Floats sums{};
            for (long n = 0; n < vectors; n++) {
                Floats e = exponential(load(row + n * LANES) * scale - top);
                sums += e;
                store(row + n * LANES, e);
            }
            mass[r] = sum_of(sums);
        }
    }

    void forward(const T *q, T *out, long start, long count, float scale) {
        std::vector<float> found(TILE * all.dim);
        float mass[TILE];
        for (long g = 0; g < all.group; g++) {
            read_rows(q, start, count, g, query);
            for (long first = 0; first < count; first += TILE) {
                long rows = std::min(TILE, count - first), seen = before + first + rows;
                weigh_rows(first, rows, scale, p.data(), mass);
                for (long r = 0; r < rows; r++)
                    for (long n = 0; n < vectors_of(seen); n++) {
                        float *at = &p[r * all.wide + n * LANES];
                        store(at, through<T>(load(at)));
                    }
                product(p.data(), all.wide, 1, values.data(), all.dim, found.data(), all.dim, rows,
                        all.dim / LANES, seen, false);
                for (long r = 0; r < rows; r++)
                    for (long i = 0; i < all.dim; i += LANES)
                        store(out + query_at(start + first + r, g) + i, load(&found[r * all.dim + i]) / mass[r]);
            }
        }
    }

    // dV = P' dO, dP = dO V', dS = s P (dP - sum(P dP)), dQ = dS K, dK = dS' Q.
    void backward(const T *q, const T *dout, T *dq, long start, long count, float scale) {
        long wide = all.wide, dim = all.dim, end = before + count;
        float mass[TILE];
        std::vector<float> found(TILE * dim);
        for (long g = 0; g < all.group; g++) {
            read_rows(q, start, count, g, query);
            read_rows(dout, start, count, g, grad);
            for (long first = 0; first < count; first += TILE) {
                long rows = std::min(TILE, count - first), seen = before + first + rows, vectors = vectors_of(seen);
                weigh_rows(first, rows, scale, &p[first * wide], mass);
                product(&grad[first * dim], dim, 1, turned_values.data(), wide, &ds[first * wide], wide, rows, vectors,
                        dim, false);
                for (long r = 0; r < rows; r++) {
                    float *pr = &p[(first + r) * wide], *dr = &ds[(first + r) * wide];
                    Floats products{};
                    for (long n = 0; n < vectors; n++) {
                        store(pr + n * LANES, load(pr + n * LANES) / mass[r]);
                        products += load(pr + n * LANES) * load(dr + n * LANES);
                    }
                    float mean = sum_of(products);
                    for (long n = 0; n < vectors; n++)
                        store(dr + n * LANES, load(pr + n * LANES) * (load(dr + n * LANES) - mean) * scale);
                }
                product(&ds[first * wide], wide, 1, keys.data(), dim, found.data(), dim, rows, dim / LANES, seen,
                        false);
                for (long r = 0; r < rows; r++)
                    for (long i = 0; i < dim; i += LANES)
                        store(dq + query_at(start + first + r, g) + i, load(&found[r * dim + i]));
            }
            for (long row = 0; row < end; row += TILE) {  // a key is seen by the queries from its own on
                long rows = std::min(TILE, end - row), from = std::max(0L, row - before) / TILE * TILE;
                product(&p[from * wide + row], 1, wide, &grad[from * dim], dim, &dv[row * dim], dim, rows, dim / LANES,
                        count - from, true);
                product(&ds[from * wide + row], 1, wide, &query[from * dim], dim, &dk[row * dim], dim, rows,
                        dim / LANES, count - from, true);
            }
        }
    }

    void write(T *to, const std::vector<float> &from, long row, long start, long count) {
        for (long t = 0; t < count; t++)
            for (long i = 0; i < all.dim; i += LANES)
                store(to + ((start + t) * all.key_heads + head) * all.dim + i, load(&from[(row + t) * all.dim + i]));
    }
};

template <class T>
void short_attention(const T *q, const T *k, const T *v, T *out, const int64_t *sequences, const int64_t *ends,
                     long prompt_groups, long key_heads, long group, long dim, long wide, float scale) {
    PromptGroups all{sequences, ends, key_heads, group, dim, wide};
#pragma omp parallel for schedule(dynamic, 1)
    for (long job = 0; job < prompt_groups * key_heads; job++) {
        PromptGroup<T> one(all, job % key_heads, false);
        for (long s = ends[job / key_heads]; s < ends[job / key_heads + 1]; s++) {
            long start = sequences[2 * s], count = sequences[2 * s + 1];
            one.read(k, v, start, count);
            one.forward(q, out, start, count, scale);
            if (s == ends[job / key_heads]) one.before = count;
        }
    }
}

template <class T>
void short_attention_backward(const T *q, const T *k, const T *v, const T *dout, T *dq, T *dk, T *dv,
                              const int64_t *sequences, const int64_t *ends, long prompt_groups, long key_heads,
                              long group, long dim, long wide, float scale) {
    PromptGroups all{sequences, ends, key_heads, group, dim, wide};
#pragma omp parallel for schedule(dynamic, 1)
    for (long job = 0; job < prompt_groups * key_heads; job++) {
        PromptGroup<T> one(all, job % key_heads, true);
        long first = ends[job / key_heads], end = ends[job / key_heads + 1];
        for (long s = first; s < end; s++) {
            long start = sequences[2 * s], count = sequences[2 * s + 1];
            one.read(k, v, start, count);
            one.backward(q, dout, dq, start, count, scale);
            if (s == first) {
                one.before = count;
                continue;
            }
            for (auto [to, from] : {std::pair{dk, &one.dk}, std::pair{dv, &one.dv}}) {
                one.write(to, *from, one.before, start, count);
                std::fill(from->begin() + one.before * dim, from->begin() + (one.before + count) * dim, 0.0f);
            }
        }
        one.write(dk, one.dk, 0, sequences[2 * first], one.before);
        one.write(dv, one.dv, 0, sequences[2 * first], one.before);
    }
}

}  // namespace
