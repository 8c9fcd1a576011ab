// Float vectors of the machine's width, and the operations on them that kernels use.
//
// Every operation is the same arithmetic at every width, so a result depends only on the order of a kernel's
// operations.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <utility>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace tandem {

inline float from_half(std::uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float magnitude = exponent == 0    ? std::ldexp(static_cast<float>(fraction), -24)
                            : exponent == 31 ? (fraction ? NAN : INFINITY)
                                             : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
    return bits >> 15 ? -magnitude : magnitude;
}

// `field<kBits, kShift>(words)` returns the kBits bits from bit kShift on of each word, as floats.
template <int kBits>
constexpr std::uint32_t kFieldMask = (1u << kBits) - 1;

// Further operations on words: `shifted` moves bits down. `add_bit<kShift>(v, words, x)` adds x where bit kShift is set.
// `float4_field<kShift>` returns four bits as the e2m1 number that they encode. `float8_field<kShift>` returns eight as
// the e4m3 number times kFloat8Factor, which is exact. `power` returns 2**(word - 127). `widen_bytes` loads bytes as
// words.
constexpr float kFloat8Factor = 0x1p-120f;
constexpr float kFloat4[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
                               -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

#if defined(__AVX512F__)

constexpr int kWidth = 16;
using Vec = __m512;
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec round(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// Returns a * 2**n for integers n in [-126, 127].
inline Vec scale_by_power(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }
inline float max_lane(Vec a) { return _mm512_reduce_max_ps(a); }
using Words = __m512i;
inline Words load_words(const std::uint32_t* p) { return _mm512_loadu_si512(p); }
template <int kBits, int kShift>
inline Vec field(Words w) {
    if constexpr (kBits <= 4) {  // a permutation ignores the bits above the lowest four
        constexpr int m = kFieldMask<kBits>;
        return _mm512_permutexvar_ps(_mm512_srli_epi32(w, kShift),
                                     _mm512_setr_ps(0, 1 & m, 2 & m, 3 & m, 4 & m, 5 & m, 6 & m, 7 & m, 8 & m, 9 & m,
                                                    10 & m, 11 & m, 12 & m, 13 & m, 14 & m, 15 & m));
    } else {
        return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(w, kShift), _mm512_set1_epi32(kFieldMask<kBits>)));
    }
}
inline Words shifted(Words w, int count) { return _mm512_srl_epi32(w, _mm_cvtsi32_si128(count)); }
template <int kShift>
inline Vec add_bit(Vec v, Words w, float x) {
    return _mm512_mask_add_ps(v, _mm512_test_epi32_mask(w, _mm512_set1_epi32(1u << kShift)), v, _mm512_set1_ps(x));
}
template <int kShift>
inline Vec float4_field(Words w) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(w, kShift), _mm512_loadu_ps(kFloat4));
}
template <int kShift>
inline Vec float8_field(Words w) {
    const __m512i spread = _mm512_srai_epi32(_mm512_slli_epi32(w, 24 - kShift), 4);
    return _mm512_castsi512_ps(_mm512_and_si512(spread, _mm512_set1_epi32(0x87f00000)));
}
inline Vec power(Words w) {
    return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_slli_epi32(w, 23), _mm512_set1_epi32(0x00400000)));
}
inline Words widen_bytes(const std::uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load_half(const std::uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Vec load_bfloat(const std::uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
// Loads columns [column, column + 4) of kWidth rows, one vector per column.
inline void load_columns(const float* const* rows, int column, Vec (&out)[4]) {
    Vec q[4];  // row 4 * i + j in quarter i of q[j]
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        q[j] = _mm512_castps128_ps512(_mm_loadu_ps(rows[j] + column));
        q[j] = _mm512_insertf32x4(q[j], _mm_loadu_ps(rows[4 + j] + column), 1);
        q[j] = _mm512_insertf32x4(q[j], _mm_loadu_ps(rows[8 + j] + column), 2);
        q[j] = _mm512_insertf32x4(q[j], _mm_loadu_ps(rows[12 + j] + column), 3);
    }
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(q[0], q[1]));
    const __m512d b = _mm512_castps_pd(_mm512_unpacklo_ps(q[2], q[3]));
    const __m512d c = _mm512_castps_pd(_mm512_unpackhi_ps(q[0], q[1]));
    const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(q[2], q[3]));
    out[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
    out[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    out[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d));
    out[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

constexpr int kWidth = 8;
using Vec = __m256;
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec splat(float x) { return _mm256_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec round(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec scale_by_power(Vec a, Vec n) {
    __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(exponent));
}
inline float max_lane(Vec a) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
using Words = __m256i;
inline Words load_words(const std::uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
template <int kBits, int kShift>
inline Vec field(Words w) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(w, kShift), _mm256_set1_epi32(kFieldMask<kBits>)));
}
inline Words shifted(Words w, int count) { return _mm256_srl_epi32(w, _mm_cvtsi32_si128(count)); }
template <int kShift>
inline Vec add_bit(Vec v, Words w, float x) {
    const __m256i is_set = _mm256_srai_epi32(_mm256_slli_epi32(w, 31 - kShift), 31);
    return _mm256_add_ps(v, _mm256_and_ps(_mm256_castsi256_ps(is_set), _mm256_set1_ps(x)));
}
template <int kShift>
inline Vec float4_field(Words w) {
    const __m256i code = _mm256_srli_epi32(w, kShift);  // a permutation ignores the bits above the lowest three
    const __m256 magnitude = _mm256_permutevar8x32_ps(_mm256_loadu_ps(kFloat4), code);
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(code, 28), _mm256_set1_epi32(0x80000000));
    return _mm256_or_ps(magnitude, _mm256_castsi256_ps(sign));
}
template <int kShift>
inline Vec float8_field(Words w) {
    const __m256i spread = _mm256_srai_epi32(_mm256_slli_epi32(w, 24 - kShift), 4);
    return _mm256_castsi256_ps(_mm256_and_si256(spread, _mm256_set1_epi32(0x87f00000)));
}
inline Vec power(Words w) {
    return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_slli_epi32(w, 23), _mm256_set1_epi32(0x00400000)));
}
inline Words widen_bytes(const std::uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load_half(const std::uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load_bfloat(const std::uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline void load_columns(const float* const* rows, int column, Vec (&out)[4]) {
    Vec q[4];  // row 4 * i + j in half i of q[j]
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j)
        q[j] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[j] + column)),
                                    _mm_loadu_ps(rows[4 + j] + column), 1);
    const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(q[0], q[1]));
    const __m256d b = _mm256_castps_pd(_mm256_unpacklo_ps(q[2], q[3]));
    const __m256d c = _mm256_castps_pd(_mm256_unpackhi_ps(q[0], q[1]));
    const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(q[2], q[3]));
    out[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
    out[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
    out[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(c, d));
    out[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(c, d));
}

#else  // any other machine: plain loops, vectorised by the compiler where it can

constexpr int kWidth = 8;
struct Vec {
    float lane[kWidth];
};
template <typename F>
inline Vec each(F f) {
    Vec r;
    for (int i = 0; i < kWidth; ++i) r.lane[i] = f(i);
    return r;
}
inline Vec load(const float* p) {
    return each([&](int i) { return p[i]; });
}
inline void store(float* p, Vec v) {
    for (int i = 0; i < kWidth; ++i) p[i] = v.lane[i];
}
inline Vec splat(float x) {
    return each([&](int) { return x; });
}
inline Vec fma(Vec a, Vec b, Vec c) {
    return each([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
}
inline Vec add(Vec a, Vec b) {
    return each([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline Vec sub(Vec a, Vec b) {
    return each([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline Vec mul(Vec a, Vec b) {
    return each([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline Vec div(Vec a, Vec b) {
    return each([&](int i) { return a.lane[i] / b.lane[i]; });
}
inline Vec max(Vec a, Vec b) {
    return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Vec min(Vec a, Vec b) {
    return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Vec round(Vec a) {
    return each([&](int i) { return std::nearbyintf(a.lane[i]); });
}
inline Vec scale_by_power(Vec a, Vec n) {
    return each([&](int i) { return std::ldexp(a.lane[i], static_cast<int>(n.lane[i])); });
}
inline float max_lane(Vec a) {
    float m = a.lane[0];
    for (int i = 1; i < kWidth; ++i) m = a.lane[i] > m ? a.lane[i] : m;
    return m;
}
struct Words {
    std::uint32_t lane[kWidth];
};
inline Words load_words(const std::uint32_t* p) {
    Words r;
    for (int i = 0; i < kWidth; ++i) r.lane[i] = p[i];
    return r;
}
template <int kBits, int kShift>
inline Vec field(const Words& w) {
    return each([&](int i) { return static_cast<float>((w.lane[i] >> kShift) & kFieldMask<kBits>); });
}
inline Words shifted(Words w, int count) {
    for (std::uint32_t& lane : w.lane) lane >>= count;
    return w;
}
template <int kShift>
inline Vec add_bit(Vec v, const Words& w, float x) {
    return each([&](int i) { return w.lane[i] >> kShift & 1 ? v.lane[i] + x : v.lane[i]; });
}
template <int kShift>
inline Vec float4_field(const Words& w) {
    return each([&](int i) { return kFloat4[w.lane[i] >> kShift & 15]; });
}
template <int kShift>
inline Vec float8_field(const Words& w) {
    return each([&](int i) {
        const std::uint32_t byte = w.lane[i] >> kShift & 255;
        return std::bit_cast<float>((byte & 128) << 24 | (byte & 127) << 20);
    });
}
inline Vec power(const Words& w) {
    return each([&](int i) { return std::bit_cast<float>(w.lane[i] ? w.lane[i] << 23 : 0x00400000u); });
}
inline Words widen_bytes(const std::uint8_t* p) {
    Words r;
    for (int i = 0; i < kWidth; ++i) r.lane[i] = p[i];
    return r;
}
inline Vec load_half(const std::uint16_t* p) {
    return each([&](int i) { return from_half(p[i]); });
}
inline Vec load_bfloat(const std::uint16_t* p) {
    return each([&](int i) { return std::bit_cast<float>(std::uint32_t(p[i]) << 16); });
}
inline void load_columns(const float* const* rows, int column, Vec (&out)[4]) {
    for (int j = 0; j < 4; ++j) out[j] = each([&](int i) { return rows[i][column + j]; });
}

#endif

inline Vec zero() { return splat(0.0f); }

// Calls `f.operator()<I>()` for I from 0 to N - 1. The compiler keeps an array of vectors in registers only if all its
// indices are constants when it splits arrays up, which is before it unrolls loops, and if the functions and lambdas
// that use the array are inlined by then: mark these TANDEM_INLINE. A function that only prefetches needs the mark too:
// the compiler drops calls of it, because it has no result.
#define TANDEM_INLINE __attribute__((always_inline))
template <int N, typename F>
TANDEM_INLINE inline void repeat(F f) {
    [&]<int... I>(std::integer_sequence<int, I...>) TANDEM_INLINE {
        (f.template operator()<I>(), ...);
    }(std::make_integer_sequence<int, N>());
}

// Returns e**x to about 1 ulp for x in [-87, 88], clamped outside: Cody-Waite reduction, polynomial of degree 6.
inline Vec exp(Vec x) {
    x = min(max(x, splat(-87.0f)), splat(88.0f));
    const Vec n = round(mul(x, splat(1.44269504088896341f)));
    Vec r = fma(n, splat(-0.693145751953125f), x);
    r = fma(n, splat(-1.428606765330187045e-06f), r);
    Vec p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(mul(r, r), p, add(r, splat(1.0f)));
    return scale_by_power(p, n);
}

// Returns 2**x to about 1 ulp for x up to 127, clamped at -126: minimax polynomial of degree 6 over [-1/2, 1/2]. 2**0
// is exactly 1.
inline Vec exp2(Vec x) {
    x = max(x, splat(-126.0f));
    const Vec n = round(x);
    const Vec r = sub(x, n);
    Vec p = splat(1.5353362e-4f);
    p = fma(p, r, splat(1.3398875e-3f));
    p = fma(p, r, splat(9.6184369e-3f));
    p = fma(p, r, splat(5.5503324e-2f));
    p = fma(p, r, splat(2.4022648e-1f));
    p = fma(p, r, splat(6.9314718e-1f));
    p = fma(p, r, splat(1.0f));
    return scale_by_power(p, n);
}

}  // namespace tandem
