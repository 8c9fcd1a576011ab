// Computes causal attention of ragged rows over paged KV. The bits of a row do not depend on other rows, on the block
// size, on the number of lanes or on the vector width.
//
// The operations for a row depend only on its own query and context. The context is cut at absolute positions into
// segments of kSegment slots, and those into tiles of kTile. A segment is an online softmax (Milakov and Gimelshein,
// 2018) over its tiles in ascending order: a score is one chain of fused multiply-adds over ascending components,
// values are added slot by slot, weights are summed in kStripes interleaved partial sums. The segments' results are
// merged in ascending order (Flash-Decoding, Dao et al., 2023), so that lanes can share one row's context. Rows in one
// tile attend to different parts of it; a masked slot has a weight of exactly zero, which is the same as leaving it
// out. Its only possible effect, the sign of a zero, is removed at the end.
//
// Rows are flattened: the query heads of one KV head and token, then those of the next token, so that they share each
// tile. Scores are in units of log 2: the factor is folded into the query.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "simd.hpp"
#include "team.hpp"

namespace tandem {

// The KV pool [blocks][kv_heads][layers][2][block_size][head_dim], keys before values.
struct Pool {
    float* base;
    int kv_heads;
    int layers;
    int block_size;
    int head_dim;  // a multiple of 4
};

// Assignment of rows to sequences: `AttentionBatch` of contract.py.
struct Rows {
    const std::int32_t* query_starts;
    const std::int32_t* context_lens;
    const std::int32_t* tables;
    int table_width;
    int sequences;
};

class Attention {
  public:
    // Floats of one lane's scratch, a whole number of cache lines.
    static std::size_t scratch_floats(const Pool& pool, int heads) {
        const std::size_t rows = max_item_rows(pool, heads);
        return rounded(own_floats(pool, rows) + kPartials * partial_floats(pool));
    }

    Attention(const float* query, int ldq, const Pool& pool, int layer, const Rows& rows, int heads, float scale,
              float* out, int ldo)
        : query_(query), ldq_(ldq), out_(out), ldo_(ldo), pool_(pool), layer_(layer), rows_(rows), heads_(heads),
          ratio_(heads / pool.kv_heads), dim_(pool.head_dim), width_(padded(pool.head_dim)),
          plane_(std::ptrdiff_t(pool.block_size) * pool.head_dim), factor_(scale * 1.44269504088896341f) {}

    void run(Lane& lane, float* scratch) {
        carve(scratch, lane);
        plan(lane.size());
        Cursor at;
        lane.share(num_long_, 1, [&](int index, int) { compute(find(at, index), nullptr); });
        lane.share(num_items_ - num_long_, grain_, [&](int begin, int end) {
            Item item = find(at, num_long_ + begin);
            for (int index = begin; index < end; ++index) {
                const bool is_last = index + 1 == end;
                const Item next = is_last ? item : find(at, num_long_ + index + 1);
                compute(item, is_last ? nullptr : &next);
                item = next;
            }
        });
        if (!is_split_) return;
        lane.wait();
        Cursor from;
        lane.share(num_merges_, 1, [&](int index, int) { merge_partials(from, index); });
    }

  private:
    static constexpr int kTile = 64;
    static constexpr int kSegment = 256;
    static constexpr int kStripes = 16;
    static constexpr int kGroup = 6;  // rows in registers at once
    // Query floats of an item, whose rows share one pass over a context: many rows amortise the transposition of keys,
    // and they must fit in the L2 cache.
    static constexpr int kItemFloats = 192 * 64;
    // With fewer items per lane than this, items are cut further, so that a lane that is slow for a while does not
    // delay the others.
    static constexpr int kItemsPerLane = 8;
    static constexpr int kItemsPerGrain = 4;  // most one-row items that a lane takes at once
    static constexpr int kFewestRows = 24;
    static constexpr int kShortTokens = 8;  // most rows of a sequence that may be cut into segments
    static constexpr int kPartials = 512;   // per lane
    static constexpr float kLowest = std::numeric_limits<float>::lowest();

    // Partial softmax of some rows: weighted values [rows][width_], weights [rows][kStripes], largest score [rows].
    struct Sums {
        float* values;
        float* weights;
        float* largest;
    };

    struct Item {
        int sequence, kv_head;
        int token, num_tokens;  // range of the sequence's rows
        int first_segment, num_segments;
        int partial;  // index of the segment's partial sums; -1: the result goes to `out`
    };

    // Position of a lane in the list of items, which it processes in ascending order.
    struct Cursor {
        int pass = 0, sequence = 0;
        int item = 0, partial = 0;  // numbers of items and partial sums before `sequence`
    };

    static int padded(int dim) { return (dim + kWidth - 1) / kWidth * kWidth; }
    static std::size_t rounded(std::size_t floats) { return (floats + 15) / 16 * 16; }
    static int max_item_rows(const Pool& pool, int heads) {
        const int ratio = heads / pool.kv_heads;
        return std::max(kItemFloats / padded(pool.head_dim) / ratio, 1) * ratio;
    }
    static std::size_t partial_floats(const Pool& pool) { return padded(pool.head_dim) + 2 * kStripes; }
    static std::size_t own_floats(const Pool& pool, std::size_t rows) {
        const std::size_t width = padded(pool.head_dim);
        const std::size_t sums = rows * (width + kStripes) + rounded(rows);
        const std::size_t tile = kGroup * kTile + 2 * width * kTile + 2 * kTile;
        return rounded(rows * width + 2 * sums + tile);
    }

    void carve(float* scratch, Lane& lane) {
        const std::size_t rows = max_item_rows(pool_, heads_);
        float* next = scratch;
        const auto take = [&](std::size_t floats) { return std::exchange(next, next + floats); };
        queries_ = take(rows * width_);
        for (Sums* sums : {&total_, &segment_})
            *sums = {take(rows * width_), take(rows * kStripes), take(rounded(rows))};
        tile_ = take(kGroup * kTile);
        keys_ = take(std::size_t(width_) * kTile);
        staged_ = take(std::size_t(width_) * kTile);
        mask_ = take(2 * kTile);
        std::fill(mask_, mask_ + kTile, 1.0f);
        std::fill(mask_ + kTile, mask_ + 2 * kTile, 0.0f);
        if (is_staged()) std::fill(staged_, staged_ + std::size_t(width_) * kTile, 0.0f);
        own_floats_ = own_floats(pool_, rows);
        lane_floats_ = scratch_floats(pool_, heads_);
        lanes_ = scratch - lane.rank() * lane_floats_;
    }

    // Returns partial sums number `index`, which are in shared memory so that another lane can merge them.
    Sums partial(int index) const {
        const std::size_t size = partial_floats(pool_);
        float* base = lanes_ + (index / kPartials) * lane_floats_ + own_floats_ + (index % kPartials) * size;
        return {base, base + width_, base + width_ + kStripes};
    }

    // Rows of values whose length is not a whole number of vectors are copied, because the last vector would read past
    // their end.
    bool is_staged() const { return dim_ % kWidth != 0; }

    // ---- items

    int num_rows(int sequence) const { return rows_.query_starts[sequence + 1] - rows_.query_starts[sequence]; }
    int num_segments(int sequence) const { return (rows_.context_lens[sequence] + kSegment - 1) / kSegment; }
    int num_chunks(int sequence) const { return (num_rows(sequence) + tokens_ - 1) / tokens_; }
    bool is_cut(int sequence) const {
        return is_split_ && num_rows(sequence) <= short_tokens() && num_segments(sequence) > 1;
    }
    int short_tokens() const { return std::min(kShortTokens, tokens_); }
    int num_items(int sequence) const {
        return pool_.kv_heads * (is_cut(sequence) ? num_segments(sequence) : num_chunks(sequence));
    }
    int num_partials(int sequence) const {
        return is_cut(sequence) ? num_rows(sequence) * heads_ * num_segments(sequence) : 0;
    }
    template <typename Count>
    std::int64_t sum(Count count) const {
        std::int64_t sum = 0;
        for (int i = 0; i < rows_.sequences; ++i) sum += count(i);
        return sum;
    }

    // Decides how the work is divided into items; every lane computes the same result.
    void plan(int lanes) {
        const auto items = [this] { return sum([this](int i) { return num_items(i); }); };
        const std::int64_t wanted = std::int64_t(kItemsPerLane) * lanes;
        is_split_ = false;
        tokens_ = max_item_rows(pool_, heads_) / ratio_;
        while (items() < wanted && tokens_ / 2 * ratio_ >= kFewestRows) tokens_ /= 2;
        if (lanes > 1 && items() < wanted) {
            is_split_ = true;
            const std::int64_t partials = sum([this](int i) { return num_partials(i); });
            is_split_ = partials > 0 && partials <= std::int64_t(kPartials) * lanes;
        }
        num_items_ = static_cast<int>(items());
        num_long_ = static_cast<int>(sum([this](int i) { return num_rows(i) > 1 ? num_items(i) : 0; }));
        grain_ = static_cast<int>(std::clamp<std::int64_t>((num_items_ - num_long_) / wanted, 1, kItemsPerGrain));
        num_merges_ = is_split_ ? pool_.kv_heads * static_cast<int>(sum([this](int i) { return is_cut(i); })) : 0;
    }

    // Sequences with several rows come first, because their items are the long ones.
    Item find(Cursor& at, int index) const {
        while (true) {
            if (at.sequence == rows_.sequences) at.sequence = 0, ++at.pass;
            const int i = at.sequence;
            if ((num_rows(i) == 1) == (at.pass == 1)) {
                if (index < at.item + num_items(i)) return item_of(i, index - at.item, at.partial);
                at.item += num_items(i);
                at.partial += num_partials(i);
            }
            ++at.sequence;
        }
    }

    Item item_of(int sequence, int index, int partial) const {
        const int kv_head = index % pool_.kv_heads, rows = num_rows(sequence);
        if (is_cut(sequence))
            return {sequence, kv_head, 0, rows, index / pool_.kv_heads, 1, partial + index * rows * ratio_};
        // The last rows attend to the most slots, so they are assigned first.
        const int chunk = num_chunks(sequence) - 1 - index / pool_.kv_heads;
        const int token = chunk * tokens_, count = std::min(tokens_, rows - token);
        const int seen = rows_.context_lens[sequence] - rows + token + count;
        return {sequence, kv_head, token, count, 0, (seen + kSegment - 1) / kSegment, -1};
    }

    // ---- one item

    // Computes one item; `next` is the item that this lane computes afterwards, or null.
    void compute(const Item& item, const Item* next) {
        const int rows = item.num_tokens * ratio_;
        take_queries(item);
        for (int s = item.first_segment; s < item.first_segment + item.num_segments; ++s) {
            const Sums& sums = s == item.first_segment ? total_ : segment_;
            clear(sums, rows);
            attend(item, s, sums, s + 1 == item.first_segment + item.num_segments ? next : &item);
            if (s == item.first_segment) continue;
            // Rows that end before this segment have no result in it.
            const int skipped = std::clamp(s * kSegment - first_seen(item) + 1, 0, item.num_tokens) * ratio_;
            for (int r = skipped; r < rows; ++r) merge(row_of(segment_, r), row_of(total_, r));
        }
        for (int r = 0; r < rows; ++r) {
            if (item.partial >= 0)
                copy(row_of(total_, r), partial(item.partial + r));
            else
                finish(row_of(total_, r), item.sequence, item.token + r / ratio_, item.kv_head * ratio_ + r % ratio_);
        }
    }

    // Returns the number of slots that the item's first token attends to.
    int first_seen(const Item& item) const {
        return rows_.context_lens[item.sequence] - num_rows(item.sequence) + item.token + 1;
    }

    const float* query_row(int sequence, int token, int head) const {
        return query_ + (std::size_t(rows_.query_starts[sequence]) + token) * ldq_ + std::size_t(head) * dim_;
    }

    void take_queries(const Item& item) {
        for (int r = 0; r < item.num_tokens * ratio_; ++r) {
            const float* from = query_row(item.sequence, item.token + r / ratio_, item.kv_head * ratio_ + r % ratio_);
            for (int d = 0; d < dim_; ++d) queries_[std::size_t(r) * width_ + d] = from[d] * factor_;
        }
    }

    Sums row_of(const Sums& sums, int row) const {
        return {sums.values + std::size_t(row) * width_, sums.weights + std::size_t(row) * kStripes,
                sums.largest + row};
    }

    void clear(const Sums& sums, int rows) const {
        std::fill(sums.values, sums.values + std::size_t(rows) * width_, 0.0f);
        std::fill(sums.weights, sums.weights + std::size_t(rows) * kStripes, 0.0f);
        std::fill(sums.largest, sums.largest + rows, kLowest);
    }

    void copy(const Sums& from, const Sums& to) const {
        std::memcpy(to.values, from.values, width_ * sizeof(float));
        std::memcpy(to.weights, from.weights, kStripes * sizeof(float));
        *to.largest = *from.largest;
    }

    // Merges one row's segment into the result of the segments before it.
    void merge(const Sums& segment, const Sums& total) {
        const float largest = std::max(*total.largest, *segment.largest);
        const Vec before = exp2(splat(*total.largest - largest)), now = exp2(splat(*segment.largest - largest));
        *total.largest = largest;
        for (int d = 0; d < width_; d += kWidth)
            store(total.values + d, fma(load(segment.values + d), now, mul(load(total.values + d), before)));
        for (int s = 0; s < kStripes; s += kWidth)
            store(total.weights + s, fma(load(segment.weights + s), now, mul(load(total.weights + s), before)));
    }

    void finish(const Sums& sums, int sequence, int token, int head) const {
        float stripes[kStripes];
        std::memcpy(stripes, sums.weights, sizeof stripes);
        for (int half = kStripes / 2; half > 0; half /= 2)
            for (int s = 0; s < half; ++s) stripes[s] += stripes[s + half];
        float* row = out_ + (std::size_t(rows_.query_starts[sequence]) + token) * ldo_ + std::size_t(head) * dim_;
        // Adding 0 turns -0 into 0.
        for (int d = 0; d < dim_; ++d) row[d] = (sums.values[d] + 0.0f) / stripes[0];
    }

    // Merges the segments of pair number `index` of the pairs of cut sequence and KV head.
    void merge_partials(Cursor& at, int index) {
        while (true) {
            if (at.sequence == rows_.sequences) at.sequence = 0, ++at.pass;
            const int i = at.sequence;
            if (is_cut(i) && (num_rows(i) == 1) == (at.pass == 1)) {
                if (index < at.item + pool_.kv_heads) break;
                at.item += pool_.kv_heads;
                at.partial += num_partials(i);
            }
            ++at.sequence;
        }
        const int kv_head = index - at.item, rows = num_rows(at.sequence) * ratio_;
        for (int r = 0; r < rows; ++r) {
            const auto of = [&](int s) { return partial(at.partial + (s * pool_.kv_heads + kv_head) * rows + r); };
            copy(of(0), total_);
            // A row may end before the last segment, which is then empty and has no effect.
            for (int s = 1; s < num_segments(at.sequence); ++s) merge(of(s), total_);
            finish(total_, at.sequence, r / ratio_, kv_head * ratio_ + r % ratio_);
        }
    }

    // ---- one segment

    // Returns the number of slots that the item's last row attends to.
    int end_seen(const Item& item) const { return first_seen(item) + item.num_tokens - 1; }

    // Adds the part of a segment that the item's rows attend to to `sums`. `next` is the item whose tile is loaded
    // afterwards, or null.
    void attend(const Item& item, int segment, const Sums& sums, const Item* next) {
        const int rows = item.num_tokens * ratio_;
        const int last = std::min(end_seen(item), (segment + 1) * kSegment);
        const int groups = (rows + kGroup - 1) / kGroup;
        for (int start = segment * kSegment; start < last; start += kTile) {
            load_tile(item, start, std::min(last - start, kTile));
            if (start + kTile < last)
                look_ahead(item, start + kTile);
            else if (next)
                look_ahead(*next, next == &item ? start + kTile : next->first_segment * kSegment);
            for (int g = 0; g < groups; ++g) {
                const int begin = rows * g / groups, end = rows * (g + 1) / groups;
                int seen[kGroup];
                for (int r = begin; r < end; ++r)
                    seen[r - begin] = std::clamp(first_seen(item) + r / ratio_ - start, 0, kTile);
                if (seen[end - 1 - begin] == 0) continue;
                if (g == 0)
                    add_tile<true>(end - begin, begin, seen, sums);
                else
                    add_tile<false>(end - begin, begin, seen, sums);
            }
        }
    }

    // Writes the addresses of the keys of slots [start, start + count) to `rows`.
    void locate(const Item& item, int start, int count, const float** rows) const {
        const std::int32_t* table = rows_.tables + std::size_t(item.sequence) * rows_.table_width;
        const std::ptrdiff_t head = (std::ptrdiff_t(item.kv_head) * pool_.layers + layer_) * 2 * plane_;
        const std::ptrdiff_t block = std::ptrdiff_t(pool_.kv_heads) * pool_.layers * 2 * plane_;
        int entry = start / pool_.block_size, offset = start % pool_.block_size;
        for (int i = 0; i < count; ++entry, offset = 0) {
            const float* row = pool_.base + table[entry] * block + head + std::ptrdiff_t(offset) * dim_;
            for (; offset < pool_.block_size && i < count; ++offset, ++i, row += dim_) rows[i] = row;
        }
    }

    // Stores the addresses of the following tile, which the first rows of the current tile prefetch.
    void look_ahead(const Item& item, int start) {
        const int count = std::min(end_seen(item) - start, kTile);
        locate(item, start, count, next_);
        std::fill(next_ + count, next_ + kTile, next_[count - 1]);
    }

    // Loads `count` slots from `start` on: keys transposed, with one slot per column, values as rows.
    void load_tile(const Item& item, int start, int count) {
        const float* rows[kTile];
        locate(item, start, count, rows);
        // Columns to the end of a vector repeat the last slot; no row attends to them.
        for (int i = count; i % kWidth; ++i) rows[i] = rows[count - 1];
        for (int s = 0; s < count; s += kWidth)
            for (int d = 0; d < dim_; d += 4) {
                Vec columns[4];
                load_columns(rows + s, d, columns);
                for (int j = 0; j < 4; ++j) store(keys_ + (d + j) * kTile + s, columns[j]);
            }
        for (int i = 0; i < count; ++i) values_[i] = rows[i] + plane_;
        // Default for the last tile; `look_ahead` overwrites it.
        std::copy(rows, rows + count, next_);
        std::fill(next_ + count, next_ + kTile, rows[0]);
        if (!is_staged()) return;
        for (int i = 0; i < count; ++i) {
            float* staged = staged_ + std::size_t(i) * width_;
            std::memcpy(staged, values_[i], dim_ * sizeof(float));
            values_[i] = staged;
        }
    }

    // ---- one tile and group of rows; with `Ahead`, also prefetches the following tile

    template <bool Ahead>
    void add_tile(int rows, int first, const int* seen, const Sums& sums) {
        switch (rows) {
            case 1: return add_rows<1, Ahead>(first, seen, sums);
            case 2: return add_rows<2, Ahead>(first, seen, sums);
            case 3: return add_rows<3, Ahead>(first, seen, sums);
            case 4: return add_rows<4, Ahead>(first, seen, sums);
            case 5: return add_rows<5, Ahead>(first, seen, sums);
            default: return add_rows<6, Ahead>(first, seen, sums);
        }
    }

    template <int R, bool Ahead>
    void add_rows(int first, const int* seen, const Sums& sums) {
        static_assert(R <= kWidth && R <= kGroup);
        const int count = seen[R - 1];
        const int vectors = (count + kWidth - 1) / kWidth;
        const Sums of = row_of(sums, first);
        score<R, Ahead>(queries_ + std::size_t(first) * width_, vectors);
        update_softmax<R>(seen, vectors, of);
        add_values<R, Ahead>(count, of.values);
    }

    // Returns the vectors of columns in registers for R rows: enough chains to fill the pipeline, few enough not to
    // spill.
    template <int R>
    static constexpr int columns_of() {
        if (kWidth == 16) return 4;
        return R == 1 ? 8 : R <= 3 ? 4 : 2;
    }

    // Prefetches `floats` floats into the L2 cache; in L1 they would evict the current tile. Spread over the
    // arithmetic, prefetching lets one row read its context at memory bandwidth (measured: 1.6 times as fast as
    // without).
    template <int floats>
    [[gnu::always_inline]] static void ask(const float* from) {
#pragma GCC unroll 8
        for (int i = 0; i < floats; i += 16) __builtin_prefetch(from + i, 0, 2);
    }

    // Computes sums[R][V] += a[R][count] * rows, where `row(k)` returns V vectors.
    template <int R, int V, typename Row>
    [[gnu::always_inline]] static void accumulate(Vec (&sums)[R][V], const float* a, int lda, int count, Row row) {
        for (int k = 0; k < count; ++k) {
            const float* from = row(k);
            Vec b[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) b[v] = load(from + v * kWidth);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                const Vec x = splat(a[r * lda + k]);
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) sums[r][v] = fma(x, b[v], sums[r][v]);
            }
        }
    }

    // Computes tile_[R][vectors] = queries[R][dim_] * keys_.
    template <int R, bool Ahead, int V = columns_of<R>()>
    void score(const float* queries, int vectors, int column = 0) {
        for (; vectors >= V; vectors -= V, column += V * kWidth) {
            Vec sums[R][V];
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) sums[r][v] = zero();
            accumulate<R, V>(sums, queries, width_, dim_, [&](int d) {
                if (Ahead && column == 0) ask<64>(next_[d % kTile] + d / kTile * 64);
                return keys_ + d * kTile + column;
            });
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) store(tile_ + r * kTile + column + v * kWidth, sums[r][v]);
        }
        if constexpr (V > 1)
            if (vectors) score<R, Ahead, V / 2>(queries, vectors, column);
    }

    // Turns scores in tile_ into weights relative to the largest score so far, and stores the factor for earlier sums
    // in decay_.
    template <int R>
    void update_softmax(const int* seen, int vectors, const Sums& sums) {
        std::fill(decay_, decay_ + kWidth, 0.0f);
        for (int r = 0; r < R; ++r) {
            float* row = tile_ + r * kTile;
            for (int i = seen[r]; i < vectors * kWidth; ++i) row[i] = kLowest;
            Vec top = load(row);
            for (int v = 1; v < vectors; ++v) top = max(top, load(row + v * kWidth));
            const float largest = std::max(sums.largest[r], max_lane(top));
            decay_[r] = sums.largest[r] - largest;
            sums.largest[r] = largest;
        }
        store(decay_, exp2(load(decay_)));
        constexpr int kParts = kStripes / kWidth;
        for (int r = 0; r < R; ++r) {
            float* row = tile_ + r * kTile;
            const Vec largest = splat(sums.largest[r]), decay = splat(decay_[r]);
            Vec weights[kParts];
            for (int s = 0; s < kParts; ++s) weights[s] = mul(load(sums.weights + r * kStripes + s * kWidth), decay);
            const bool is_whole = seen[r] >= vectors * kWidth;
            for (int v = 0; v < vectors; ++v) {
                Vec weight = exp2(sub(load(row + v * kWidth), largest));
                if (!is_whole) weight = mul(weight, load(mask_ + kTile - seen[r] + v * kWidth));
                store(row + v * kWidth, weight);
                weights[v % kParts] = add(weights[v % kParts], weight);
            }
            for (int s = 0; s < kParts; ++s) store(sums.weights + r * kStripes + s * kWidth, weights[s]);
        }
    }

    // Computes values[R][width_] = values * decay_ + tile_[R][count] * values_.
    template <int R, bool Ahead, int V = columns_of<R>()>
    void add_values(int count, float* values, int column = 0) {
        for (; column + V * kWidth <= width_; column += V * kWidth) {
            Vec sums[R][V];
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v)
                    sums[r][v] = mul(load(values + r * width_ + column + v * kWidth), splat(decay_[r]));
            accumulate<R, V>(sums, tile_, kTile, count, [&](int k) {
                if (Ahead) ask<V * kWidth>(next_[k] + plane_ + column);
                return values_[k] + column;
            });
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) store(values + r * width_ + column + v * kWidth, sums[r][v]);
        }
        if constexpr (V > 1)
            if (column < width_) add_values<R, Ahead, V / 2>(count, values, column);
    }

    const float* const query_;
    const int ldq_;
    float* const out_;
    const int ldo_;
    const Pool& pool_;
    const int layer_;
    const Rows& rows_;
    const int heads_;
    const int ratio_;             // query heads per KV head
    const int dim_, width_;       // width_: dim_ rounded up to whole vectors
    const std::ptrdiff_t plane_;  // floats from a slot's key to its value
    const float factor_;

    int tokens_ = 1;  // most tokens of an item
    bool is_split_ = false;
    int num_items_ = 0, num_long_ = 0, num_merges_ = 0;
    int grain_ = 1;  // one-row items that a lane takes at once, so that it can prefetch the next one

    float* queries_;  // [rows][width_], times factor_
    float* tile_;     // [kGroup][kTile]: scores, then weights
    float* keys_;     // [dim_][kTile]
    float* staged_;   // [kTile][width_]
    float* mask_;     // kTile ones, then kTile zeros
    float decay_[kWidth];  // one factor per row of a group
    Sums total_, segment_;
    const float* values_[kTile];  // values of the tile's slots
    const float* next_[kTile];  // keys of the following tile
    std::size_t own_floats_, lane_floats_;
    float* lanes_;  // scratch of lane 0
};

// Returns the floats of scratch per lane, a multiple of 16.
inline std::size_t attention_scratch_floats(const Pool& pool, int heads) {
    return Attention::scratch_floats(pool, heads);
}

// Computes attention from `query` [T][ldq] to `out` [T][ldo], both with head h of a row at column h * head_dim. All
// lanes call it; no barrier at the end. `scratch` is this lane's part of one array in which the lanes' parts are
// attention_scratch_floats apart, in the order of their ranks, because lanes read each other's parts.
inline void attention(Lane& lane, const float* query, int ldq, const Pool& pool, int layer, const Rows& rows,
                      int heads, float scale, float* out, int ldo, float* scratch) {
    Attention(query, ldq, pool, layer, rows, heads, scale, out, ldo).run(lane, scratch);
}

}  // namespace tandem
