// Decodes weights that are stored losslessly in fewer bits than a float.
//
// A decode step reads every weight once and computes little with it, so its time is proportional to the bytes read.
// Checkpoints seldom hold 32 bits of information per weight: bfloat16 has 16, a file of 4-bit blocks has 5. Packing
// keeps a matrix in the bits of its file, and products widen it in registers to the floats that the file stands for.
// `tandem_kernels.reference.coded` defines these.
#pragma once

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
    CodedAhead(const char* end, const char* next, int distance) : end_(end), next_(next), distance_(distance) {}

    // Prefetches one line, the distance ahead of `p`.
    TANDEM_INLINE void request(const void* p) const {
        const char* place = static_cast<const char*>(p) + distance_;
        __builtin_prefetch(place < end_ ? place : next_ + (place - end_), 0, 2);
    }
    // Prefetches the lines of kCodedColumns words, the distance ahead of `p`.
    TANDEM_INLINE void request_words(const std::uint32_t* p) const {
        for (int c = 0; c < kCodedColumns; c += kLineWords) request(p + c);
    }

  private:
    static constexpr int kLineWords = 16;
    const char *end_, *next_;
    int distance_;  // bytes
};

// Components of a block: the unit in which codes are stored, and of which scales are shared by whole or by half.
constexpr int kCodedStep = 32;
// Components of a row that share an outer scale; equals OUTER_GROUP in Python.
constexpr int kOuterGroup = 256;
constexpr float kInnerZero = 128.0f;

// Codes of a panel are blocks [k / kCodedStep] of planes, and a plane has words [words][kPanel], each of the bits of
// several components of a column. A plane of 8 bits has words of four components, of 4 bits of eight, of 2 bits of 16,
// of 1 bit of 32. Byte j of a word has the bits of components j, j + 4, ..., lowest bits first, so that one mask yields
// four neighbours as bytes. A code of 5 or 6 bits has a plane of its low four and one of the others, a code of 3 a
// plane of its low two and one of its highest.
struct Planes {
    int eights, fours, twos, ones;  // words of each plane, 0 where there is none
    constexpr int words() const { return eights + fours + twos + ones; }
};
constexpr Planes planes_of(Coding coding) {
    switch (coding) {
        case Coding::kInt2: return {0, 0, 2, 0};
        case Coding::kInt3: return {0, 0, 2, 1};
        case Coding::kInt5: return {0, 4, 0, 1};
        case Coding::kInt6: return {0, 4, 2, 0};
        case Coding::kInt8: case Coding::kE4m3: return {8, 0, 0, 0};
        default: return {0, 4, 0, 0};
    }
}
constexpr int four_shift(int j) { return j < 4 ? 8 * j : 8 * (j - 4) + 4; }

// Components [begin, end) of columns [first, first + kCodedColumns) of a panel.
struct Part {
    int panel, first, begin, end;
};

// Step and base of kWidth columns of one group: a weight is step * number + base.
struct Affine {
    Vec step, base;
};

// Walks over the scales of a panel, from the group that has component `i` on.
class ScaleWalk {
  public:
    ScaleWalk(const Matrix& w, int panel, int i)
        : group_((std::size_t(w.first_panel) + panel) * (w.k / w.group) + i / w.group),
          outer_((std::size_t(w.first_panel) + panel) * (w.k / kOuterGroup)),
          panel_(std::size_t(w.first_panel) + panel),
          size_(w.group),
          left_(w.group - i % w.group),
          i_(i) {}

    // Advances by components of which a group is a multiple; returns whether another group begins.
    bool advance(int components) {
        i_ += components;
        left_ -= components;
        if (left_ > 0) return false;
        ++group_;
        left_ = size_;
        return true;
    }
    std::size_t group() const { return group_ * kPanel; }
    std::size_t outer() const { return (outer_ + (unsigned(i_) / kOuterGroup)) * kPanel; }
    std::size_t panel() const { return panel_ * kPanel; }

  private:
    std::size_t group_;
    const std::size_t outer_, panel_;
    const int size_;
    int left_, i_;
};

// Returns whether weights of a coding have such scales; equals `SCALES_OF` in Python.
constexpr bool has_scaling(Coding coding, Scaling scaling) {
    switch (coding) {
        case Coding::kInt2: return scaling == Scaling::kNibblePairs;
        case Coding::kInt3: case Coding::kInt6: return scaling == Scaling::kInner;
        case Coding::kInt4: return scaling <= Scaling::kHalfZeros || scaling == Scaling::kInnerPairs;
        case Coding::kInt5:
            return scaling == Scaling::kHalf || scaling == Scaling::kHalfPairs || scaling == Scaling::kInnerPairs;
        case Coding::kE2m1: return scaling == Scaling::kPower || scaling == Scaling::kFloat8;
        default: return scaling == Scaling::kFloat || scaling == Scaling::kHalf;
    }
}

// Returns the scales of columns from `column` on at a place of a walk. The base excludes the offset.
template <Coding kCoding>
TANDEM_INLINE inline Affine affine_at(const Matrix& w, const ScaleWalk& at, int column) {
    const auto halves = [&](int part, std::size_t place) TANDEM_INLINE {
        return load_half(static_cast<const std::uint16_t*>(w.scales[part]) + place + column);
    };
    const auto bytes = [&](int part) TANDEM_INLINE {
        return widen_bytes(static_cast<const std::uint8_t*>(w.scales[part]) + at.group() + column);
    };
    const auto floats = [&](int part, std::size_t place) TANDEM_INLINE {
        return load(static_cast<const float*>(w.scales[part]) + place + column);
    };
    // Lets the compiler leave out the other scalings: this is inlined into every loop over codes.
    if (!has_scaling(kCoding, w.scaling)) __builtin_unreachable();
    switch (w.scaling) {
        case Scaling::kFloat: return {floats(0, at.group()), zero()};
        case Scaling::kHalf: return {halves(0, at.group()), zero()};
        case Scaling::kHalfPairs: return {halves(0, at.group()), halves(1, at.group())};
        case Scaling::kHalfZeros: {
            const Vec step = halves(0, at.group());
            return {step, mul(sub(zero(), field<8, 0>(bytes(1))), step)};
        }
        case Scaling::kInner:
            return {mul(sub(field<8, 0>(bytes(0)), splat(kInnerZero)), halves(1, at.outer())), zero()};
        case Scaling::kInnerPairs: {
            const Vec base = mul(field<8, 0>(bytes(1)), halves(3, at.outer()));
            return {mul(field<8, 0>(bytes(0)), halves(2, at.outer())), sub(zero(), base)};
        }
        case Scaling::kNibblePairs: {
            const Words pair = bytes(0);
            const Vec base = mul(field<4, 4>(pair), halves(2, at.outer()));
            return {mul(field<4, 0>(pair), halves(1, at.outer())), sub(zero(), base)};
        }
        case Scaling::kPower: return {power(bytes(0)), zero()};
        default: {
            const Vec step = mul(float8_field<0>(bytes(0)), splat(1.0f / kFloat8Factor));
            return {div(step, floats(1, at.panel())), zero()};
        }
    }
}

// Every format has `each(w, part, ahead, use)`, which calls `use(i, weights)` for the components i of a part in
// ascending order. The part begins at a multiple of kCodedStep.

// bfloat16 weights: panels [k][kPanel] of the upper halves of floats.
struct Bfloats {
    template <typename Use>
    TANDEM_INLINE static inline void each(const Matrix& w, const Part& part, const CodedAhead& ahead, Use use) {
        const std::size_t before = (std::size_t(w.first_panel) + part.panel) * w.k + part.begin;
        const auto* p = static_cast<const std::uint16_t*>(w.panels) + before * kPanel + part.first;
        for (int i = part.begin; i < part.end; ++i, p += kPanel) {
            ahead.request(p);
            Vec weights[kCodedVectors];
            repeat<kCodedVectors>([&]<int V>() TANDEM_INLINE { weights[V] = load_bfloat(p + V * kWidth); });
            use(i, weights);
        }
    }
};

// Codes with scales.
template <Coding kCoding>
struct Codes {
    static constexpr Planes kPlanes = planes_of(kCoding);
    static constexpr int kBlockWords = kPlanes.words() * kPanel;
    static constexpr int kUnit = 8;  // components of a step of the loop below

    static const std::uint32_t* block(const Matrix& w, int panel, int i) {
        const std::size_t before = (std::size_t(w.first_panel) + panel) * (w.k / kCodedStep) + i / kCodedStep;
        return static_cast<const std::uint32_t*>(w.panels) + before * kBlockWords;
    }

    template <typename Use>
    TANDEM_INLINE static inline void each(const Matrix& w, const Part& part, const CodedAhead& ahead, Use use) {
        const std::uint32_t* p = block(w, part.panel, part.begin) + part.first;
        ScaleWalk walk(w, part.panel, part.begin);
        Affine affine[kCodedVectors];
        load_affine(w, walk, part.first, affine);
        for (int i = part.begin; i < part.end; i += kCodedStep, p += kBlockWords) {
            for (int unit = 0; unit < kCodedStep / kUnit; ++unit) {
                if (unit % 2 == 0 && unit + i > part.begin && walk.advance(2 * kUnit))
                    load_affine(w, walk, part.first, affine);
                Unit units[kCodedVectors];
                repeat<kCodedVectors>([&]<int V>() TANDEM_INLINE { units[V] = Unit(p + V * kWidth, unit); });
                request(ahead, p, unit);
                [&]<int... J>(std::integer_sequence<int, J...>) TANDEM_INLINE {
                    (widen<J>(units, affine, i + unit * kUnit + J, use), ...);
                }(std::make_integer_sequence<int, kUnit>());
            }
        }
    }

  private:
    // The words that have the codes of kUnit components, shifted so that the components' bits have fixed places.
    struct Unit {
        Words low, second, high;

        Unit() = default;
        Unit(const std::uint32_t* p, int unit) {
            if constexpr (kPlanes.eights != 0) {
                low = load_words(p + 2 * unit * kPanel);
                second = load_words(p + (2 * unit + 1) * kPanel);
                return;
            }
            if constexpr (kPlanes.fours != 0) low = load_words(p + unit * kPanel);
            const std::uint32_t* after = p + kPlanes.fours * kPanel;
            if constexpr (kPlanes.twos != 0) {
                const Words twos = shifted(load_words(after + unit / 2 * kPanel), unit % 2 * 4);
                (kPlanes.fours ? high : low) = twos;
            }
            if constexpr (kPlanes.ones != 0)
                high = shifted(load_words(after + kPlanes.twos * kPanel), 2 * unit);
        }

        // Returns component J as a number.
        template <int J>
        Vec number() const {
            constexpr int kByte = 8 * (J % 4), kQuad = J / 4;
            if constexpr (kCoding == Coding::kInt8) return field<8, kByte>(kQuad ? second : low);
            else if constexpr (kCoding == Coding::kE4m3) return float8_field<kByte>(kQuad ? second : low);
            else if constexpr (kCoding == Coding::kE2m1) return float4_field<four_shift(J)>(low);
            else if constexpr (kCoding == Coding::kInt4) return field<4, four_shift(J)>(low);
            else if constexpr (kCoding == Coding::kInt2) return field<2, kByte + 2 * kQuad>(low);
            else if constexpr (kCoding == Coding::kInt3)
                return add_bit<kByte + kQuad>(field<2, kByte + 2 * kQuad>(low), high, 4.0f);
            else if constexpr (kCoding == Coding::kInt5)
                return add_bit<kByte + kQuad>(field<4, four_shift(J)>(low), high, 16.0f);
            else
                return fma(field<2, kByte + 2 * kQuad>(high), splat(16.0f), field<4, four_shift(J)>(low));
        }
    };

    TANDEM_INLINE static inline void load_affine(const Matrix& w, const ScaleWalk& walk, int first,
                                                 Affine (&out)[kCodedVectors]) {
        repeat<kCodedVectors>([&]<int V>() TANDEM_INLINE {
            out[V] = affine_at<kCoding>(w, walk, first + V * kWidth);
            if constexpr (kCoding == Coding::kE4m3) out[V].step = mul(out[V].step, splat(1.0f / kFloat8Factor));
            // Exact, because one of offset and base is zero.
            out[V].base = fma(out[V].step, splat(-w.offset), out[V].base);
        });
    }

    // Prefetches about a quarter of a block.
    TANDEM_INLINE static inline void request(const CodedAhead& ahead, const std::uint32_t* p, int unit) {
        constexpr int kWordsPerUnit = (kPlanes.words() + 3) / 4;
        for (int word = unit * kWordsPerUnit; word < (unit + 1) * kWordsPerUnit && word < kPlanes.words(); ++word)
            ahead.request_words(p + word * kPanel);
    }

    template <int J, typename Use>
    TANDEM_INLINE static inline void widen(const Unit (&units)[kCodedVectors], const Affine (&affine)[kCodedVectors],
                                           int i, Use use) {
        Vec weights[kCodedVectors];
        repeat<kCodedVectors>([&]<int V>() TANDEM_INLINE {
            weights[V] = fma(affine[V].step, units[V].template number<J>(), affine[V].base);
        });
        use(i, weights);
    }
};

// Calls `work` with the decoder of the format of `w`, which is not kFloat.
template <typename Work>
inline auto with_coding(const Matrix& w, Work work) {
    switch (w.coding) {
        case Coding::kBfloat: return work(Bfloats{});
        case Coding::kInt2: return work(Codes<Coding::kInt2>{});
        case Coding::kInt3: return work(Codes<Coding::kInt3>{});
        case Coding::kInt4: return work(Codes<Coding::kInt4>{});
        case Coding::kInt5: return work(Codes<Coding::kInt5>{});
        case Coding::kInt6: return work(Codes<Coding::kInt6>{});
        case Coding::kInt8: return work(Codes<Coding::kInt8>{});
        case Coding::kE2m1: return work(Codes<Coding::kE2m1>{});
        default: return work(Codes<Coding::kE4m3>{});
    }
}

// Returns the bytes of kCodedStep components of a panel.
inline int block_bytes(const Matrix& w) {
    switch (w.coding) {
        case Coding::kFloat: return kCodedStep * kPanel * sizeof(float);
        case Coding::kBfloat: return kCodedStep * kPanel * sizeof(std::uint16_t);
        default: return planes_of(w.coding).words() * kPanel * sizeof(std::uint32_t);
    }
}

inline std::size_t panel_bytes(const Matrix& w) { return std::size_t(w.k) * block_bytes(w) / kCodedStep; }

inline const char* panel_at(const Matrix& w, int panel) {
    return static_cast<const char*>(w.panels) + (std::size_t(w.first_panel) + panel) * panel_bytes(w);
}

// Prefetches kAheadSteps blocks ahead in a panel; `next` is the begin of the panel after it.
constexpr int kAheadSteps = 8;
inline CodedAhead ahead_of(const Matrix& w, int panel, const char* next) {
    return {panel_at(w, panel + 1), next, block_bytes(w) * kAheadSteps};
}

// Decodes components [begin, end) of one panel to floats `out` [end - begin][kPanel].
inline void widen_panel(const Matrix& w, int panel, int begin, int end, const CodedAhead& ahead, float* out) {
    with_coding(w, [&]<typename Format>(Format) {
        for (int first = 0; first < kPanel; first += kCodedColumns)
            Format::each(w, {panel, first, begin, end}, ahead,
                         [&](int i, const Vec (&weights)[kCodedVectors]) TANDEM_INLINE {
                             float* row = out + (i - begin) * kPanel + first;
                             repeat<kCodedVectors>([&]<int V>() TANDEM_INLINE { store(row + V * kWidth, weights[V]); });
                         });
    });
}

// Decodes row `column` of an embedding table [n][k], which is packed like a weight matrix, to `out` [k].
inline void embed_row(const Matrix& w, std::int64_t column, float* out) {
    const int panel = static_cast<int>(column / kPanel), place = static_cast<int>(column % kPanel);
    const int first = place - place % kCodedColumns;
    const CodedAhead ahead = ahead_of(w, panel, panel_at(w, panel));
    if (w.coding == Coding::kFloat) {
        const auto* p = reinterpret_cast<const float*>(panel_at(w, panel)) + place;
        for (int i = 0; i < w.k; ++i) out[i] = p[std::size_t(i) * kPanel];
        return;
    }
    with_coding(w, [&]<typename Format>(Format) {
        Format::each(w, {panel, first, 0, w.k}, ahead, [&](int i, const Vec (&weights)[kCodedVectors]) TANDEM_INLINE {
            float columns[kCodedColumns];
            repeat<kCodedVectors>([&]<int V>() TANDEM_INLINE { store(columns + V * kWidth, weights[V]); });
            out[i] = columns[place - first];
        });
    });
}

}  // namespace tandem
