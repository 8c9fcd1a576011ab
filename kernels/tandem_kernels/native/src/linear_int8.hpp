// Multiplies int8 rows with 8-bit or 4-bit weights of linear layers. The bits of an element do not depend on other
// rows, on the number of lanes or on the machine's instructions.
//
// The reference is `tandem_kernels.reference.linear_int8`, for 4-bit codes `tandem_kernels.reference.int4`. Products
// within a group of a row are summed exactly, as integers; groups of a row and then groups of weights are added in
// ascending order by one fused multiply-add each. 8-bit weights are stored as value + 128, because the machine's
// four-way dot products take one unsigned factor; the resulting excess of a group is known from the row alone.
#pragma once

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

// Ints: kWidth sums. Columns: the quads of kWidth columns. Quad: one quad of a row, broadcast to all columns. Without a
// four-way dot product, pairs of int16 are multiplied: components 0 and 2, then 1 and 3 of a quad, because one mask and
// one shift split a column's bytes that way. Activations are stored in the order that this needs. `kept` forces a value
// into a register at this point; otherwise the compiler reorders integer sums until registers run out, or reloads a
// vector of weights for every row.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)

#define TANDEM_QUAD_PRODUCT 1
using Ints = __m512i;
inline Ints splat_int(std::int32_t x) { return _mm512_set1_epi32(x); }
inline Ints load_ints(const std::uint8_t* p) { return _mm512_loadu_si512(p); }
inline Ints dot_quad(Ints sum, Ints w, Ints x) { return _mm512_dpbusd_epi32(sum, w, x); }
inline Vec to_float(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Ints low_fields(Ints w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
inline Ints high_fields(Ints w) { return low_fields(_mm512_srli_epi16(w, 4)); }
inline Ints kept(Ints a) {
    asm("" : "+v"(a));
    return a;
}

#elif defined(__AVX512BW__) && defined(__AVX512F__)

#define TANDEM_PAIR_PRODUCT 1
using Ints = __m512i;
inline Ints splat_int(std::int32_t x) { return _mm512_set1_epi32(x); }
inline Ints load_ints(const std::uint8_t* p) { return _mm512_loadu_si512(p); }
inline Vec to_float(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Ints low_fields(Ints w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
inline Ints high_fields(Ints w) { return low_fields(_mm512_srli_epi16(w, 4)); }
inline Ints kept(Ints a) {
    asm("" : "+v"(a));
    return a;
}
inline Ints low_bytes(Ints w) { return _mm512_and_si512(w, _mm512_set1_epi16(0xff)); }
inline Ints high_bytes(Ints w) { return _mm512_srli_epi16(w, 8); }
inline Ints dot_pair(Ints sum, Ints w, Ints x) { return kept(_mm512_add_epi32(sum, _mm512_madd_epi16(w, x))); }

#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)

using Ints = __m256i;
inline Ints splat_int(std::int32_t x) { return _mm256_set1_epi32(x); }
inline Ints load_ints(const std::uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Vec to_float(Ints a) { return _mm256_cvtepi32_ps(a); }
inline Ints low_fields(Ints w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
inline Ints high_fields(Ints w) { return low_fields(_mm256_srli_epi16(w, 4)); }
inline Ints kept(Ints a) {
    asm("" : "+x"(a));
    return a;
}
#if defined(__AVXVNNI__)
#define TANDEM_QUAD_PRODUCT 1
inline Ints dot_quad(Ints sum, Ints w, Ints x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
#else
#define TANDEM_PAIR_PRODUCT 1
inline Ints low_bytes(Ints w) { return _mm256_and_si256(w, _mm256_set1_epi16(0xff)); }
inline Ints high_bytes(Ints w) { return _mm256_srli_epi16(w, 8); }
inline Ints dot_pair(Ints sum, Ints w, Ints x) { return kept(_mm256_add_epi32(sum, _mm256_madd_epi16(w, x))); }
#endif

#endif

#if defined(TANDEM_QUAD_PRODUCT)

using Activation = std::int8_t;
constexpr int kQuadOrder[kQuad] = {0, 1, 2, 3};
using Columns = Ints;
using Quad = Ints;
inline Columns columns_of(Ints w) { return kept(w); }
inline Quad splat_quad(const Activation* p) {
    std::int32_t four;
    std::memcpy(&four, p, sizeof four);
    return splat_int(four);
}
inline Ints dot(Ints sum, Columns w, Quad x) { return dot_quad(sum, w, x); }

#elif defined(TANDEM_PAIR_PRODUCT)

using Activation = std::int16_t;
constexpr int kQuadOrder[kQuad] = {0, 2, 1, 3};
struct Columns {
    Ints even, odd;
};
using Quad = Columns;
inline Columns columns_of(Ints w) { return {low_bytes(w), high_bytes(w)}; }
inline Quad splat_quad(const Activation* p) {
    std::int32_t even, odd;
    std::memcpy(&even, p, sizeof even);
    std::memcpy(&odd, p + kQuad / 2, sizeof odd);
    return {splat_int(even), splat_int(odd)};
}
inline Ints dot(Ints sum, const Columns& w, const Quad& x) {
    return dot_pair(dot_pair(sum, w.even, x.even), w.odd, x.odd);
}

#else  // any other machine

using Activation = std::int8_t;
constexpr int kQuadOrder[kQuad] = {0, 1, 2, 3};
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
inline Ints low_fields(Ints w) {
    for (std::int32_t& lane : w.lane) lane &= 0x0f0f0f0f;
    return w;
}
inline Ints high_fields(Ints w) {
    for (std::int32_t& lane : w.lane) lane = lane >> 4 & 0x0f0f0f0f;
    return w;
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
    Activation* values;     // [m][k], each quad in kQuadOrder
    float* scales;          // [m][k / kRowGroup]
    std::int32_t* sums;     // [m][k / kRowGroup]: sum of a group's values
    int k;
};

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
        std::int32_t sum = 0;
        for (int i = 0; i < kRowGroup; ++i) sum += static_cast<std::int32_t>(quotients[i]);
        Activation* values = out.values + std::size_t(row) * out.k + g * kRowGroup;
        for (int i = 0; i < kRowGroup; ++i)
            values[i] = static_cast<Activation>(
                static_cast<std::int32_t>(quotients[i - i % kQuad + kQuadOrder[i % kQuad]]));
        const std::size_t place = std::size_t(row) * groups + g;
        out.scales[place] = scale;
        out.sums[place] = sum;
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
constexpr int kInt8TileRows = 4;  // 8 parts, 4 halves of weights and 2 broadcasts in 16 registers
#endif

// Returns the vectors of columns that a tile of `rows` rows sums in one pass over its panel.
constexpr int int8_tile_vectors(int rows) {
    constexpr int kAll = kPanel / kWidth;
    return kAll <= 2 || rows == 1 ? kAll : 2;
}

constexpr int kLineBytes = 64;
constexpr int kInt8Ahead = 4096;  // bytes
static_assert(kRowGroup == kCodedStep);

// Computes sums[R][kPanel] of R rows from `row` on times a panel of bytes. Prefetches `ahead_lines` lines from `ahead`
// on in every group of components, so that memory is busy during all passes over a panel.
template <int R>
void sum_int8_tile(const Int8Rows& x, int row, const Matrix& w, int panel, const std::uint8_t* ahead,
                   int ahead_lines, float* sums) {
    constexpr int V = int8_tile_vectors(R);
    const int groups = x.k / kRowGroup;
    for (int first = 0; first < kPanel; first += V * kWidth) {
        const std::uint8_t* quads = bytes_of(w, panel) + first * kQuad;
        const float* column_scales = w.scales + (std::size_t(panel) * (w.k / w.group) * kPanel + first);
        const Activation* values = x.values + std::size_t(row) * x.k;
        const float* scales = x.scales + std::size_t(row) * groups;
        const std::int32_t* row_sums = x.sums + std::size_t(row) * groups;
        for (int begin = 0; begin < groups; begin += w.group / kRowGroup, column_scales += kPanel) {
            Vec sum[R][V];
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) sum[r][v] = zero();
            for (int g = begin; g < begin + w.group / kRowGroup; ++g, values += kRowGroup) {
                for (int line = 0; line < ahead_lines; ++line, ahead += kLineBytes) __builtin_prefetch(ahead, 0, 2);
                Ints part[R][V];
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                    for (int v = 0; v < V; ++v) part[r][v] = splat_int(-kWeightZero * row_sums[r * groups + g]);
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
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) {
                    float* total = sums + r * kPanel + first + v * kWidth;
                    store(total, fma(load(column_scales + v * kWidth), sum[r][v], begin ? load(total) : zero()));
                }
        }
    }
}

// Computes the same sums with a panel of 4-bit codes, whose groups are those of the row.
template <int R>
void sum_int4_tile(const Int8Rows& x, int row, const Matrix& w, int panel, const std::uint8_t* ahead, int ahead_lines,
                   float* sums) {
    constexpr int V = int8_tile_vectors(R);
    const int groups = x.k / kRowGroup;
    for (int first = 0; first < kPanel; first += V * kWidth) {
        const FourRecord* record = four_records(w, panel);
        const Activation* values = x.values + std::size_t(row) * x.k;
        const float* scales = x.scales + std::size_t(row) * groups;
        const std::int32_t* row_sums = x.sums + std::size_t(row) * groups;
        Vec sum[R][V];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sum[r][v] = zero();
        for (int g = 0; g < groups; ++g, ++record, values += kRowGroup) {
            for (int line = 0; line < ahead_lines; ++line, ahead += kLineBytes) __builtin_prefetch(ahead, 0, 2);
            Ints part[R][V];
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) part[r][v] = splat_int(0);
#pragma GCC unroll 8
            for (int q = 0; q < kQuads; ++q) {
                Columns columns[V];
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) {
                    const std::uint32_t* place = record->words[q / 2] + first + v * kWidth;
                    const Ints words = load_ints(reinterpret_cast<const std::uint8_t*>(place));
                    columns[v] = columns_of(q % 2 ? high_fields(words) : low_fields(words));
                }
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const Quad quad = splat_quad(values + std::ptrdiff_t(r) * x.k + q * kQuad);
#pragma GCC unroll 4
                    for (int v = 0; v < V; ++v) part[r][v] = dot(part[r][v], columns[v], quad);
                }
            }
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                const Vec step = load_half(record->step + first + v * kWidth);
                const Vec base = load_half(record->base + first + v * kWidth);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const Vec row_sum = splat(static_cast<float>(row_sums[r * groups + g]));
                    const Vec value = fma(step, to_float(part[r][v]), mul(base, row_sum));
                    sum[r][v] = fma(splat(scales[r * groups + g]), value, sum[r][v]);
                }
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) store(sums + r * kPanel + first + v * kWidth, sum[r][v]);
    }
}

using SumInt8Tile = void (*)(const Int8Rows&, int, const Matrix&, int, const std::uint8_t*, int, float*);

template <int... R>
constexpr std::array<SumInt8Tile, sizeof...(R)> sum_int8_tiles(std::integer_sequence<int, R...>) {
    return {sum_int8_tile<R + 1>...};
}

template <int... R>
constexpr std::array<SumInt8Tile, sizeof...(R)> sum_int4_tiles(std::integer_sequence<int, R...>) {
    return {sum_int4_tile<R + 1>...};
}

// Entry r handles r + 1 rows. Not `inline`, for the same reason as kSumTilesSame.
using Int8TileRows = std::make_integer_sequence<int, kInt8TileRows>;
constexpr std::array<SumInt8Tile, kInt8TileRows> kSumInt8Tiles = sum_int8_tiles(Int8TileRows());
constexpr std::array<SumInt8Tile, kInt8TileRows> kSumInt4Tiles = sum_int4_tiles(Int8TileRows());

// Multiplies rows [begin, end) with one panel; `next` is the panel that this lane will probably take next.
inline void multiply_int8_panel(const Int8Rows& x, int begin, int end, const Matrix& w, int panel, int next,
                                const PanelOutput& output) {
    const std::size_t bytes = panel_bytes(w);
    const int lines = static_cast<int>(bytes / kLineBytes) / (w.k / kRowGroup);
    const int tiles = (end - begin + kInt8TileRows - 1) / kInt8TileRows;
    const int passes = tiles * (kPanel / kWidth / int8_tile_vectors((end - begin + tiles - 1) / tiles));
    const auto& sum_tiles = w.coding == Coding::kFour ? kSumInt4Tiles : kSumInt8Tiles;
    alignas(64) float sums[kInt8TileRows * kPanel];
    for (int t = 0; t < tiles; ++t) {
        const int row = begin + part_begin(end - begin, t, tiles);
        const int rows = begin + part_begin(end - begin, t + 1, tiles) - row;
        // A single pass is about as fast as memory and prefetches its own panel; several passes prefetch a slice of the
        // next panel each.
        const std::uint8_t* slice = bytes_of(w, next) + bytes / tiles * t;
        const std::uint8_t* ahead = passes == 1 ? bytes_of(w, panel) + kInt8Ahead : slice;
        sum_tiles[rows - 1](x, row, w, panel, ahead, (lines + passes - 1) / passes, sums);
        output.take(sums, row, rows);
    }
}

// Computes y[m][n] (=, +=) x[m][k] * W^T (+ bias), or silu(gate) * up, like `linear` for float rows; weights are kEight
// or kFour. All lanes call it; no barrier at the end.
inline void linear(Lane& lane, const Int8Rows& x, int m, const Matrix& w, float* y, int ldy, Into into) {
    const int panels = w.num_panels(), blocks = (m + kGroupRows - 1) / kGroupRows, items = blocks * panels;
    const int grain = grain_of(items, lane.size());
    lane.share(items, grain, [&](int first, int last) {
        for (int item = first; item < last; ++item) {
            const int block = item / panels, panel = item % panels;
            const int later = item + 1 < last ? item + 1 : first + grain * lane.size();
            multiply_int8_panel(x, part_begin(m, block, blocks), part_begin(m, block + 1, blocks), w, panel,
                                (later < items ? later : item) % panels, PanelOutput(w, panel, y, ldy, into));
        }
    });
}

}  // namespace tandem
