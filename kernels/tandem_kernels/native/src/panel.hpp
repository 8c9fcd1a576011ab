// Defines the panel layout of weights, and the epilogue that writes the sums of a panel to the output.
//
// A linear layer's weights [n][k] are stored in panels of kPanel columns (output features), each read as one stream.
// Products fill `sums` [rows][kPanel] of a panel, and `PanelOutput` applies the epilogue and stores them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "simd.hpp"

namespace tandem {

constexpr int kPanel = 32;

// Rows that are multiplied with a panel together, so that x stays in the cache; a whole prompt is many such items.
constexpr int kGroupRows = 140;

// Storage format of weights in a panel: floats, or codes as coded.hpp describes them. The values are those of
// `NumberFormat` in Python.
enum class Coding { kFloat, kBfloat, kInt2, kInt3, kInt4, kInt5, kInt6, kInt8, kE2m1, kE4m3 };

// Storage format of the scales of codes; the values and parts are those of `ScaleFormat` in Python. A part is stored as
// [panels][columns][kPanel].
enum class Scaling { kFloat, kHalf, kHalfPairs, kHalfZeros, kInner, kInnerPairs, kNibblePairs, kPower, kFloat8 };
constexpr int kScaleParts = 4;

struct Matrix {
    Coding coding;
    Scaling scaling;
    const void* panels;               // [ceil(n / kPanel)] panels, columns beyond n zero
    const void* scales[kScaleParts];  // null where the format has no such part
    const float* bias;  // [n] or null; for kSwiGlu in the order of the panels' columns, padding included
    int n, k;
    int group;          // components of a column that share a scale
    float offset;       // what is subtracted from each number
    int first_panel;    // index in `panels` and `scales` of this matrix's first panel

    int num_panels() const { return (n + kPanel - 1) / kPanel; }
};

// kSwiGlu: each panel holds 16 gate columns and then the matching 16 up columns; the output is silu(gate) * up, n / 2
// wide.
enum class Into { kStore, kAdd, kSwiGlu };

inline Vec silu(Vec x) { return div(x, add(splat(1.0f), exp(sub(zero(), x)))); }

// Begin of part i when [0, count) is divided into `parts` equal parts.
inline int part_begin(int count, int i, int parts) { return static_cast<int>(std::int64_t(count) * i / parts); }

// Items that a lane takes at once when an item takes about a microsecond: few pieces, but enough of them that no lane
// waits long for the last one.
inline int grain_of(int items, int lanes) {
    const int even = items / (4 * lanes);
    return even < 1 ? 1 : even > 8 ? 8 : even;
}

// Writes one panel's sums to its columns of y [rows][ldy].
class PanelOutput {
  public:
    PanelOutput(const Matrix& w, int panel, float* y, int ldy, Into into) : ldy_(ldy), into_(into) {
        const bool is_gated = into == Into::kSwiGlu;
        const int outputs = is_gated ? kPanel / 2 : kPanel, column = panel * outputs;
        const int missing = (is_gated ? w.n / 2 : w.n) - column;
        columns_ = missing < outputs ? missing : outputs;
        y_ = y + column;
        has_bias_ = w.bias != nullptr;
        if (has_bias_)
            std::memcpy(bias_, w.bias + panel * kPanel, (is_gated ? kPanel : columns_) * sizeof(float));
    }

    // Applies the epilogue to the `sums` of rows [row, row + rows) and stores them; overwrites `sums`.
    void take(float* sums, int row, int rows) const {
        float* y = y_ + std::ptrdiff_t(row) * ldy_;
        for (int r = 0; r < rows; ++r, sums += kPanel, y += ldy_) {
            if (has_bias_)
                for (int c = 0; c < kPanel; c += kWidth) store(sums + c, add(load(sums + c), load(bias_ + c)));
            if (into_ == Into::kSwiGlu)
                for (int c = 0; c < kPanel / 2; c += kWidth)
                    store(sums + c, mul(silu(load(sums + c)), load(sums + kPanel / 2 + c)));
            if (into_ == Into::kAdd)
                for (int c = 0; c < columns_; ++c) y[c] += sums[c];
            else
                std::memcpy(y, sums, columns_ * sizeof(float));
        }
    }

  private:
    float bias_[kPanel] = {};
    bool has_bias_;
    int columns_;
    float* y_;
    std::ptrdiff_t ldy_;
    Into into_;
};

}  // namespace tandem
