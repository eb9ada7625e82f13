// What a layer does between its products: norms, gates, rotations, each way in one pass over memory.
#pragma once

#include "vectors.h"

namespace {

constexpr long CHUNK = 64;      // rows of a partial sum
constexpr long MAX_DIM = 1024;  // of a head

// The value of an activation and its slope: 0 is silu, 1 is gelu by tanh.
template <int KIND> inline Floats activation(Floats x, Floats &slope) {
    if (KIND == 0) {
        Floats s = 1.0f / (1.0f + exponential(-x));
        slope = s * (1.0f + x * (1.0f - s));
        return x * s;
    }
    Floats t = tangent(0.7978845608028654f * (x + 0.044715f * x * x * x));
    slope = 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * 0.7978845608028654f * (1.0f + 0.134145f * x * x);
    return 0.5f * x * (1.0f + t);
}

template <class T> inline float scale_of(const T *x, long columns, float eps) {
    Floats squares{};
    for (long i = 0; i < columns; i += LANES) {
        Floats part = load(x + i, columns - i);
        squares += part * part;
    }
    return 1.0f / std::sqrt(sum_of(squares) / columns + eps);
}

// x / rms(x) * weight.
inline Floats normed(Floats x, float scale, Floats weight, bool unit) {
    return x * scale * (unit ? 1.0f + weight : weight);
}

// sum = x + branch, y = norm(sum). S: the type of the stream between layers.
template <class S, class T>
void add_norm(const S *x, const T *branch, const T *weight, T *y, S *sum, float *scale, long rows, long columns,
              float eps, bool unit) {
#pragma omp parallel for if (rows * columns > SMALL)
    for (long row = 0; row < rows; row++) {
        const S *from = x + row * columns;
        if (branch) {
            S *kept = sum + row * columns;
            for (long i = 0; i < columns; i += LANES) {
                long left = columns - i;
                store(kept + i, load(from + i, left) + load(branch + row * columns + i, left), left);
            }
            from = kept;
        }
        float s = scale[row] = scale_of(from, columns, eps);
        for (long i = 0; i < columns; i += LANES) {
            long left = columns - i;
            store(y + row * columns + i, normed(load(from + i, left), s, load(weight + i, left), unit), left);
        }
    }
}

// dx = (w dy - x^ mean(w dy x^)) / rms, with x^ = x / rms. `more` is added to what is stored, in `narrow` as well if
// it is there; dy x^ is added to `sums`.
template <class S, class T, class G>
inline void norm_backward(const G *dy, const S *x, const T *weight, const S *more, float scale, S *dx, T *narrow,
                          float *sums, long columns, bool unit) {
    float one = unit ? 1.0f : 0.0f;
    Floats products{};
    for (long i = 0; i < columns; i += LANES) {
        long left = columns - i;
        Floats by_weight = load(dy + i, left) * (load(x + i, left) * scale);
        products += by_weight * (load(weight + i, left) + one);
        if (sums) store(sums + i, load(sums + i, left) + by_weight, left);
    }
    float mean = sum_of(products) / columns;
    for (long i = 0; i < columns; i += LANES) {
        long left = columns - i;
        Floats d = load(dy + i, left) * (load(weight + i, left) + one) - load(x + i, left) * scale * mean;
        d *= scale;
        if (more) d += load(more + i, left);
        store(dx + i, d, left);
        if (narrow) store(narrow + i, d, left);
    }
}

template <class S, class T>
void add_norm_backward(const T *dy, const S *dsum, const S *x, const T *weight, const float *scale, S *dx, T *dbranch,
                       float *by_weight, long rows, long columns, bool unit) {
    long chunks = (rows + CHUNK - 1) / CHUNK;
#pragma omp parallel for if (rows * columns > SMALL)
    for (long chunk = 0; chunk < chunks; chunk++) {
        float *sums = by_weight ? by_weight + chunk * columns : nullptr;
        if (sums) memset(sums, 0, columns * sizeof(float));
        long end = std::min(rows, (chunk + 1) * CHUNK);
        for (long row = chunk * CHUNK; row < end; row++) {
            long at = row * columns;
            norm_backward(dy + at, x + at, weight, dsum ? dsum + at : nullptr, scale[row], dx + at,
                          dbranch ? dbranch + at : nullptr, sums, columns, unit);
        }
    }
}

template <class T, int KIND> void gate(const T *both, T *out, long rows, long columns) {
#pragma omp parallel for if (rows * columns > SMALL)
    for (long row = 0; row < rows; row++) {
        const T *gates = both + row * 2 * columns, *ups = gates + columns;
        for (long i = 0; i < columns; i += LANES) {
            long left = columns - i;
            Floats slope, value = activation<KIND>(load(gates + i, left), slope);
            store(out + row * columns + i, value * load(ups + i, left), left);
        }
    }
}

template <class T, int KIND>
void gate_backward(const T *dout, const T *both, T *dboth, T *out, long rows, long columns) {
#pragma omp parallel for if (rows * columns > SMALL)
    for (long row = 0; row < rows; row++) {
        const T *gates = both + row * 2 * columns, *ups = gates + columns;
        T *dgates = dboth + row * 2 * columns, *dups = dgates + columns;
        for (long i = 0; i < columns; i += LANES) {
            long left = columns - i;
            Floats slope, value = activation<KIND>(load(gates + i, left), slope);
            Floats by = load(dout + row * columns + i, left), up = load(ups + i, left);
            store(dgates + i, by * up * slope, left);
            store(dups + i, by * value, left);
            store(out + row * columns + i, value * up, left);
        }
    }
}

template <class T> void gated(const T *both, T *out, long rows, long columns, long kind) {
    (kind ? gate<T, 1> : gate<T, 0>)(both, out, rows, columns);
}

template <class T>
void gated_backward(const T *dout, const T *both, T *dboth, T *out, long rows, long columns, long kind) {
    (kind ? gate_backward<T, 1> : gate_backward<T, 0>)(dout, both, dboth, out, rows, columns);
}

// The rotation of one head by cos and sin.
template <class S, class T> inline void rotate(const S *x, const T *cos, const T *sin, T *to, long dim) {
    long half = dim / 2;
    for (long i = 0; i < half; i += LANES) {
        long j = half + i, left = half - i;
        Floats a = load(x + i, left), b = load(x + j, left);
        store(to + i, a * load(cos + i, left) - b * load(sin + i, left), left);
        store(to + j, b * load(cos + j, left) + a * load(sin + j, left), left);
    }
}

// One head: its norm, if a weight is given, then the rotation.
template <class T>
inline void turn(const T *x, const T *weight, const T *cos, const T *sin, T *to, long dim, float eps, bool unit) {
    if (!weight) return rotate(x, cos, sin, to, dim);
    float room[MAX_DIM], scale = scale_of(x, dim, eps);
    for (long i = 0; i < dim; i += LANES)
        store(room + i, normed(load(x + i, dim - i), scale, load(weight + i, dim - i), unit), dim - i);
    rotate(room, cos, sin, to, dim);
}

// qkv [tokens, (queries + 2 keys) dim] -> q, k, v; with places, keys and values of a token go to row place[token].
template <class T>
void rotary(const T *qkv, const T *cos, const T *sin, const T *by_queries, const T *by_keys, T *q, T *k, T *v,
            const int64_t *place, long tokens, long queries, long keys, long dim, float eps, bool unit) {
    long heads = queries + 2 * keys;
#pragma omp parallel for if (tokens * heads * dim > SMALL)
    for (long token = 0; token < tokens; token++) {
        const T *from = qkv + token * heads * dim, *c = cos + token * dim, *s = sin + token * dim;
        long row = place ? place[token] : token;
        for (long head = 0; head < queries; head++)
            turn(from + head * dim, by_queries, c, s, q + (token * queries + head) * dim, dim, eps, unit);
        for (long head = 0; head < keys; head++)
            turn(from + (queries + head) * dim, by_keys, c, s, k + (row * keys + head) * dim, dim, eps, unit);
        memcpy(v + row * keys * dim, from + (queries + keys) * dim, keys * dim * sizeof(T));
    }
}

// One head's gradient: the transposed rotation, then that of the norm.
template <class T>
inline void turn_back(const T *dy, const T *x, const T *weight, const T *cos, const T *sin, T *to, float *sums,
                      long dim, float eps, bool unit) {
    float d[MAX_DIM];
    long half = dim / 2;
    for (long i = 0; i < half; i += LANES) {
        long j = half + i, left = half - i;
        Floats a = load(dy + i, left), b = load(dy + j, left);
        store(d + i, a * load(cos + i, left) + b * load(sin + j, left), left);
        store(d + j, b * load(cos + j, left) - a * load(sin + i, left), left);
    }
    const T *nothing = nullptr;
    if (weight)
        return norm_backward(d, x, weight, nothing, scale_of(x, dim, eps), to, (T *)nullptr, sums, dim, unit);
    for (long i = 0; i < dim; i += LANES) store(to + i, load(d + i, dim - i), dim - i);
}

template <class T>
void rotary_backward(const T *dq, const T *dk, const T *dv, const T *qkv, const T *cos, const T *sin,
                     const T *by_queries, const T *by_keys, T *dqkv, float *sums, long tokens, long queries, long keys,
                     long dim, float eps, bool unit) {
    long heads = queries + 2 * keys, chunks = (tokens + CHUNK - 1) / CHUNK;
#pragma omp parallel for if (tokens * heads * dim > SMALL)
    for (long chunk = 0; chunk < chunks; chunk++) {
        float *of_queries = sums ? sums + chunk * dim : nullptr, *of_keys = sums ? of_queries + chunks * dim : nullptr;
        for (long i = 0; sums && i < dim; i++) of_queries[i] = of_keys[i] = 0;
        long end = std::min(tokens, (chunk + 1) * CHUNK);
        for (long token = chunk * CHUNK; token < end; token++) {
            const T *c = cos + token * dim, *s = sin + token * dim, *read = qkv + token * heads * dim;
            T *to = dqkv + token * heads * dim;
            for (long head = 0; head < queries; head++)
                turn_back(dq + (token * queries + head) * dim, read + head * dim, by_queries, c, s, to + head * dim,
                          of_queries, dim, eps, unit);
            for (long head = 0; head < keys; head++)
                turn_back(dk + (token * keys + head) * dim, read + (queries + head) * dim, by_keys, c, s,
                          to + (queries + head) * dim, of_keys, dim, eps, unit);
            memcpy(to + (queries + keys) * dim, dv + token * keys * dim, keys * dim * sizeof(T));
        }
    }
}

}  // namespace
