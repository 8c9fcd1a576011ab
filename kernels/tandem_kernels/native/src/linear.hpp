// Products of rows with the weights of linear layers, in fp32; owns no memory, and never lets an element's bits depend
// on the rows beside it, on the number of lanes or on the width of vectors.
//
// Every element is one chain of fused multiply-adds over ascending k that begins at zero, then its epilogue. The whole
// chain stays in a register: tiles as those of GotoBLAS (Goto and van de Geijn, 2008), but with x read in place through
// broadcasts and with weights that were packed beforehand.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "simd.hpp"
#include "team.hpp"

namespace tandem {

constexpr int kPanel = 32;  // columns (output features) of a panel

// Weights [n][k] of a linear layer as panels [ceil(n / kPanel)][k][kPanel], columns beyond n zero.
struct Matrix {
    const float* panels;
    const float* bias;  // [n] or null; for kSwiGlu laid out as the columns of the panels are, filling too
    int n, k;
};

enum class Into { kStore, kAdd, kSwiGlu };

#if defined(__AVX512F__)
constexpr int kTileRows = 14;  // 28 sums, 2 vectors of weights and a broadcast in 32 registers
#else
constexpr int kTileRows = 6;  // 12 sums, 2 vectors of weights and a broadcast in 16 registers
#endif

// Rows that go over a panel together, so that x stays near too; a whole prompt makes many items of them.
constexpr int kGroupRows = 140;

// Vectors of columns that a tile of `rows` rows sums in one pass over its panel.
constexpr int tile_vectors(int rows) {
    constexpr int kAll = kPanel / kWidth;
    return kAll <= 2 || rows <= kTileRows / 2 ? kAll : kAll / 2;
}

// Weights that a pass over a panel asks for beforehand, into the cache of second level. kSame: its own panel's, a
// constant distance ahead. kNext: a slice of the panel that the lane will take next, so that memory is busy during all
// passes over a panel and not only the first. Asking twice for a line costs as much as a load, asking beyond the end
// of memory nothing.
enum class Ahead { kSame, kNext };
constexpr int kDistance = 40;  // of k, 5 KiB
constexpr int kBlock = 8;      // of k, between two requests for lines of the next panel
constexpr int kLine = 16;      // floats of a cache line

inline void request(const float* line) { __builtin_prefetch(line, 0, 2); }

// sums[R][kPanel] = x[R][k] * panel; kNext asks for `next_lines` lines from `next` on every kBlock.
template <int R, Ahead kAhead>
void sum_tile(const float* x, std::ptrdiff_t ldx, const float* panel, int k, const float* next, int next_lines,
              float* sums) {
    constexpr int V = tile_vectors(R);
    for (int first = 0; first < kPanel; first += V * kWidth) {
        const float* w = panel + first;
        Vec sum[R][V];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sum[r][v] = zero();
        int i = 0;
        do {
            int end = k;
            if constexpr (kAhead == Ahead::kNext) {
                for (int line = 0; line < next_lines; ++line, next += kLine) request(next);
                end = k - i < kBlock ? k : i + kBlock;
            }
            for (; i < end; ++i, w += kPanel) {
                if constexpr (kAhead == Ahead::kSame) {
                    request(w + kDistance * kPanel);
                    request(w + kDistance * kPanel + kLine);
                }
                Vec column[V];
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) column[v] = load(w + v * kWidth);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const Vec a = splat(x[r * ldx + i]);
#pragma GCC unroll 4
                    for (int v = 0; v < V; ++v) sum[r][v] = fma(a, column[v], sum[r][v]);
                }
            }
        } while (kAhead == Ahead::kNext && i < k);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) store(sums + r * kPanel + first + v * kWidth, sum[r][v]);
    }
}

using SumTile = void (*)(const float*, std::ptrdiff_t, const float*, int, const float*, int, float*);

template <Ahead kAhead, int... R>
constexpr std::array<SumTile, sizeof...(R)> sum_tiles(std::integer_sequence<int, R...>) {
    return {sum_tile<R + 1, kAhead>...};
}

// Entry r takes r + 1 rows. Not `inline`: all libraries of a process would share one such variable, however built.
using TileRows = std::make_integer_sequence<int, kTileRows>;
constexpr std::array<SumTile, kTileRows> kSumTilesSame = sum_tiles<Ahead::kSame>(TileRows());
constexpr std::array<SumTile, kTileRows> kSumTilesNext = sum_tiles<Ahead::kNext>(TileRows());

inline Vec silu(Vec x) { return div(x, add(splat(1.0f), exp(sub(zero(), x)))); }

// Writes `columns` of each row of `sums` [rows][kPanel], which it uses up, to y. `bias` is a whole panel's or null.
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

// Rows of a tile at most. Rows a multiple of 4 KiB apart share one set of a cache of first level, of 8 ways.
inline int most_tile_rows(int ldx) { return ldx % 1024 == 0 && kTileRows > 8 ? 8 : kTileRows; }

// Rows [begin, end) of a product with one panel; `next` is the panel that this lane will probably take next.
inline void multiply_panel(const float* x, int ldx, int begin, int end, const Matrix& w, int panel, int next, float* y,
                           int ldy, Into into) {
    const int panel_outputs = into == Into::kSwiGlu ? kPanel / 2 : kPanel;
    const int column = panel * panel_outputs;
    const int missing = (into == Into::kSwiGlu ? w.n / 2 : w.n) - column;
    const int columns = missing < panel_outputs ? missing : panel_outputs;
    float bias[kPanel] = {};
    if (w.bias)
        std::memcpy(bias, w.bias + panel * kPanel, (into == Into::kSwiGlu ? kPanel : columns) * sizeof(float));
    const std::size_t panel_floats = std::size_t(w.k) * kPanel;
    const int most = most_tile_rows(ldx), tiles = (end - begin + most - 1) / most;
    const int passes = tiles * (kPanel / kWidth / tile_vectors((end - begin + tiles - 1) / tiles));
    // A few narrow tiles pass over a panel so often that memory would rest most of the time. With many the slices would
    // be below a line per block and overlap.
    constexpr int kBlockLines = kBlock * kPanel / kLine;
    const auto& sum_tiles = kWidth < kLine && passes > 2 && passes <= kBlockLines ? kSumTilesNext : kSumTilesSame;
    const int next_lines = (kBlockLines + passes - 1) / passes;
    alignas(64) float sums[kTileRows * kPanel];
    for (int t = 0; t < tiles; ++t) {
        const int row = begin + part_begin(end - begin, t, tiles);
        const int rows = begin + part_begin(end - begin, t + 1, tiles) - row;
        const float* slice = w.panels + next * panel_floats + panel_floats / tiles * t;
        sum_tiles[rows - 1](x + std::size_t(row) * ldx, ldx, w.panels + panel * panel_floats, w.k, slice, next_lines,
                            sums);
        finish_tile(sums, rows, w.bias ? bias : nullptr, columns, y + std::size_t(row) * ldy + column, ldy, into);
    }
}

// y[m][n] (=, +=) x[m][k] * W^T (+ bias). kSwiGlu: each panel holds 16 gate columns and then the 16 up columns that
// match; writes silu(gate) * up, [m][n / 2]. All lanes call it; ends without waiting. x, y have strides ldx, ldy.
inline void linear(Lane& lane, const float* x, int ldx, int m, const Matrix& w, float* y, int ldy, Into into) {
    const int panels = (w.n + kPanel - 1) / kPanel;
    const int groups = (m + kGroupRows - 1) / kGroupRows, items = groups * panels;
    lane.share(items, 1, [&](int item, int) {
        const int group = item / panels, later = item + lane.size();
        multiply_panel(x, ldx, part_begin(m, group, groups), part_begin(m, group + 1, groups), w, item % panels,
                       (later < items ? later : item) % panels, y, ldy, into);
    });
}

}  // namespace tandem
