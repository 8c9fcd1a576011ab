// Multiplies rows with the weights of linear layers in fp32. The bits of an element do not depend on other rows, on the
// number of lanes or on the vector width.
//
// Every element is one chain of fused multiply-adds over ascending k that begins at zero, followed by the epilogue. The
// chain stays in a register, in tiles like those of GotoBLAS (Goto and van de Geijn, 2008), but with x read in place
// through broadcasts and with weights packed beforehand. It is stored to memory only between parts of a panel whose
// weights are widened to floats first.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include "coded.hpp"
#include "panel.hpp"
#include "simd.hpp"
#include "team.hpp"

namespace tandem {

#if defined(__AVX512F__)
constexpr int kTileRows = 14;  // 28 sums, 2 vectors of weights and a broadcast in 32 registers
#else
constexpr int kTileRows = 6;  // 12 sums, 2 vectors of weights and a broadcast in 16 registers
#endif

// Returns the vectors of columns that a tile of `rows` rows sums in one pass over its panel.
constexpr int tile_vectors(int rows) {
    constexpr int kAll = kPanel / kWidth;
    return kAll <= 2 || rows <= kTileRows / 2 ? kAll : kAll / 2;
}

// Weights that a pass over a panel prefetches into the L2 cache. kSame: those of its own panel, a constant distance
// ahead. kNext: a slice of the panel that the lane will take next, so that memory is busy during all passes over a
// panel and not only during the first. Prefetching a line twice costs as much as a load; prefetching beyond the end of
// memory costs nothing.
enum class Ahead { kSame, kNext };
constexpr int kDistance = 40;  // components, 5 KiB
constexpr int kBlock = 8;      // components between two prefetches from the next panel
constexpr int kLine = 16;      // floats of a cache line

inline void request(const float* line) { __builtin_prefetch(line, 0, 2); }

// Computes sums[R][kPanel] = x[R][k] * panel, or += if the chain `continues`; kNext prefetches `next_lines` lines from
// `next` on in every kBlock.
template <int R, Ahead kAhead>
void sum_tile(const float* x, std::ptrdiff_t ldx, const float* panel, int k, const float* next, int next_lines,
              bool continues, float* sums) {
    constexpr int V = tile_vectors(R);
    for (int first = 0; first < kPanel; first += V * kWidth) {
        const float* w = panel + first;
        Vec sum[R][V];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sum[r][v] = continues ? load(sums + r * kPanel + first + v * kWidth) : zero();
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

using SumTile = void (*)(const float*, std::ptrdiff_t, const float*, int, const float*, int, bool, float*);

template <Ahead kAhead, int... R>
constexpr std::array<SumTile, sizeof...(R)> sum_tiles(std::integer_sequence<int, R...>) {
    return {sum_tile<R + 1, kAhead>...};
}

// Entry r handles r + 1 rows. Not `inline`: the libraries of a process would share an inline variable although they
// were built differently.
using TileRows = std::make_integer_sequence<int, kTileRows>;
constexpr std::array<SumTile, kTileRows> kSumTilesSame = sum_tiles<Ahead::kSame>(TileRows());
constexpr std::array<SumTile, kTileRows> kSumTilesNext = sum_tiles<Ahead::kNext>(TileRows());

// Rows of a tile that multiplies coded weights directly from their codes, and the largest number of such tiles for a
// panel. For more rows the panel, or a large part of it, is widened to floats in the L2 cache first, where all tiles
// read it.
#if defined(__AVX512F__)
constexpr int kCodedRows = 10;  // 20 sums, and 10 for codes, steps, bases, weights and a broadcast
#else
constexpr int kCodedRows = 3;
#endif
constexpr int kCodedTiles = 2;
constexpr int kWidened = 768;  // components, 96 KiB

// Computes what sum_tile does from the codes of a panel.
template <typename Format, int R>
void sum_coded_tile(const float* x, std::ptrdiff_t ldx, const Matrix& w, int panel, const CodedAhead& ahead,
                    float* sums) {
    for (int first = 0; first < kPanel; first += kCodedColumns) {
        Vec sum[R][kCodedVectors];
        const auto each_sum = [&](auto use) TANDEM_INLINE {
            repeat<R * kCodedVectors>([&]<int I>() TANDEM_INLINE {
                use(sum[I / kCodedVectors][I % kCodedVectors], I / kCodedVectors, I % kCodedVectors);
            });
        };
        each_sum([](Vec& s, int, int) TANDEM_INLINE { s = zero(); });
        Format::each(w, {panel, first, 0, w.k}, ahead, [&](int i, const Vec (&weights)[kCodedVectors]) TANDEM_INLINE {
            each_sum([&](Vec& s, int r, int v) TANDEM_INLINE { s = fma(splat(x[r * ldx + i]), weights[v], s); });
        });
        each_sum([&](const Vec& s, int r, int v) TANDEM_INLINE { store(sums + r * kPanel + first + v * kWidth, s); });
    }
}

using SumCodedTile = void (*)(const float*, std::ptrdiff_t, const Matrix&, int, const CodedAhead&, float*);

template <typename Format, int... R>
constexpr std::array<SumCodedTile, sizeof...(R)> sum_coded_tiles(std::integer_sequence<int, R...>) {
    return {sum_coded_tile<Format, R + 1>...};
}

// Entry r of a format's array handles r + 1 rows. Not `inline`, for the same reason as kSumTilesSame, nor local: a local
// array would be filled in every call.
using CodedTileRows = std::make_integer_sequence<int, kCodedRows>;
constexpr std::array<SumCodedTile, kCodedRows> kSumCodedTiles[] = {
    sum_coded_tiles<Bfloats>(CodedTileRows()),
    sum_coded_tiles<Codes<Coding::kInt2>>(CodedTileRows()), sum_coded_tiles<Codes<Coding::kInt3>>(CodedTileRows()),
    sum_coded_tiles<Codes<Coding::kInt4>>(CodedTileRows()), sum_coded_tiles<Codes<Coding::kInt5>>(CodedTileRows()),
    sum_coded_tiles<Codes<Coding::kInt6>>(CodedTileRows()), sum_coded_tiles<Codes<Coding::kInt8>>(CodedTileRows()),
    sum_coded_tiles<Codes<Coding::kE2m1>>(CodedTileRows()), sum_coded_tiles<Codes<Coding::kE4m3>>(CodedTileRows()),
};

inline const std::array<SumCodedTile, kCodedRows>& coded_tiles_of(const Matrix& w) {
    return kSumCodedTiles[static_cast<int>(w.coding) - static_cast<int>(Coding::kBfloat)];
}

// Computes sums[rows][kPanel] of up to kGroupRows rows times a panel of codes, which are widened to floats first.
inline void sum_widened(const float* x, int ldx, int rows, const Matrix& w, int panel, const CodedAhead& ahead,
                        float* sums) {
    const int tiles = (rows + kTileRows - 1) / kTileRows;
    alignas(64) float widened[kWidened * kPanel];
    for (int i = 0; i < w.k; i += kWidened) {
        const int components = std::min(kWidened, w.k - i);
        widen_panel(w, panel, i, i + components, ahead, widened);
        for (int t = 0; t < tiles; ++t) {
            const int row = part_begin(rows, t, tiles), last = part_begin(rows, t + 1, tiles);
            kSumTilesSame[last - row - 1](x + std::size_t(row) * ldx + i, ldx, widened, components, nullptr, 0, i > 0,
                                          sums + row * kPanel);
        }
    }
}

// Returns the largest number of rows of a tile. Rows a multiple of 4 KiB apart map to one set of the L1 cache, which
// has 8 ways.
inline int most_tile_rows(int ldx) { return ldx % 1024 == 0 && kTileRows > 8 ? 8 : kTileRows; }

// Multiplies rows [begin, end) with one panel of floats [k][kPanel]; `next` is the panel that this lane will probably
// take next.
inline void multiply_panel(const float* x, int ldx, int begin, int end, const float* panel, const float* next, int k,
                           const PanelOutput& output) {
    const int most = most_tile_rows(ldx), tiles = (end - begin + most - 1) / most;
    const int passes = tiles * (kPanel / kWidth / tile_vectors((end - begin + tiles - 1) / tiles));
    // With few narrow tiles there are several passes over a panel, and without prefetching the next panel memory would
    // be idle in all but the first. With many tiles the slices would be less than a line per block and overlap.
    constexpr int kBlockLines = kBlock * kPanel / kLine;
    const auto& sum_tiles = kWidth < kLine && passes > 2 && passes <= kBlockLines ? kSumTilesNext : kSumTilesSame;
    const int next_lines = (kBlockLines + passes - 1) / passes;
    const std::size_t panel_floats = std::size_t(k) * kPanel;
    alignas(64) float sums[kTileRows * kPanel];
    for (int t = 0; t < tiles; ++t) {
        const int row = begin + part_begin(end - begin, t, tiles);
        const int rows = begin + part_begin(end - begin, t + 1, tiles) - row;
        sum_tiles[rows - 1](x + std::size_t(row) * ldx, ldx, panel, k, next + panel_floats / tiles * t, next_lines,
                            false, sums);
        output.take(sums, row, rows);
    }
}

// Multiplies rows [begin, end) with one panel of codes.
inline void multiply_coded_panel(const float* x, int ldx, int begin, int end, const Matrix& w, int panel,
                                 const char* next, const PanelOutput& output) {
    alignas(64) float sums[kGroupRows * kPanel];
    const int rows = end - begin, tiles = (rows + kCodedRows - 1) / kCodedRows;
    const CodedAhead ahead = ahead_of(w, panel, next);
    x += std::size_t(begin) * ldx;
    if (tiles > kCodedTiles) sum_widened(x, ldx, rows, w, panel, ahead, sums);
    for (int t = 0; t < tiles && tiles <= kCodedTiles; ++t) {
        const int row = part_begin(rows, t, tiles), last = part_begin(rows, t + 1, tiles);
        coded_tiles_of(w)[last - row - 1](x + std::size_t(row) * ldx, ldx, w, panel, ahead, sums + row * kPanel);
    }
    output.take(sums, begin, rows);
}

inline const float* floats_at(const Matrix& w, int panel) { return reinterpret_cast<const float*>(panel_at(w, panel)); }

// Computes y[m][n] (=, +=) x[m][k] * W^T (+ bias), or silu(gate) * up. All lanes call it; no barrier at the end. x, y
// have strides ldx, ldy.
inline void linear(Lane& lane, const float* x, int ldx, int m, const Matrix& w, float* y, int ldy, Into into) {
    const int panels = w.num_panels(), groups = (m + kGroupRows - 1) / kGroupRows, items = groups * panels;
    const bool is_coded = w.coding != Coding::kFloat;
    const int grain = is_coded && m <= kCodedRows * kCodedTiles ? grain_of(items, lane.size()) : 1;
    lane.share(items, grain, [&](int first, int last) {
        for (int item = first; item < last; ++item) {
            const int group = item / panels, panel = item % panels;
            const int begin = part_begin(m, group, groups), end = part_begin(m, group + 1, groups);
            const PanelOutput output(w, panel, y, ldy, into);
            const int later = item + 1 < last ? item + 1 : first + grain * lane.size();
            const int next = (later < items ? later : item) % panels;
            if (is_coded)
                multiply_coded_panel(x, ldx, begin, end, w, panel, panel_at(w, next), output);
            else
                multiply_panel(x, ldx, begin, end, floats_at(w, panel), floats_at(w, next), w.k, output);
        }
    });
}

}  // namespace tandem
