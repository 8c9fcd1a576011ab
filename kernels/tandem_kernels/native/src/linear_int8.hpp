// Products of rows with int8 weights of linear layers; owns no memory, and never lets an element's bits depend on the
// rows beside it, on the number of lanes or on the machine's instructions.
//
// The meaning is `tandem_kernels.reference.linear_int8`: the products of a row's group are summed as integers, exactly;
// groups of a row and then groups of weights are added in ascending order by one fused multiply-add each. Weights lie
// in memory as value + 128, because the machine's fourfold products take one unsigned factor; what that adds to a group
// is known before the weights are read.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "linear.hpp"
#include "simd.hpp"
#include "team.hpp"

namespace tandem {

constexpr int kRowGroup = 32;     // components of a row that share a scale
constexpr int kQuad = 4;          // components that one product of vectors sums
constexpr int kQuads = kRowGroup / kQuad;
constexpr float kLevels = 127;    // largest quantised magnitude
constexpr int kWeightZero = 128;  // what a weight of zero is in memory

// Ints: kWidth sums. Columns: the quads of kWidth columns. Quad: one quad of a row, for all columns.
// A path without the fourfold product multiplies pairs of int16, components 0 and 2 and then 1 and 3 of a quad, since
// a column's bytes are split that way by one mask and one shift. Activations lie in memory as that needs them.
// `kept` is a value in a register, here: left to itself the compiler reorders integer sums until registers run out, or
// reads a vector of weights anew for every row.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)

#define TANDEM_QUAD_PRODUCT 1
using Ints = __m512i;
inline Ints splat_int(std::int32_t x) { return _mm512_set1_epi32(x); }
inline Ints load_ints(const std::uint8_t* p) { return _mm512_loadu_si512(p); }
inline Ints dot_quad(Ints sum, Ints w, Ints x) { return _mm512_dpbusd_epi32(sum, w, x); }
inline Vec to_float(Ints a) { return _mm512_cvtepi32_ps(a); }
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
inline Columns load_columns(const std::uint8_t* p) { return kept(load_ints(p)); }
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
inline Columns load_columns(const std::uint8_t* p) {
    const Ints w = load_ints(p);
    return {low_bytes(w), high_bytes(w)};
}
inline Quad splat_quad(const Activation* p) {
    std::int32_t even, odd;
    std::memcpy(&even, p, sizeof even);
    std::memcpy(&odd, p + kQuad / 2, sizeof odd);
    return {splat_int(even), splat_int(odd)};
}
inline Ints dot(Ints sum, const Columns& w, const Quad& x) {
    return dot_pair(dot_pair(sum, w.even, x.even), w.odd, x.odd);
}

#else  // any machine

using Activation = std::int8_t;
constexpr int kQuadOrder[kQuad] = {0, 1, 2, 3};
struct Ints {
    std::int32_t lane[kWidth];
};
using Columns = const std::uint8_t*;
using Quad = const Activation*;
inline Ints splat_int(std::int32_t x) {
    Ints r;
    for (int i = 0; i < kWidth; ++i) r.lane[i] = x;
    return r;
}
inline Columns load_columns(const std::uint8_t* p) { return p; }
inline Quad splat_quad(const Activation* p) { return p; }
inline Ints dot(Ints sum, Columns w, Quad x) {
    for (int i = 0; i < kWidth; ++i)
        for (int j = 0; j < kQuad; ++j) sum.lane[i] += std::int32_t(w[i * kQuad + j]) * x[j];
    return sum;
}
inline Vec to_float(const Ints& a) {
    float lanes[kWidth];
    for (int i = 0; i < kWidth; ++i) lanes[i] = static_cast<float>(a.lane[i]);
    return load(lanes);
}

#endif

// Weights [n][k] as panels [ceil(n / kPanel)][k / kQuad][kPanel][kQuad] of value + kWeightZero. `group` components of a
// column share a scale, k of them where columns have one scale each; kRowGroup divides `group` and `group` divides k.
struct Int8Matrix {
    const std::uint8_t* panels;
    const float* scales;  // [ceil(n / kPanel)][k / group][kPanel]
    const float* bias;    // [n] or null, as the columns of the panels are
    int n, k, group;
};

// Rows quantised in groups of kRowGroup: value = round(x / scale), scale = largest magnitude / kLevels.
struct Int8Rows {
    Activation* values;     // [m][k], each quad in kQuadOrder
    float* scales;          // [m][k / kRowGroup]
    std::int32_t* offsets;  // [m][k / kRowGroup]: what -kWeightZero in each weight contributes to a group's sum
    int k;
};

// Quantises `x` [k] as row `row`. A group of zeros, or one that is not finite, has zeros for values; the scale of the
// latter makes its products NaN.
inline void quantize_row(const float* x, int row, const Int8Rows& out) {
    const int groups = out.k / kRowGroup;
    for (int g = 0; g < groups; ++g, x += kRowGroup) {
        // Magnitudes compare as their bits do, and a NaN passes for the largest.
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
                // Scales of subnormal numbers are coarse, so that a quotient may pass kLevels.
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
        out.offsets[place] = -kWeightZero * sum;
    }
}

// Quantises `m` rows. All lanes call it; ends without waiting.
inline void quantize_rows(Lane& lane, const float* x, int ldx, int m, const Int8Rows& out) {
    lane.share(m, 4, [&](int begin, int end) {
        for (int r = begin; r < end; ++r) quantize_row(x + std::size_t(r) * ldx, r, out);
    });
}

#if defined(__AVX512F__)
constexpr int kInt8TileRows = 8;  // 16 parts and nearly as many sums, which wait outside of registers
#else
constexpr int kInt8TileRows = 4;  // 8 parts, 4 halves of weights and 2 broadcasts in 16 registers
#endif

// Vectors of columns that a tile of `rows` rows sums in one pass over its panel.
constexpr int int8_tile_vectors(int rows) {
    constexpr int kAll = kPanel / kWidth;
    return kAll <= 2 || rows == 1 ? kAll : 2;
}

constexpr int kLineBytes = 64;
constexpr int kGroupLines = kRowGroup * kPanel / kLineBytes;

// sums[R][kPanel] = R rows from `row` on, times a panel. Asks for `next_lines` lines from `next` on in every group of
// components: a slice of the panel that the lane will take next, so that memory is busy during all passes over a panel.
// One pass asks for nothing, since the machine's own prefetching of one stream measured best.
template <int R>
void sum_int8_tile(const Int8Rows& x, int row, const Int8Matrix& w, int panel, const std::uint8_t* next,
                   int next_lines, float* sums) {
    constexpr int V = int8_tile_vectors(R);
    const int groups = x.k / kRowGroup;
    for (int first = 0; first < kPanel; first += V * kWidth) {
        const std::uint8_t* quads = w.panels + (std::size_t(panel) * w.k * kPanel + first * kQuad);
        const float* column_scales = w.scales + (std::size_t(panel) * (w.k / w.group) * kPanel + first);
        const Activation* values = x.values + std::size_t(row) * x.k;
        const float* scales = x.scales + std::size_t(row) * groups;
        const std::int32_t* offsets = x.offsets + std::size_t(row) * groups;
        for (int begin = 0; begin < groups; begin += w.group / kRowGroup, column_scales += kPanel) {
            Vec sum[R][V];
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) sum[r][v] = zero();
            for (int g = begin; g < begin + w.group / kRowGroup; ++g, values += kRowGroup) {
                for (int line = 0; line < next_lines; ++line, next += kLineBytes) __builtin_prefetch(next, 0, 2);
                Ints part[R][V];
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                    for (int v = 0; v < V; ++v) part[r][v] = splat_int(offsets[r * groups + g]);
#pragma GCC unroll 8
                for (int q = 0; q < kQuads; ++q, quads += kPanel * kQuad) {
                    Columns columns[V];
#pragma GCC unroll 4
                    for (int v = 0; v < V; ++v) columns[v] = load_columns(quads + v * kWidth * kQuad);
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

using SumInt8Tile = void (*)(const Int8Rows&, int, const Int8Matrix&, int, const std::uint8_t*, int, float*);

template <int... R>
constexpr std::array<SumInt8Tile, sizeof...(R)> sum_int8_tiles(std::integer_sequence<int, R...>) {
    return {sum_int8_tile<R + 1>...};
}

// Entry r takes r + 1 rows. Not `inline`, as kSumTilesSame is not.
constexpr std::array<SumInt8Tile, kInt8TileRows> kSumInt8Tiles =
    sum_int8_tiles(std::make_integer_sequence<int, kInt8TileRows>());

// Rows [begin, end) of a product with one panel; `next` is the panel that this lane will probably take next.
inline void multiply_int8_panel(const Int8Rows& x, int begin, int end, const Int8Matrix& w, int panel, int next,
                                float* y, int ldy, Into into) {
    const int panel_outputs = into == Into::kSwiGlu ? kPanel / 2 : kPanel;
    const int column = panel * panel_outputs;
    const int missing = (into == Into::kSwiGlu ? w.n / 2 : w.n) - column;
    const int columns = missing < panel_outputs ? missing : panel_outputs;
    float bias[kPanel] = {};
    if (w.bias)
        std::memcpy(bias, w.bias + panel * kPanel, (into == Into::kSwiGlu ? kPanel : columns) * sizeof(float));
    const std::size_t panel_bytes = std::size_t(w.k) * kPanel;
    const int tiles = (end - begin + kInt8TileRows - 1) / kInt8TileRows;
    const int passes = tiles * (kPanel / kWidth / int8_tile_vectors((end - begin + tiles - 1) / tiles));
    const int next_lines = passes == 1 ? 0 : (kGroupLines + passes - 1) / passes;
    alignas(64) float sums[kInt8TileRows * kPanel];
    for (int t = 0; t < tiles; ++t) {
        const int row = begin + part_begin(end - begin, t, tiles);
        const int rows = begin + part_begin(end - begin, t + 1, tiles) - row;
        const std::uint8_t* slice = w.panels + next * panel_bytes + panel_bytes / tiles * t;
        kSumInt8Tiles[rows - 1](x, row, w, panel, slice, next_lines, sums);
        finish_tile(sums, rows, w.bias ? bias : nullptr, columns, y + std::size_t(row) * ldy + column, ldy, into);
    }
}

// y[m][n] (=, +=) x[m][k] * W^T (+ bias), or silu(gate) * up for kSwiGlu, as the `linear` of floats. All lanes call it;
// ends without waiting.
inline void linear(Lane& lane, const Int8Rows& x, int m, const Int8Matrix& w, float* y, int ldy, Into into) {
    const int panels = (w.n + kPanel - 1) / kPanel;
    const int blocks = (m + kGroupRows - 1) / kGroupRows, items = blocks * panels;
    // A panel of one row is read in a microsecond: few pieces, yet enough that no lane waits long for the last.
    const int even = items / (16 * lane.size());
    const int grain = even < 1 ? 1 : even > 8 ? 8 : even;
    lane.share(items, grain, [&](int first, int last) {
        for (int item = first; item < last; ++item) {
            const int block = item / panels, later = item + 1 < last ? item + 1 : first + grain * lane.size();
            multiply_int8_panel(x, part_begin(m, block, blocks), part_begin(m, block + 1, blocks), w, item % panels,
                                (later < items ? later : item) % panels, y, ldy, into);
        }
    });
}

// Row `token` of an embedding table [n][k] that is also a matrix of weights, to `out` [k].
inline void embed_int8(const Int8Matrix& table, std::int64_t token, float* out) {
    const std::int64_t panel = token / kPanel, column = token % kPanel;
    const std::uint8_t* quads = table.panels + (std::size_t(panel) * table.k * kPanel + column * kQuad);
    const float* scales = table.scales + (std::size_t(panel) * (table.k / table.group) * kPanel + column);
    for (int i = 0; i < table.k; ++i) {
        const int value = quads[std::size_t(i / kQuad) * kPanel * kQuad + i % kQuad] - kWeightZero;
        out[i] = static_cast<float>(value) * scales[std::size_t(i / table.group) * kPanel];
    }
}

}  // namespace tandem
