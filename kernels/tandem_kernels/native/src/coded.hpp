// Decodes weights that are stored losslessly in fewer bits than a float.
//
// A decode step reads every weight once and computes little with it, so its time is proportional to the bytes read.
// Checkpoints seldom hold 32 bits of information per weight: bfloat16 has 16, a file of 4-bit blocks has 5. Packing
// keeps a matrix in fewer bits if every float can be restored bit by bit, and products widen it in registers.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "panel.hpp"
#include "simd.hpp"

namespace tandem {

constexpr int kCodedVectors = 2;  // vectors of columns that `each` yields at once
constexpr int kCodedColumns = kCodedVectors * kWidth;

// Prefetches weights into the L2 cache during a pass over a panel: the lines a constant distance ahead and, towards the
// end of the panel, the beginning of the panel that the lane will take next.
class CodedAhead {
  public:
    // The current panel ends at `end`; `next` is the begin of the next panel, which has as many bytes.
    CodedAhead(const char* end, const char* next) : end_(end), next_(next) {}

    // Prefetches one line, kDistance ahead of `p`.
    void request(const void* p) const {
        const char* place = static_cast<const char*>(p) + kDistance;
        __builtin_prefetch(place < end_ ? place : next_ + (place - end_), 0, 2);
    }
    // Prefetches the lines of kCodedColumns words, kDistance ahead of `p`.
    void request_words(const std::uint32_t* p) const {
        for (int c = 0; c < kCodedColumns; c += kLineWords) request(p + c);
    }

  private:
    static constexpr int kDistance = 4096;  // bytes
    static constexpr int kLineWords = 16;
    const char *end_, *next_;
};

// Bit offset of code j in a word of eight: the low halves of the bytes, then the high halves, so that one mask yields
// four neighbours as bytes.
constexpr int four_shift(int j) { return j < 4 ? 8 * j : 8 * (j - 4) + 4; }

// Components [begin, end) of columns [first, first + kCodedColumns) of a panel.
struct Part {
    int panel, first, begin, end;
};

// Every format has `each(w, part, ahead, use)`, which calls `use(i, weights)` for the components i of a part in
// ascending order. The part begins at a multiple of kCodedStep.
constexpr int kCodedStep = 32;

// bfloat16 weights: panels [k][kPanel] of the upper halves of floats.
struct Bfloats {
    template <typename Use>
    static inline void each(const Matrix& w, const Part& part, const CodedAhead& ahead, Use use) {
        const std::size_t before = std::size_t(part.panel) * w.k + part.begin;
        const auto* p = static_cast<const std::uint16_t*>(w.panels) + before * kPanel + part.first;
        for (int i = part.begin; i < part.end; ++i, p += kPanel) {
            ahead.request(p);
            Vec weights[kCodedVectors];
#pragma GCC unroll 2
            for (int v = 0; v < kCodedVectors; ++v) weights[v] = load_bfloat(p + v * kWidth);
            use(i, weights);
        }
    }
};

// 8-bit weights: panels [k / 4][kPanel] of words of four bytes `value + 128`, with weight = scale * value. Int8
// products read the same panels.
struct Eights {
    static constexpr int kPerWord = 4;

    template <typename Use>
    static inline void each(const Matrix& w, const Part& part, const CodedAhead& ahead, Use use) {
        const std::size_t before = (std::size_t(part.panel) * w.k + part.begin) / kPerWord;
        const auto* p = static_cast<const std::uint32_t*>(w.panels) + before * kPanel + part.first;
        const float* scale = w.scales + std::size_t(part.panel) * (w.k / w.group) * kPanel + part.first;
        for (int step = part.begin; step < part.end; step += kCodedStep) {
            Vec scales[kCodedVectors];
            for (int v = 0; v < kCodedVectors; ++v) scales[v] = load(scale + step / w.group * kPanel + v * kWidth);
            for (int i = step; i < step + kCodedStep; i += kPerWord, p += kPanel) {
                ahead.request_words(p);
                Words words[kCodedVectors];
                for (int v = 0; v < kCodedVectors; ++v) words[v] = load_words(p + v * kWidth);
                [&]<int... J>(std::integer_sequence<int, J...>) {
                    (widen<J>(words, scales, i + J, use), ...);
                }(std::make_integer_sequence<int, kPerWord>());
            }
        }
    }

  private:
    template <int J, typename Use>
    static inline void widen(const Words (&words)[kCodedVectors], const Vec (&scales)[kCodedVectors], int i, Use use) {
        Vec weights[kCodedVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kCodedVectors; ++v)
            weights[v] = mul(scales[v], sub(field<8, 8 * J>(words[v]), splat(128.0f)));
        use(i, weights);
    }
};

// 4-bit weights: a record for each group of kCodedStep components, with words [kCodedStep / 8][kPanel] of eight 4-bit
// codes, then `step` and `base` [kPanel] in half precision; weight = fma(step, code, base). The product is exact, so a
// separate multiplication and addition, as in the file's own format, give the same weight.
struct FourRecord {
    static constexpr int kPerWord = 8;
    std::uint32_t words[kCodedStep / kPerWord][kPanel];
    std::uint16_t step[kPanel], base[kPanel];
};

inline const FourRecord* four_records(const Matrix& w, int panel) {
    return static_cast<const FourRecord*>(w.panels) + std::size_t(panel) * (w.k / kCodedStep);
}

struct Fours {
    template <typename Use>
    static inline void each(const Matrix& w, const Part& part, const CodedAhead& ahead, Use use) {
        const FourRecord* record = four_records(w, part.panel) + part.begin / kCodedStep;
        for (int i = part.begin; i < part.end; i += kCodedStep, ++record) {
            Vec step[kCodedVectors], base[kCodedVectors];
            for (int v = 0; v < kCodedVectors; ++v) {
                step[v] = load_half(record->step + part.first + v * kWidth);
                base[v] = load_half(record->base + part.first + v * kWidth);
            }
            ahead.request(record->step + part.first);
            ahead.request(record->base + part.first);
            for (int row = 0; row < kCodedStep / FourRecord::kPerWord; ++row) {
                const std::uint32_t* p = record->words[row] + part.first;
                ahead.request_words(p);
                Words words[kCodedVectors];
                for (int v = 0; v < kCodedVectors; ++v) words[v] = load_words(p + v * kWidth);
                [&]<int... J>(std::integer_sequence<int, J...>) {
                    (widen<J>(words, step, base, i + row * FourRecord::kPerWord + J, use), ...);
                }(std::make_integer_sequence<int, FourRecord::kPerWord>());
            }
        }
    }

  private:
    template <int J, typename Use>
    static inline void widen(const Words (&words)[kCodedVectors], const Vec (&step)[kCodedVectors],
                             const Vec (&base)[kCodedVectors], int i, Use use) {
        Vec weights[kCodedVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kCodedVectors; ++v)
            weights[v] = fma(step[v], field<4, four_shift(J)>(words[v]), base[v]);
        use(i, weights);
    }
};

// Calls `work` with the decoder of the format of `w`, which is not kFloat.
template <typename Work>
inline auto with_coding(const Matrix& w, Work work) {
    switch (w.coding) {
        case Coding::kBfloat: return work(Bfloats{});
        case Coding::kEight: return work(Eights{});
        default: return work(Fours{});
    }
}

inline std::size_t panel_bytes(const Matrix& w) {
    const std::size_t weights = std::size_t(w.k) * kPanel;
    switch (w.coding) {
        case Coding::kFloat: return weights * sizeof(float);
        case Coding::kBfloat: return weights * sizeof(std::uint16_t);
        case Coding::kEight: return weights;
        default: return w.k / kCodedStep * sizeof(FourRecord);
    }
}

inline const char* panel_at(const Matrix& w, int panel) {
    return static_cast<const char*>(w.panels) + panel * panel_bytes(w);
}

inline CodedAhead ahead_of(const Matrix& w, int panel, int next) { return {panel_at(w, panel + 1), panel_at(w, next)}; }

// Decodes components [begin, end) of one panel to floats `out` [end - begin][kPanel].
inline void widen_panel(const Matrix& w, int panel, int begin, int end, const CodedAhead& ahead, float* out) {
    with_coding(w, [&]<typename Codes>(Codes) {
        for (int first = 0; first < kPanel; first += kCodedColumns)
            Codes::each(w, {panel, first, begin, end}, ahead, [&](int i, const Vec (&weights)[kCodedVectors]) {
                float* row = out + (i - begin) * kPanel + first;
                for (int v = 0; v < kCodedVectors; ++v) store(row + v * kWidth, weights[v]);
            });
    });
}

inline float weight_at(const Matrix& w, std::int64_t column, int i) {
    const int panel = static_cast<int>(column / kPanel), place = static_cast<int>(column % kPanel);
    const std::size_t at = (std::size_t(panel) * w.k + i) * kPanel + place;
    switch (w.coding) {
        case Coding::kFloat: return static_cast<const float*>(w.panels)[at];
        case Coding::kBfloat:
            return std::bit_cast<float>(std::uint32_t(static_cast<const std::uint16_t*>(w.panels)[at]) << 16);
        case Coding::kEight: {
            const std::size_t word = (std::size_t(panel) * w.k + i) / Eights::kPerWord * kPanel + place;
            const std::size_t byte = word * Eights::kPerWord + i % Eights::kPerWord;
            const int value = static_cast<const std::uint8_t*>(w.panels)[byte] - 128;
            const std::size_t group = std::size_t(panel) * (w.k / w.group) + i / w.group;
            return static_cast<float>(value) * w.scales[group * kPanel + place];
        }
        default: {
            const FourRecord& record = four_records(w, panel)[i / kCodedStep];
            const int row = i % kCodedStep / FourRecord::kPerWord, j = i % FourRecord::kPerWord;
            const auto code = static_cast<float>(record.words[row][place] >> four_shift(j) & kFieldMask<4>);
            return std::fma(from_half(record.step[place]), code, from_half(record.base[place]));
        }
    }
}

// Decodes row `column` of an embedding table [n][k], which is packed like a weight matrix, to `out` [k].
inline void embed_row(const Matrix& w, std::int64_t column, float* out) {
    for (int i = 0; i < w.k; ++i) out[i] = weight_at(w, column, i);
}

}  // namespace tandem
