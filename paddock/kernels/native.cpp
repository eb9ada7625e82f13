// The kernels of a CPU: what those beside this file are to a GPU, with the same names, roundings and layouts.
//
// Each is one pass over memory. Rows are shared among OpenMP's threads, and a row's numbers do not depend on how many
// there are; sums over rows are made in parts of CHUNK rows, which Python adds up. native.py calls what `find` finds;
// compiler.py compiles this file for the machine it runs on.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr long CHUNK = 64;          // rows of a partial sum
constexpr long SMALL = 1 << 13;     // numbers that are not worth waking a thread for
constexpr long BLOCK = 256;         // words whose probabilities are summed before a draw looks inside
constexpr long MAX_DIM = 1024;      // of a head
constexpr double LAST = 1.0 - 0x1p-53;
constexpr float LOWEST = -3.4028234663852886e38f;

struct bf16 {
    uint16_t bits;
};

// Sixteen numbers at once, on whatever vectors the processor has.
constexpr long LANES = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef float Eight __attribute__((vector_size(32)));
typedef float Four __attribute__((vector_size(16)));

inline Floats all(float x) { return Floats{} + x; }

inline Floats widened(Halves x) {
#ifdef __AVX512F__
    return Floats(Words(_mm512_cvtepu16_epi32(__m256i(x))) << 16);
#else
    return Floats(__builtin_convertvector(x, Words) << 16);
#endif
}

inline Halves narrowed(Floats x) {  // to nearest, ties to even
#ifdef __AVX512BF16__
    return Halves(_mm512_cvtneps_pbh(__m512(x)));
#else
    Words bits = Words(x), up = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector(Ints(x != x) ? Words{} + 0x7fc0 : up, Halves);
#endif
}

inline Floats load(const float *from) {
    Floats x;
    memcpy(&x, from, sizeof x);
    return x;
}
inline Floats load(const bf16 *from) {
    Halves x;
    memcpy(&x, from, sizeof x);
    return widened(x);
}
inline void store(float *to, Floats x) { memcpy(to, &x, sizeof x); }
inline void store(bf16 *to, Floats x) {
    Halves narrow = narrowed(x);
    memcpy(to, &narrow, sizeof narrow);
}

// The same at the end of a row, where fewer than sixteen may be left; what is not there reads as 0.
template <class T> inline Floats load(const T *from, long left) {
    if (left >= LANES) return load(from);
    T some[LANES] = {};
    memcpy(some, from, left * sizeof(T));
    return load(some);
}
template <class T> inline void store(T *to, Floats x, long left) {
    if (left >= LANES) return store(to, x);
    T some[LANES];
    store(some, x);
    memcpy(to, some, left * sizeof(T));
}

// A number as it is read back from where it was stored.
template <class T> inline Floats through(Floats x);
template <> inline Floats through<float>(Floats x) { return x; }
template <> inline Floats through<bf16>(Floats x) { return widened(narrowed(x)); }

inline float sum_of(Floats x) {
    Eight eights[2];
    memcpy(eights, &x, sizeof x);
    Eight eight = eights[0] + eights[1];
    Four fours[2];
    memcpy(fours, &eight, sizeof eight);
    Four four = fours[0] + fours[1];
    return (four[0] + four[1]) + (four[2] + four[3]);
}

inline Floats larger(Floats x, Floats y) { return x > y ? x : y; }

inline float largest(Floats x) {
    Eight eights[2];
    memcpy(eights, &x, sizeof x);
    Eight eight = eights[0] > eights[1] ? eights[0] : eights[1];
    Four fours[2];
    memcpy(fours, &eight, sizeof eight);
    Four four = fours[0] > fours[1] ? fours[0] : fours[1];
    return std::max(std::max(four[0], four[1]), std::max(four[2], four[3]));
}

// Within 2e-7 of e^x; 0 below the smallest normal number, and no more than e^88 above.
inline Floats exponential(Floats x) {
    Floats y = x > 88.0f ? all(88.0f) : x;
    y = y < -87.0f ? all(-87.0f) : y;
    Floats n = (y * 1.44269504088896341f + 12582912.0f) - 12582912.0f;  // rounded to a whole number
    Floats r = y - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Floats scale = Floats((__builtin_convertvector(n, Ints) + 127) << 23);
    return x < -87.0f ? Floats{} : p * scale;
}
inline float exponential(float x) { return exponential(all(x))[0]; }

inline Floats tangent(Floats x) { return 1.0f - 2.0f / (1.0f + exponential(2.0f * x)); }
inline float tangent(float x) { return tangent(all(x))[0]; }

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

// x / rms(x) * weight, rounded where transformers rounds.
template <class T> inline Floats normed(Floats x, float scale, Floats weight, bool unit) {
    return unit ? x * scale * (1.0f + weight) : through<T>(x * scale) * weight;
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
            store(y + row * columns + i, normed<T>(load(from + i, left), s, load(weight + i, left), unit), left);
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
            store(out + row * columns + i, through<T>(value) * load(ups + i, left), left);
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
            store(out + row * columns + i, through<T>(value) * up, left);
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

// One head: its norm, if a weight is given, then the rotation by cos and sin.
template <class T>
inline void turn(const T *x, const T *weight, const T *cos, const T *sin, T *to, long dim, float eps, bool unit) {
    T room[MAX_DIM];
    if (weight) {
        float scale = scale_of(x, dim, eps);
        for (long i = 0; i < dim; i += LANES)
            store(room + i, normed<T>(load(x + i, dim - i), scale, load(weight + i, dim - i), unit), dim - i);
        x = room;
    }
    long half = dim / 2;
    for (long i = 0; i < half; i += LANES) {
        long j = half + i, left = half - i;
        Floats a = load(x + i, left), b = load(x + j, left);
        store(to + i, through<T>(a * load(cos + i, left)) - through<T>(b * load(sin + i, left)), left);
        store(to + j, through<T>(b * load(cos + j, left)) + through<T>(a * load(sin + j, left)), left);
    }
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

// Where the tokens of each sequence lie: see arguments.py.
struct Pieces {
    const int32_t *prompt, *prompt_length, *answer;
    const int64_t *length;
};

// The queries of one sequence that share a key head, over its tokens. N vectors make a head; 0: another number.
template <class T, int N>
void attend_head(const T *q, const T *keys, const T *values, T *out, Pieces at, long row, long head, long key_heads,
                 long group, long any_dim, float scale, float softcap, long window, const float *sinks) {
    const long dim = N ? N * LANES : any_dim, vectors = N ? N : (dim + LANES - 1) / LANES, stride = key_heads * dim;
    const long end = at.length[row] + 1, prompt = at.prompt_length[row];
    const long first = window > 0 && end > window ? end - window : 0, count = end - first;
    const long shared = at.prompt[row], own = at.answer[row] - prompt;
    static thread_local std::vector<float> room;
    if (long(room.size()) < count + LANES) room.resize(count + LANES);
    float *scores = room.data();
    Floats query[N ? N : MAX_DIM / LANES], total[N ? N : MAX_DIM / LANES];
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
#pragma omp parallel for schedule(dynamic, 8)
    for (long job = 0; job < rows * key_heads; job++)
        attend(q, keys, values, out, at, job / key_heads, job % key_heads, key_heads, group, dim, scale, softcap,
               window, sinks);
}

// e^(x - top) of a block of words, and their sum.
inline float weigh(const float *x, float *weight, long count, float inverse, float top) {
    Floats sums{};
    for (long i = 0; i < count; i += LANES) {
        store(weight + i, exponential(load(x + i, count - i) * inverse - top), count - i);
        sums += load(weight + i, count - i);
    }
    return sum_of(sums);
}

inline float top_of(const float *x, long count, float inverse, float least) {
    Floats tops = all(least);
    long whole = count - count % LANES;
    for (long i = 0; i < whole; i += LANES) tops = larger(load(x + i) * inverse, tops);
    float top = largest(tops);
    for (long i = whole; i < count; i++) top = x[i] * inverse > top ? x[i] * inverse : top;
    return top;
}

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

inline long vectors_of(long count) { return (count + LANES - 1) / LANES; }

// Sequences of a stream [tokens, heads, dim], family by family: all of a family see the tokens of its first as well.
struct Families {
    const int64_t *sequences;  // [sequences, 2]: first token, tokens
    const int64_t *ends;       // [families + 1]: where each begins among them, and where the last one ends
    long key_heads, group, dim, wide;  // wide: keys of the longest sequence with those before it, in whole vectors
};

// One key head of one family. Keys and values of the first sequence stay; behind them come another one's own.
template <class T> struct Family {
    Families all;
    long head, before = 0;
    std::vector<float> keys, turned_keys, values, turned_values, query, grad, p, ds, dk, dv;

    Family(Families all, long head, bool backward) : all(all), head(head) {
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
        std::vector<float> &found = grad;  // of a tile
        found.resize(std::max(found.size(), size_t(TILE * all.dim)));
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
void family_attention(const T *q, const T *k, const T *v, T *out, const int64_t *sequences, const int64_t *ends,
                      long families, long key_heads, long group, long dim, long wide, float scale) {
    Families all{sequences, ends, key_heads, group, dim, wide};
#pragma omp parallel for schedule(dynamic, 1)
    for (long job = 0; job < families * key_heads; job++) {
        Family<T> one(all, job % key_heads, false);
        for (long s = ends[job / key_heads]; s < ends[job / key_heads + 1]; s++) {
            long start = sequences[2 * s], count = sequences[2 * s + 1];
            one.read(k, v, start, count);
            one.forward(q, out, start, count, scale);
            if (s == ends[job / key_heads]) one.before = count;
        }
    }
}

template <class T>
void family_attention_backward(const T *q, const T *k, const T *v, const T *dout, T *dq, T *dk, T *dv,
                               const int64_t *sequences, const int64_t *ends, long families, long key_heads,
                               long group, long dim, long wide, float scale) {
    Families all{sequences, ends, key_heads, group, dim, wide};
#pragma omp parallel for schedule(dynamic, 1)
    for (long job = 0; job < families * key_heads; job++) {
        Family<T> one(all, job % key_heads, true);
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
    static thread_local std::vector<float> room, sums;
    room.resize(BLOCK);
    sums.clear();
    double mass = 0;
    for (long start = 0; start < words; start += BLOCK) {
        sums.push_back(weigh(x + start, room.data(), std::min(BLOCK, words - start), inverse, top));
        mass += sums.back();
    }
    total = float(mass);
    double target = u * mass, before = 0, inside = 0;
    long block = first_above(sums.data(), long(sums.size()), target), count = std::min(BLOCK, words - block * BLOCK);
    for (long i = 0; i < block; i++) before += sums[i];
    weigh(x + block * BLOCK, room.data(), count, inverse, top);
    for (long i = 0; i < count; i++) inside += room[i];
    double share = std::min((target - before) / sums[block], LAST);
    return block * BLOCK + first_above(room.data(), count, share * inside);
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

// A kernel by its name, for numbers in float32 or in bfloat16, in the stream between layers too.
extern "C" const void *find(const char *name, bool narrow, bool narrow_stream) {
#define KERNEL(NAME)                                                                                                   \
    if (!strcmp(name, #NAME)) return narrow ? (const void *)NAME<bf16> : (const void *)NAME<float>;
#define STREAM(NAME)                                                                                                   \
    if (!strcmp(name, #NAME))                                                                                          \
        return !narrow ? (const void *)NAME<float, float>                                                              \
                       : narrow_stream ? (const void *)NAME<bf16, bf16> : (const void *)NAME<float, bf16>;
    STREAM(add_norm)
    STREAM(add_norm_backward)
    KERNEL(gated)
    KERNEL(gated_backward)
    KERNEL(rotary)
    KERNEL(rotary_backward)
    KERNEL(decode_attention)
    KERNEL(family_attention)
    KERNEL(family_attention_backward)
    KERNEL(gradient)
    if (!strcmp(name, "draw")) return (const void *)draw;
    if (!strcmp(name, "gather")) return (const void *)gather;
    return nullptr;
}
