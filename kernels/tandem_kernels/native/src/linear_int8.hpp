// Multiplies int8 rows with weights of linear layers that are coded as integers of at most 8 bits. The bits of an
// element do not depend on other rows, on the number of lanes or on the machine's instructions.
//
// The reference is `linear_int8` of `tandem_kernels.reference` for 8 bits, and `linear_codes` for fewer. Products
// within a group of a row are summed exactly, as integers; groups of a row and then groups of weights are added in
// ascending order by one fused multiply-add each. 8-bit weights are stored as value + 128, because the machine's
// four-way dot products take one unsigned factor; the resulting excess of a group is known from the row alone.
// Machines without such products subtract the 128 again.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "coded.hpp"
#include "panel.hpp"
#include "simd.hpp"
#include "team.hpp"

namespace tandem {

constexpr int kRowGroup = 32;     // components of a row that share a scale
constexpr int kQuad = 4;          // components that one vector dot product sums
constexpr int kQuads = kRowGroup / kQuad;
constexpr float kLevels = 127;    // largest quantised magnitude
constexpr int kWeightZero = 128;  // stored value of a zero weight
constexpr int kSumGroup = 16;     // components of a row whose sum is kept
using Activation = std::int8_t;   // a component of a quantised row

// Ints: kWidth sums. Columns: the quads of kWidth columns. Quad: one quad of a row, broadcast to all columns.
// `byte_fields` returns the same few bits of each byte, and `with_fields` sets others above them. `kept` forces a value
// into a register at this point; otherwise the compiler reorders integer sums until registers run out, or reloads a
// vector of weights for every row.
//
// Without a four-way dot product (TANDEM_BYTE_PRODUCT) unsigned bytes are multiplied with signed ones, and two such
// products are added in 16 bits. Codes of fewer bits are so small that products of several quads fit 16 bits too. An
// 8-bit weight's magnitude is one factor, and the activation, negated if the weight is negative, the other.
#if defined(__AVX512BW__) && defined(__AVX512F__)

using Ints = __m512i;
inline Ints splat_int(std::int32_t x) { return _mm512_set1_epi32(x); }
inline Ints load_ints(const std::uint8_t* p) { return _mm512_loadu_si512(p); }
inline Vec to_float(Ints a) { return _mm512_cvtepi32_ps(a); }
template <int kBits, int kShift>
inline Ints byte_fields(Ints w) {
    return _mm512_and_si512(_mm512_srli_epi16(w, kShift), _mm512_set1_epi8(kFieldMask<kBits>));
}
template <int kShift>
inline Ints with_fields(Ints low, Ints high) { return _mm512_or_si512(low, _mm512_slli_epi16(high, kShift)); }
inline Ints kept(Ints a) {
    asm("" : "+v"(a));
    return a;
}
#if defined(__AVX512VNNI__)
#define TANDEM_QUAD_PRODUCT 1
inline Ints dot_quad(Ints sum, Ints w, Ints x) { return _mm512_dpbusd_epi32(sum, w, x); }
#else
#define TANDEM_BYTE_PRODUCT 1
inline Ints multiply_bytes(Ints w, Ints x) { return _mm512_maddubs_epi16(w, x); }
inline Ints add16(Ints a, Ints b) { return kept(_mm512_add_epi16(a, b)); }
inline Ints add_widened(Ints sum, Ints sums16) {
    return kept(_mm512_add_epi32(sum, _mm512_madd_epi16(sums16, _mm512_set1_epi16(1))));
}
inline Ints signed_of(Ints w) { return _mm512_xor_si512(w, _mm512_set1_epi8(-128)); }
inline Ints magnitudes_of(Ints w) { return _mm512_abs_epi8(w); }
inline Ints with_signs(Ints x, Ints w) {
    return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
}
#endif

#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)

using Ints = __m256i;
inline Ints splat_int(std::int32_t x) { return _mm256_set1_epi32(x); }
inline Ints load_ints(const std::uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Vec to_float(Ints a) { return _mm256_cvtepi32_ps(a); }
template <int kBits, int kShift>
inline Ints byte_fields(Ints w) {
    return _mm256_and_si256(_mm256_srli_epi16(w, kShift), _mm256_set1_epi8(kFieldMask<kBits>));
}
template <int kShift>
inline Ints with_fields(Ints low, Ints high) { return _mm256_or_si256(low, _mm256_slli_epi16(high, kShift)); }
inline Ints kept(Ints a) {
    asm("" : "+x"(a));
    return a;
}
#if defined(__AVXVNNI__)
#define TANDEM_QUAD_PRODUCT 1
inline Ints dot_quad(Ints sum, Ints w, Ints x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
#else
#define TANDEM_BYTE_PRODUCT 1
inline Ints multiply_bytes(Ints w, Ints x) { return _mm256_maddubs_epi16(w, x); }
inline Ints add16(Ints a, Ints b) { return kept(_mm256_add_epi16(a, b)); }
inline Ints add_widened(Ints sum, Ints sums16) {
    return kept(_mm256_add_epi32(sum, _mm256_madd_epi16(sums16, _mm256_set1_epi16(1))));
}
inline Ints signed_of(Ints w) { return _mm256_xor_si256(w, _mm256_set1_epi8(-128)); }
inline Ints magnitudes_of(Ints w) { return _mm256_abs_epi8(w); }
inline Ints with_signs(Ints x, Ints w) { return _mm256_sign_epi8(x, w); }
#endif

#endif

#if defined(TANDEM_QUAD_PRODUCT) || defined(TANDEM_BYTE_PRODUCT)
using Quad = Ints;
inline Quad splat_quad(const Activation* p) {
    std::int32_t four;
    std::memcpy(&four, p, sizeof four);
    return splat_int(four);
}
#endif

#if defined(TANDEM_QUAD_PRODUCT)

constexpr int kExcess = kWeightZero;  // `dot` adds to the product this times the sum of the activations
using Columns = Ints;
inline Columns columns_of(Ints w) { return kept(w); }
inline Ints dot(Ints sum, Columns w, Quad x) { return dot_quad(sum, w, x); }

#elif defined(TANDEM_BYTE_PRODUCT)

constexpr int kExcess = 0;
struct Columns {
    Ints values, magnitudes;
};
inline Columns columns_of(Ints w) {
    const Ints values = kept(signed_of(w));
    return {values, kept(magnitudes_of(values))};
}
inline Ints dot(Ints sum, const Columns& w, Quad x) {
    return add_widened(sum, multiply_bytes(w.magnitudes, with_signs(x, w.values)));
}

#else  // any other machine

constexpr int kExcess = kWeightZero;
struct Ints {
    std::int32_t lane[kWidth];
};
using Columns = Ints;
using Quad = const Activation*;
inline Ints splat_int(std::int32_t x) {
    Ints r;
    for (int i = 0; i < kWidth; ++i) r.lane[i] = x;
    return r;
}
inline Ints load_ints(const std::uint8_t* p) {
    Ints r;
    std::memcpy(r.lane, p, sizeof r.lane);
    return r;
}
template <int kBits, int kShift>
inline Ints byte_fields(Ints w) {
    for (std::int32_t& lane : w.lane) lane = lane >> kShift & (0x01010101 * kFieldMask<kBits>);
    return w;
}
template <int kShift>
inline Ints with_fields(Ints low, const Ints& high) {
    for (int i = 0; i < kWidth; ++i) low.lane[i] |= high.lane[i] << kShift;
    return low;
}
inline Columns columns_of(Ints w) { return w; }
inline Quad splat_quad(const Activation* p) { return p; }
inline Ints dot(Ints sum, const Columns& w, Quad x) {
    for (int i = 0; i < kWidth; ++i)
        for (int j = 0; j < kQuad; ++j) sum.lane[i] += (w.lane[i] >> 8 * j & 255) * x[j];
    return sum;
}
inline Vec to_float(const Ints& a) {
    float lanes[kWidth];
    for (int i = 0; i < kWidth; ++i) lanes[i] = static_cast<float>(a.lane[i]);
    return load(lanes);
}

#endif

inline const std::uint8_t* bytes_of(const Matrix& w, int panel) {
    return reinterpret_cast<const std::uint8_t*>(panel_at(w, panel));
}

// Rows quantised in groups of kRowGroup: value = round(x / scale), scale = largest magnitude / kLevels.
struct Int8Rows {
    Activation* values;     // [m][k]
    float* scales;          // [m][k / kRowGroup]
    std::int32_t* sums;     // [m][k / kSumGroup]: sums of values
    int k;

    // Returns the sum of group g of a row.
    std::int32_t sum(int row, int g) const {
        const std::int32_t* s = sums + (std::size_t(row) * (k / kRowGroup) + g) * (kRowGroup / kSumGroup);
        return s[0] + s[1];
    }
};
static_assert(kRowGroup == 2 * kSumGroup);

// Quantises `x` [k] to row `row`. The values of a group that is all zeros or not finite are zeros; the scale of a group
// that is not finite makes its products NaN.
inline void quantize_row(const float* x, int row, const Int8Rows& out) {
    const int groups = out.k / kRowGroup;
    for (int g = 0; g < groups; ++g, x += kRowGroup) {
        // Magnitudes are ordered like their bits, and a NaN compares as the largest.
        std::int32_t largest = 0;
        for (int i = 0; i < kRowGroup; ++i) {
            const std::int32_t magnitude = std::bit_cast<std::int32_t>(x[i]) & 0x7fffffff;
            largest = magnitude > largest ? magnitude : largest;
        }
        const float scale = std::bit_cast<float>(largest) / kLevels;
        float quotients[kRowGroup] = {};
        if (scale > 0.0f && scale < std::numeric_limits<float>::infinity())
            for (int i = 0; i < kRowGroup; i += kWidth) {
                const Vec q = round(div(load(x + i), splat(scale)));
                // Subnormal scales are coarse, so a quotient may exceed kLevels.
                store(quotients + i, max(min(q, splat(kLevels)), splat(-kLevels)));
            }
        std::int32_t sums[kRowGroup / kSumGroup] = {};
        for (int i = 0; i < kRowGroup; ++i) sums[i / kSumGroup] += static_cast<std::int32_t>(quotients[i]);
        Activation* values = out.values + std::size_t(row) * out.k + g * kRowGroup;
        for (int i = 0; i < kRowGroup; ++i)
            values[i] = static_cast<Activation>(static_cast<std::int32_t>(quotients[i]));
        const std::size_t place = std::size_t(row) * groups + g;
        out.scales[place] = scale;
        std::memcpy(out.sums + place * (kRowGroup / kSumGroup), sums, sizeof sums);
    }
}

// Quantises `m` rows. All lanes call it; no barrier at the end.
inline void quantize_rows(Lane& lane, const float* x, int ldx, int m, const Int8Rows& out) {
    lane.share(m, 4, [&](int begin, int end) {
        for (int r = begin; r < end; ++r) quantize_row(x + std::size_t(r) * ldx, r, out);
    });
}

#if defined(__AVX512F__)
constexpr int kInt8TileRows = 8;  // 16 integer parts in registers, and nearly as many float sums in memory
#else
constexpr int kInt8TileRows = 4;  // 8 parts, 4 vectors of weights, a broadcast and 2 of a product in 16 registers
#endif

// Returns the vectors of columns that a tile of `rows` rows sums in one pass over its panel.
constexpr int int8_tile_vectors(int rows) {
    constexpr int kAll = kPanel / kWidth;
    return kAll <= 2 || rows == 1 ? kAll : 2;
}

constexpr int kLineBytes = 64;
constexpr int kInt8AheadBlocks = 8;  // blocks of kRowGroup components, 4 KiB of 4-bit codes

// Prefetches memory line by line into the L2 cache, from `place` to `end` and then from `after` on.
class LinesAhead {
  public:
    LinesAhead(const std::uint8_t* place, const std::uint8_t* end, const std::uint8_t* after)
        : place_(place), end_(end), after_(after) {
        if (end_ && place_ >= end_) place_ = after_ + (place_ - end_);
    }

    void request(int lines) {
        for (; lines > 0; --lines) {
            __builtin_prefetch(place_, 0, 2);
            place_ += kLineBytes;
            if (place_ == end_) place_ = after_;
        }
    }

  private:
    const std::uint8_t *place_, *end_, *after_;
};
static_assert(kRowGroup == kCodedStep);

// Computes sums[R][kPanel] of R rows from `row` on times a panel of bytes. Prefetches `ahead_lines` lines from `ahead`
// on in every group of components, so that memory is busy during all passes over a panel.
template <int R>
void sum_int8_tile(const Int8Rows& x, int row, const Matrix& w, int panel, LinesAhead ahead, int ahead_lines,
                   float* sums) {
    constexpr int V = int8_tile_vectors(R);
    const int groups = x.k / kRowGroup, group = w.group / kRowGroup;
    for (int first = 0; first < kPanel; first += V * kWidth) {
        const std::uint8_t* quads = bytes_of(w, panel) + first * kQuad;
        const Activation* values = x.values + std::size_t(row) * x.k;
        const float* scales = x.scales + std::size_t(row) * groups;
        ScaleWalk walk(w, panel, 0);
        for (int begin = 0, end = group; begin < groups; begin = end, end += group, walk.advance(w.group)) {
            Vec sum[R][V];
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) sum[r][v] = zero();
            for (int g = begin; g < end; ++g, values += kRowGroup) {
                ahead.request(ahead_lines);
                Ints part[R][V];
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                    for (int v = 0; v < V; ++v) part[r][v] = splat_int(-kExcess * x.sum(row + r, g));
#pragma GCC unroll 8
                for (int q = 0; q < kQuads; ++q, quads += kPanel * kQuad) {
                    Columns columns[V];
#pragma GCC unroll 4
                    for (int v = 0; v < V; ++v) columns[v] = columns_of(load_ints(quads + v * kWidth * kQuad));
#pragma GCC unroll 16
                    for (int r = 0; r < R; ++r) {
                        const Quad quad = splat_quad(values + std::ptrdiff_t(r) * x.k + q * kQuad);
#pragma GCC unroll 4
                        for (int v = 0; v < V; ++v) part[r][v] = dot(part[r][v], columns[v], quad);
                    }
                }
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const Vec scale = splat(scales[r * groups + g]);
#pragma GCC unroll 4
                    for (int v = 0; v < V; ++v) sum[r][v] = fma(scale, to_float(part[r][v]), sum[r][v]);
                }
            }
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                const Vec step = affine_at<Coding::kInt8>(w, walk, first + v * kWidth).step;
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    float* total = sums + r * kPanel + first + v * kWidth;
                    store(total, fma(step, sum[r][v], begin ? load(total) : zero()));
                }
            }
        }
    }
}

// Weight groups of a row's group: integers of 2, 3 and 6 bits have groups of 16, others of at least 32; matrices with
// other groups are not multiplied here.
constexpr int halves_of(Coding coding) {
    return coding == Coding::kInt2 || coding == Coding::kInt3 || coding == Coding::kInt6 ? 2 : 1;
}

// Returns quad Q of a block of codes of kWidth columns as bytes; `p` is the block at the first of these columns.
template <Coding kCoding, int Q>
inline Ints quad_bytes(const std::uint32_t* p) {
    constexpr Planes kPlanes = planes_of(kCoding);
    const auto words = [&](int word) { return load_ints(reinterpret_cast<const std::uint8_t*>(p + word * kPanel)); };
    const auto twos = [&](int plane) { return byte_fields<2, Q % 4 * 2>(words(plane + Q / 4)); };
    Ints low;
    if constexpr (kPlanes.fours != 0)
        low = byte_fields<4, Q % 2 * 4>(words(Q / 2));
    else
        low = twos(0);
    if constexpr (kCoding == Coding::kInt6) return with_fields<4>(low, twos(kPlanes.fours));
    if constexpr (kPlanes.ones != 0)
        return with_fields<kPlanes.fours ? 4 : 2>(low, byte_fields<1, Q>(words(kPlanes.fours + kPlanes.twos)));
    return low;
}

#if defined(TANDEM_BYTE_PRODUCT)

// Number of quads whose products can be summed in 16 bits, two of each in one sum; kMaxCode is the largest code.
template <int kMaxCode>
constexpr int kQuadsOf16Bits = std::min(kQuads, 32767 / (2 * kMaxCode * static_cast<int>(kLevels)));

constexpr int max_code(Coding coding) {
    const Planes planes = planes_of(coding);
    return (1 << (4 * (planes.fours != 0) + 2 * (planes.twos != 0) + (planes.ones != 0))) - 1;
}

// Multiplies quad Q of a block with R rows, and adds the products to `sums16`, or begins these with them.
template <Coding kCoding, int Q, bool kIsFirst, int R, int V>
inline void add_quad16(const std::uint32_t* p, const Activation* values, int k, Ints (&sums16)[R][V]) {
    Ints columns[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) columns[v] = kept(quad_bytes<kCoding, Q>(p + v * kWidth));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        const Quad quad = splat_quad(values + std::ptrdiff_t(r) * k + Q * kQuad);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            const Ints product = multiply_bytes(columns[v], quad);
            sums16[r][v] = kIsFirst ? product : add16(sums16[r][v], product);
        }
    }
}

// Adds the products of quads [kBegin, kBegin + sizeof...(Q)), which fit 16 bits, with R rows to `part`.
template <Coding kCoding, int kBegin, int R, int V, int... Q>
inline void add_run(const std::uint32_t* p, const Activation* values, int k, Ints (&part)[R][V],
                    std::integer_sequence<int, Q...>) {
    Ints sums16[R][V];
    (add_quad16<kCoding, kBegin + Q, Q == 0, R, V>(p, values, k, sums16), ...);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) part[r][v] = add_widened(part[r][v], sums16[r][v]);
}

// Adds the products of quads [kBegin, kEnd) with R rows to `part`.
template <Coding kCoding, int kBegin, int kEnd, int R, int V>
inline void add_runs(const std::uint32_t* p, const Activation* values, int k, Ints (&part)[R][V]) {
    constexpr int kRun = std::min(kQuadsOf16Bits<max_code(kCoding)>, kEnd - kBegin);
    add_run<kCoding, kBegin>(p, values, k, part, std::make_integer_sequence<int, kRun>());
    if constexpr (kBegin + kRun < kEnd) add_runs<kCoding, kBegin + kRun, kEnd>(p, values, k, part);
}

// Adds the products of half H of the quads of a block, or of all, with R rows to `part`; `values` are the first row's,
// which are k apart.
template <Coding kCoding, int H, int R, int V>
inline void add_quads(const std::uint32_t* p, const Activation* values, int k, Ints (&part)[R][V]) {
    constexpr int kHalf = kQuads / halves_of(kCoding);
    add_runs<kCoding, H * kHalf, (H + 1) * kHalf>(p, values, k, part);
}

#else

// Adds the products of quad Q of a block with R rows to `part`; `values` are the first row's, which are k apart.
template <Coding kCoding, int Q, int R, int V>
inline void add_quad(const std::uint32_t* p, const Activation* values, int k, Ints (&part)[R][V]) {
    Columns columns[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) columns[v] = columns_of(quad_bytes<kCoding, Q>(p + v * kWidth));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        const Quad quad = splat_quad(values + std::ptrdiff_t(r) * k + Q * kQuad);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) part[r][v] = dot(part[r][v], columns[v], quad);
    }
}

template <Coding kCoding, int H, int R, int V, int... Q>
inline void add_each(const std::uint32_t* p, const Activation* values, int k, Ints (&part)[R][V],
                     std::integer_sequence<int, Q...>) {
    (add_quad<kCoding, H * kQuads / 2 + Q, R, V>(p, values, k, part), ...);
}

template <Coding kCoding, int H, int R, int V>
inline void add_quads(const std::uint32_t* p, const Activation* values, int k, Ints (&part)[R][V]) {
    add_each<kCoding, H>(p, values, k, part, std::make_integer_sequence<int, kQuads / halves_of(kCoding)>());
}

#endif

// Rows of a tile within a group g of components: their values and the sums of these.
struct RowGroup {
    const Activation* values;
    const std::int32_t* sums;
    int k;

    // Sum of half H of the group of row r, or of the whole group if it has no halves.
    template <int kHalves, int H>
    std::int32_t sum(int r) const {
        const std::int32_t* s = sums + std::ptrdiff_t(r) * (k / kSumGroup);
        return kHalves == 2 ? s[H] : s[0] + s[1];
    }
};

// Computes the products of R rows with weight group H of a block of codes, or adds them if it is not the first.
template <Coding kCoding, int H, int R, int V>
inline void sum_weight_group(const RowGroup& x, const Matrix& w, const ScaleWalk& walk, int first,
                             const std::uint32_t* p, Vec (&value)[R][V]) {
    constexpr int kHalves = halves_of(kCoding);
    const int offset = static_cast<int>(w.offset);
    Ints part[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) part[r][v] = splat_int(-offset * x.sum<kHalves, H>(r));
    add_quads<kCoding, H>(p, x.values, x.k, part);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
        const Affine affine = affine_at<kCoding>(w, walk, first + v * kWidth);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Vec of_base = mul(affine.base, splat(static_cast<float>(x.sum<kHalves, H>(r))));
            const Vec one = fma(affine.step, to_float(part[r][v]), of_base);
            value[r][v] = H ? add(value[r][v], one) : one;
        }
    }
}

// Computes the same sums with a panel of codes of fewer bits.
template <Coding kCoding, int R>
void sum_few_bits_tile(const Int8Rows& x, int row, const Matrix& w, int panel, LinesAhead ahead, int ahead_lines,
                       float* sums) {
    constexpr int V = int8_tile_vectors(R);
    const int groups = x.k / kRowGroup;
    for (int first = 0; first < kPanel; first += V * kWidth) {
        const std::uint32_t* p = Codes<kCoding>::block(w, panel, 0) + first;
        const float* scales = x.scales + std::size_t(row) * groups;
        ScaleWalk walk(w, panel, 0);
        RowGroup rows{x.values + std::size_t(row) * x.k, x.sums + std::size_t(row) * (x.k / kSumGroup), x.k};
        Vec sum[R][V];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sum[r][v] = zero();
        for (int g = 0; g < groups; ++g, p += Codes<kCoding>::kBlockWords) {
            ahead.request(ahead_lines);
            Vec value[R][V];
            sum_weight_group<kCoding, 0>(rows, w, walk, first, p, value);
            walk.advance(kRowGroup / halves_of(kCoding));
            if constexpr (halves_of(kCoding) == 2) {
                sum_weight_group<kCoding, 1>(rows, w, walk, first, p, value);
                walk.advance(kSumGroup);
            }
            rows.values += kRowGroup;
            rows.sums += kRowGroup / kSumGroup;
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) sum[r][v] = fma(splat(scales[r * groups + g]), value[r][v], sum[r][v]);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) store(sums + r * kPanel + first + v * kWidth, sum[r][v]);
    }
}

using SumInt8Tile = void (*)(const Int8Rows&, int, const Matrix&, int, LinesAhead, int, float*);

template <int... R>
constexpr std::array<SumInt8Tile, sizeof...(R)> sum_int8_tiles(std::integer_sequence<int, R...>) {
    return {sum_int8_tile<R + 1>...};
}

template <Coding kCoding, int... R>
constexpr std::array<SumInt8Tile, sizeof...(R)> sum_few_bits_tiles(std::integer_sequence<int, R...>) {
    return {sum_few_bits_tile<kCoding, R + 1>...};
}

// Entry r handles r + 1 rows. Not `inline`, for the same reason as kSumTilesSame.
using Int8TileRows = std::make_integer_sequence<int, kInt8TileRows>;
using Int8Tiles = std::array<SumInt8Tile, kInt8TileRows>;
constexpr Int8Tiles kSumInt8Tiles = sum_int8_tiles(Int8TileRows());
constexpr Int8Tiles kSumFewBitsTiles[] = {
    sum_few_bits_tiles<Coding::kInt2>(Int8TileRows()), sum_few_bits_tiles<Coding::kInt3>(Int8TileRows()),
    sum_few_bits_tiles<Coding::kInt4>(Int8TileRows()), sum_few_bits_tiles<Coding::kInt5>(Int8TileRows()),
    sum_few_bits_tiles<Coding::kInt6>(Int8TileRows()),
};

inline const Int8Tiles& int8_tiles_of(const Matrix& w) {
    if (w.coding == Coding::kInt8) return kSumInt8Tiles;
    return kSumFewBitsTiles[static_cast<int>(w.coding) - static_cast<int>(Coding::kInt2)];
}

// Multiplies rows [begin, end) with one panel; `next` is the panel that this lane will probably take next.
inline void multiply_int8_panel(const Int8Rows& x, int begin, int end, const Matrix& w, int panel,
                                const char* next, const PanelOutput& output) {
    const std::size_t bytes = panel_bytes(w);
    const int lines = static_cast<int>(bytes / kLineBytes) / (w.k / kRowGroup);
    const int tiles = (end - begin + kInt8TileRows - 1) / kInt8TileRows;
    const int passes = tiles * (kPanel / kWidth / int8_tile_vectors((end - begin + tiles - 1) / tiles));
    const Int8Tiles& sum_tiles = int8_tiles_of(w);
    alignas(64) float sums[kInt8TileRows * kPanel];
    for (int t = 0; t < tiles; ++t) {
        const int row = begin + part_begin(end - begin, t, tiles);
        const int rows = begin + part_begin(end - begin, t + 1, tiles) - row;
        // A single pass is about as fast as memory and prefetches its own panel; several passes prefetch a slice of the
        // next panel each.
        const std::uint8_t *begin_of_panel = bytes_of(w, panel), *begin_of_next = reinterpret_cast<const std::uint8_t*>(next);
        const LinesAhead ahead = passes == 1
            ? LinesAhead(begin_of_panel + kInt8AheadBlocks * kLineBytes * lines, begin_of_panel + bytes, begin_of_next)
            : LinesAhead(begin_of_next + bytes / tiles * t, nullptr, nullptr);
        sum_tiles[rows - 1](x, row, w, panel, ahead, (lines + passes - 1) / passes, sums);
        output.take(sums, row, rows);
    }
}

// Computes y[m][n] (=, +=) x[m][k] * W^T (+ bias), or silu(gate) * up, like `linear` for float rows; weights are
// integers of at most 8 bits. All lanes call it; no barrier at the end.
inline void linear(Lane& lane, const Int8Rows& x, int m, const Matrix& w, float* y, int ldy, Into into) {
    const int panels = w.num_panels(), blocks = (m + kGroupRows - 1) / kGroupRows, items = blocks * panels;
    const int grain = grain_of(items, lane.size());
    lane.share(items, grain, [&](int first, int last) {
        for (int item = first; item < last; ++item) {
            const int block = item / panels, panel = item % panels;
            const int later = item + 1 < last ? item + 1 : first + grain * lane.size();
            multiply_int8_panel(x, part_begin(m, block, blocks), part_begin(m, block + 1, blocks), w, panel,
                                panel_at(w, (later < items ? later : item) % panels),
                                PanelOutput(w, panel, y, ldy, into));
        }
    });
}

}  // namespace tandem
