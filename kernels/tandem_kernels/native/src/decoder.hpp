// Runs the forward pass of a Llama-family decoder over paged KV, all layers in one run of a team. A decoder owns the
// buffers between operators, but not the weights.
//
// The reference is `tandem.runtime.models.decoder`. All lanes execute the same sequence of operators; a barrier
// precedes an operator that reads what another lane may have written.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention.hpp"
#include "coded.hpp"
#include "linear.hpp"
#include "linear_int8.hpp"
#include "rows.hpp"
#include "team.hpp"

namespace tandem {

struct Shape {
    int hidden, inner, heads, kv_heads, head_dim, layers, vocab;
    float eps, attention_scale;
};

struct Layer {
    const float* attention_norm;
    Matrix qkv;
    const float* query_norm;  // null if the model has no head norms, like key_norm
    const float* key_norm;
    Matrix output;
    const float* mlp_norm;
    Matrix gate_up;
    Matrix down;
};

// Rows of one step. `positions` are indices into `cos` and `sin`, `[max_position, head_dim / 2]`.
struct Step {
    const std::int64_t* tokens;
    const std::int64_t* positions;
    const std::int64_t* slots;
    int num_rows;
    Rows sequences;
    Pool pool;
    const float* cos;
    const float* sin;
};

// Memory that grows and never shrinks; growing discards the content.
template <typename T>
class Buffer {
  public:
    T* at_least(std::size_t count) {
        if (count > size_) {
            memory_.reset(static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{64})));
            size_ = count;
        }
        return memory_.get();
    }
    std::size_t bytes() const { return size_ * sizeof(T); }

  private:
    struct Free {
        void operator()(T* p) const { ::operator delete(p, std::align_val_t{64}); }
    };
    std::unique_ptr<T, Free> memory_;
    std::size_t size_ = 0;
};

// Float rows as the input of products: call `reserve`, then `prepare` for each row, then `multiply`.
class FloatRows {
  public:
    static constexpr bool kIsPlain = true;

    void reserve(std::size_t, int) {}
    void prepare(const float*, int, int) {}
    void multiply(Lane& lane, const float* x, int rows, const Matrix& w, float* y, int ldy, Into into) {
        linear(lane, x, w.k, rows, w, y, ldy, into);
    }
    std::size_t bytes() const { return 0; }
};

// Rows quantised to int8 as the input of integer products; the interface of FloatRows.
class QuantizedRows {
  public:
    static constexpr bool kIsPlain = false;

    // Reserves memory for `rows` rows of at most `width` components.
    void reserve(std::size_t rows, int width) {
        values_.at_least(rows * width);
        scales_.at_least(rows * width / kRowGroup);
        sums_.at_least(rows * width / kRowGroup);
    }
    void prepare(const float* x, int width, int row) { quantize_row(x, row, rows_of(width)); }
    void multiply(Lane& lane, const float*, int rows, const Matrix& w, float* y, int ldy, Into into) {
        linear(lane, rows_of(w.k), rows, w, y, ldy, into);
    }
    std::size_t bytes() const { return values_.bytes() + scales_.bytes() + sums_.bytes(); }

  private:
    Int8Rows rows_of(int width) { return {values_.at_least(0), scales_.at_least(0), sums_.at_least(0), width}; }

    Buffer<Activation> values_;
    Buffer<float> scales_;
    Buffer<std::int32_t> sums_;
};

// Interface of decoders, independent of the type of their products.
class AnyDecoder {
  public:
    virtual ~AnyDecoder() = default;
    // Writes the KV of the step's rows to the pool and their last hidden states to `hidden` [num_rows, hidden].
    virtual void forward(Team& team, const Step& step, float* hidden) = 0;
    // Computes next-token logits [num_rows, vocab] of hidden rows.
    virtual void logits(Team& team, const float* hidden, int num_rows, float* out) = 0;
    // Returns the bytes of the buffers between operators.
    virtual std::size_t buffer_bytes() const = 0;
};

template <typename Input>
class Decoder final : public AnyDecoder {
  public:
    // `embeddings` are [vocab, hidden], null if they are the head's weights; all weights must outlive this object.
    Decoder(const Shape& shape, std::vector<Layer> layers, const float* norm, const Matrix& head,
            const float* embeddings)
        : shape_(shape), layers_(std::move(layers)), norm_(norm), head_(head), embeddings_(embeddings) {}

    void forward(Team& team, const Step& step, float* hidden) override {
        const std::size_t rows = step.num_rows;
        const Shape& s = shape_;
        const Work work{
            .normed = normed_.at_least(rows * s.hidden),
            .qkv = qkv_.at_least(rows * qkv_width()),
            .mixed = mixed_.at_least(rows * s.heads * s.head_dim),
            .inner = inner_.at_least(rows * s.inner),
            .scratch = scratch_.at_least(team.size() * scratch_stride(step.pool)),
        };
        input_.reserve(rows, std::max({s.hidden, s.inner, s.heads * s.head_dim}));
        team.run([&](Lane& lane) {
            lane.share(step.num_rows, kRowGrain, [&](int begin, int end) {
                for (int r = begin; r < end; ++r) embed(step.tokens[r], hidden + std::size_t(r) * s.hidden);
            });
            lane.wait();
            for (int i = 0; i < s.layers; ++i) run_layer(lane, step, i, work, hidden);
        });
    }

    void logits(Team& team, const float* hidden, int num_rows, float* out) override {
        float* normed = normed_.at_least(std::size_t(num_rows) * shape_.hidden);
        input_.reserve(num_rows, shape_.hidden);
        team.run([&](Lane& lane) {
            normalise(lane, hidden, num_rows, norm_, normed);
            lane.wait();
            input_.multiply(lane, normed, num_rows, head_, out, shape_.vocab, Into::kStore);
        });
    }

    std::size_t buffer_bytes() const override {
        return normed_.bytes() + qkv_.bytes() + mixed_.bytes() + inner_.bytes() + scratch_.bytes() + input_.bytes();
    }

  private:
    static constexpr int kRowGrain = 4;

    struct Work {
        float *normed, *qkv, *mixed, *inner, *scratch;
    };

    void embed(std::int64_t token, float* out) const {
        if (embeddings_)
            copy_row(embeddings_ + token * shape_.hidden, shape_.hidden, out);
        else
            embed_row(head_, token, out);
    }

    int qkv_width() const { return (shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim; }

    // Scratch floats of one lane, a whole number of cache lines, so that lanes share none.
    std::size_t scratch_stride(const Pool& pool) const {
        return (attention_scratch_floats(pool, shape_.heads) + 15) / 16 * 16;
    }

    void run_layer(Lane& lane, const Step& step, int index, const Work& work, float* x) {
        const Shape& s = shape_;
        const Layer& layer = layers_[index];
        const int rows = step.num_rows;
        normalise(lane, x, rows, layer.attention_norm, work.normed);
        lane.wait();
        input_.multiply(lane, work.normed, rows, layer.qkv, work.qkv, qkv_width(), Into::kStore);
        lane.wait();
        place(lane, step, layer, index, work.qkv);
        lane.wait();
        attention(lane, work.qkv, qkv_width(), step.pool, index, step.sequences, s.heads, s.attention_scale,
                  work.mixed, s.heads * s.head_dim, work.scratch + lane.rank() * scratch_stride(step.pool));
        lane.wait();
        add_product(lane, work.mixed, rows, layer.output, x);
        normalise(lane, x, rows, layer.mlp_norm, work.normed);
        lane.wait();
        input_.multiply(lane, work.normed, rows, layer.gate_up, work.inner, s.inner, Into::kSwiGlu);
        lane.wait();
        add_product(lane, work.inner, rows, layer.down, x);
    }

    // Computes x += in * W^T, with a barrier at the end.
    void add_product(Lane& lane, const float* in, int rows, const Matrix& weights, float* x) {
        if constexpr (!Input::kIsPlain) {
            lane.share(rows, kRowGrain, [&](int begin, int end) {
                for (int r = begin; r < end; ++r) input_.prepare(in + std::size_t(r) * weights.k, weights.k, r);
            });
            lane.wait();
        }
        input_.multiply(lane, in, rows, weights, x, shape_.hidden, Into::kAdd);
        lane.wait();
    }

    // Normalises rows and prepares them as the input of a product.
    void normalise(Lane& lane, const float* x, int rows, const float* weight, float* out) {
        const int width = shape_.hidden;
        lane.share(rows, kRowGrain, [&](int begin, int end) {
            for (int r = begin; r < end; ++r) {
                float* row = out + std::size_t(r) * width;
                rms_norm(x + std::size_t(r) * width, weight, shape_.eps, width, row);
                input_.prepare(row, width, r);
            }
        });
    }

    // Normalises (if the model has head norms) and rotates queries in place, and writes keys and values to the pool.
    void place(Lane& lane, const Step& step, const Layer& layer, int index, float* qkv) {
        const Shape& s = shape_;
        const int dim = s.head_dim;
        lane.share(step.num_rows, kRowGrain, [&](int begin, int end) {
            for (int r = begin; r < end; ++r) {
                float* row = qkv + std::size_t(r) * qkv_width();
                const float* cos = step.cos + step.positions[r] * (dim / 2);
                const float* sin = step.sin + step.positions[r] * (dim / 2);
                for (int h = 0; h < s.heads + s.kv_heads; ++h) {
                    float* head = row + std::size_t(h) * dim;
                    const bool is_key = h >= s.heads;
                    const float* norm = is_key ? layer.key_norm : layer.query_norm;
                    if (norm) rms_norm(head, norm, s.eps, dim, head);
                    rotate(head, cos, sin, dim,
                           is_key ? pool_row(step.pool, step.slots[r], h - s.heads, index, 0) : head);
                }
                for (int g = 0; g < s.kv_heads; ++g)
                    copy_row(row + std::size_t(s.heads + s.kv_heads + g) * dim, dim,
                             pool_row(step.pool, step.slots[r], g, index, 1));
            }
        });
    }

    const Shape shape_;
    const std::vector<Layer> layers_;
    const float* const norm_;
    const Matrix head_;
    const float* const embeddings_;
    Buffer<float> normed_, qkv_, mixed_, inner_, scratch_;
    Input input_;
};

}  // namespace tandem
