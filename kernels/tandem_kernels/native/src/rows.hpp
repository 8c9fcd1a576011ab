// Operations on single rows: normalisation, rotary positions, copies to the KV pool.
//
// Sums over a row are taken in kStripes interleaved partial sums, whatever the vector width of the machine, so that
// every build gives the same bits.
#pragma once

#include <cstring>

#include "attention.hpp"
#include "simd.hpp"

namespace tandem {

constexpr int kStripes = 16;
static_assert(kStripes % kWidth == 0);

inline float sum_of_squares(const float* x, int n) {
    const int whole = n - n % kStripes;
    float stripes[kStripes];
    for (int s = 0; s < kStripes; s += kWidth) {
        Vec sum = zero();
        for (int i = s; i < whole; i += kStripes) {
            const Vec v = load(x + i);
            sum = fma(v, v, sum);
        }
        store(stripes + s, sum);
    }
    float total = 0.0f;
    for (int s = 0; s < kStripes; ++s) total += stripes[s];
    for (int i = whole; i < n; ++i) total = std::fma(x[i], x[i], total);
    return total;
}

// `out = x / rms(x) * weight`; `out` may be `x`.
inline void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
    const float factor = 1.0f / std::sqrt(sum_of_squares(x, n) / static_cast<float>(n) + eps);
    for (int i = 0; i < n; ++i) out[i] = weight[i] * (x[i] * factor);
}

// Rotates one head `[dim]`, component i with component i + dim / 2; `cos`, `sin` are `[dim / 2]`.
inline void rotate(const float* x, const float* cos, const float* sin, int dim, float* out) {
    const int half = dim / 2;
    for (int i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        out[i] = std::fma(a, cos[i], -(b * sin[i]));
        out[i + half] = std::fma(b, cos[i], a * sin[i]);
    }
}

// Returns the row of the pool that holds one slot's key (plane 0) or value (plane 1) of a layer and head.
inline float* pool_row(const Pool& pool, std::int64_t slot, int head, int layer, int plane) {
    const std::int64_t block = slot / pool.block_size, offset = slot % pool.block_size;
    const std::int64_t tile = ((block * pool.kv_heads + head) * pool.layers + layer) * 2 + plane;
    return pool.base + (tile * pool.block_size + offset) * pool.head_dim;
}

inline void copy_row(const float* from, int n, float* to) {
    std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
}

}  // namespace tandem
