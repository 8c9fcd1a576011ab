// Products of rows with the weights of linear layers, in fp32; owns no memory, and never lets an element's bits depend
// on the rows beside it, on the number of lanes or on the width of vectors.
//
// Every element is one chain of fused multiply-adds over ascending k that begins at zero, then its epilogue. Whole k
// stays in registers: the inner loops of GotoBLAS (Goto and van de Geijn, 2008) without its packing of x, since rows
// are read through broadcasts and a panel of weights is contiguous already.
#pragma once

#include <array>
#include <cstddef>
#include <cstring>
#include <utility>

#include "simd.hpp"
#include "team.hpp"

namespace tandem {

constexpr int kPanel = 32;  // columns (output features) of a panel

// Weights [n][k] of a linear layer as panels [ceil(n / kPanel)][k][kPanel], columns beyond n zero.
struct Matrix {
    const float* panels;
    const float* bias;  // [n] or null; for kSwiGlu laid out as the columns of the panels are, padding too
    int n, k;
};

enum class Into { kStore, kAdd, kSwiGlu };

#if defined(__AVX512F__)
constexpr int kTileRows = 14;  // 28 sums, 2 columns of weights and a broadcast in 32 registers
#else
constexpr int kTileRows = 6;  // 12 sums, 2 columns of weights and a broadcast in 16 registers
#endif

// Vectors of columns that a tile of `rows` rows takes at a time.
constexpr int tile_vectors(int rows) {
    constexpr int kAll = kPanel / kWidth;
    return kAll <= 2 || rows <= kTileRows / 2 ? kAll : kAll / 2;
}

// sums[R][kPanel] = x[R][k] * panel.
template <int R>
void sum_tile(const float* x, std::ptrdiff_t ldx, const float* panel, int k, float* sums) {
    constexpr int V = tile_vectors(R);
    for (int first = 0; first < kPanel; first += V * kWidth) {
        const float* w = panel + first;
        Vec sum[R][V];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sum[r][v] = zero();
        for (int i = 0; i < k; ++i, w += kPanel) {
            Vec column[V];
            __builtin_prefetch(w + 40 * kPanel, 0, 2);
            __builtin_prefetch(w + 40 * kPanel + 16, 0, 2);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) column[v] = load(w + v * kWidth);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const Vec a = splat(x[r * ldx + i]);
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) sum[r][v] = fma(a, column[v], sum[r][v]);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) store(sums + r * kPanel + first + v * kWidth, sum[r][v]);
    }
}

using SumTile = void (*)(const float*, std::ptrdiff_t, const float*, int, float*);

template <int... R>
constexpr std::array<SumTile, sizeof...(R)> sum_tiles(std::integer_sequence<int, R...>) {
    return {sum_tile<R + 1>...};
}

// Entry r takes r + 1 rows.
constexpr std::array<SumTile, kTileRows> kSumTiles = sum_tiles(std::make_integer_sequence<int, kTileRows>());

inline Vec silu(Vec x) { return div(x, add(splat(1.0f), exp(sub(zero(), x)))); }

// Writes `columns` of each row of `sums` [rows][kPanel] to y. `bias` is a whole panel's or null.
inline void finish_tile(float* sums, int rows, const float* bias, int columns, float* y, std::ptrdiff_t ldy,
                        Into into) {
    for (int r = 0; r < rows; ++r, sums += kPanel, y += ldy) {
        if (bias)
            for (int c = 0; c < kPanel; c += kWidth) store(sums + c, add(load(sums + c), load(bias + c)));
        if (into == Into::kSwiGlu)
            for (int c = 0; c < kPanel / 2; c += kWidth)
                store(sums + c, mul(silu(load(sums + c)), load(sums + kPanel / 2 + c)));
        if (into == Into::kAdd)
            for (int c = 0; c < columns; ++c) y[c] += sums[c];
        else
            std::memcpy(y, sums, columns * sizeof(float));
    }
}

// Where part i of `parts` equal ones of [0, count) begins.
inline int part_begin(int count, int i, int parts) { return static_cast<int>(std::int64_t(count) * i / parts); }


// y[m][n] (=, +=) x[m][k] * W^T (+ bias). kSwiGlu: each panel holds 16 gate columns and then the 16 up columns that
// match; writes silu(gate) * up, [m][n / 2]. All lanes call it; ends without waiting. x, y have strides ldx, ldy.
inline void linear(Lane& lane, const float* x, int ldx, int m, const Matrix& w, float* y, int ldy, Into into) {
    const int panels = (w.n + kPanel - 1) / kPanel;
    const int outputs = into == Into::kSwiGlu ? w.n / 2 : w.n;
    const int panel_outputs = into == Into::kSwiGlu ? kPanel / 2 : kPanel;
    const int groups = (m + 140 - 1) / 140;
    lane.share(groups * panels, 1, [&](int item, int) {
        const int group = item / panels, panel = item % panels;
        const int begin = part_begin(m, group, groups), end = part_begin(m, group + 1, groups);
        const int tiles = (end - begin + kTileRows - 1) / kTileRows;
        const int column = panel * panel_outputs;
        const int columns = outputs - column < panel_outputs ? outputs - column : panel_outputs;
        float bias[kPanel] = {};
        if (w.bias)
            std::memcpy(bias, w.bias + panel * kPanel,
                        (into == Into::kSwiGlu ? kPanel : columns) * sizeof(float));
        const float* weights = w.panels + std::size_t(panel) * w.k * kPanel;
        alignas(64) float sums[kTileRows * kPanel];
        for (int t = 0; t < tiles; ++t) {
            const int row = begin + part_begin(end - begin, t, tiles);
            const int rows = begin + part_begin(end - begin, t + 1, tiles) - row;
            kSumTiles[rows - 1](x + std::size_t(row) * ldx, ldx, weights, w.k, sums);
            finish_tile(sums, rows, w.bias ? bias : nullptr, columns, y + std::size_t(row) * ldy + column, ldy, into);
        }
    });
}

}  // namespace tandem
