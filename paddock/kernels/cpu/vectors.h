// Sixteen numbers at once, in float32, read and written as float32 or bfloat16.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr long SMALL = 1 << 13;  // numbers that are not worth waking a thread for
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

inline float top_of(const float *x, long count, float inverse, float least) {
    Floats tops = all(least);
    long whole = count - count % LANES;
    for (long i = 0; i < whole; i += LANES) tops = larger(load(x + i) * inverse, tops);
    float top = largest(tops);
    for (long i = whole; i < count; i++) top = x[i] * inverse > top ? x[i] * inverse : top;
    return top;
}

inline long vectors_of(long count) { return (count + LANES - 1) / LANES; }

}  // namespace
