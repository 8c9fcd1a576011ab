// Computes digests of slabs of KV blocks as `tandem_kernels.contract` defines them.
#pragma once

#include <cstdint>

namespace tandem {

constexpr std::uint64_t kDigestWord = 0x9E3779B97F4A7C15u;
constexpr std::uint64_t kDigestMultiplier = 0xBF58476D1CE4E5B9u;
constexpr std::uint64_t kDigestHead = 0x94D049BB133111EBu;
constexpr std::uint64_t kDigestBlock = 0xD6E8FEB86659FD93u;

// The shift copies the sign bit, as the contract requires.
inline std::uint64_t mix(std::uint64_t word, std::uint64_t salt) {
    const std::uint64_t x = (word ^ salt) * kDigestMultiplier;
    return x ^ static_cast<std::uint64_t>(static_cast<std::int64_t>(x) >> 32);
}

inline std::uint64_t slab_digest(const std::uint64_t* words, std::uint64_t count, std::int64_t head,
                                 std::int64_t block_index) {
    // The sum may be taken in any order: independent partial sums, which the compiler vectorises.
    constexpr int kStrands = 32;
    std::uint64_t sums[kStrands] = {};
    std::uint64_t j = 0;
    for (; j + kStrands <= count; j += kStrands)
        for (int s = 0; s < kStrands; ++s)
            sums[s] += mix(words[j + s], (j + s) * kDigestWord);
    std::uint64_t sum = 0;
    for (int s = 0; s < kStrands; ++s) sum += sums[s];
    for (; j < count; ++j) sum += mix(words[j], j * kDigestWord);
    return sum + static_cast<std::uint64_t>(head + 1) * kDigestHead +
           static_cast<std::uint64_t>(block_index + 1) * kDigestBlock;
}

}  // namespace tandem
