// Runs the forward pass of a decoder over paged KV, all layers in one run of a team. A decoder owns the
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
#include "experts.hpp"
#include "linear.hpp"
#include "linear_int8.hpp"
#include "rows.hpp"
#include "team.hpp"

namespace tandem {

// Multipliers of 1 change nothing. `has_row_norms`: queries are normalised over all heads of a row together, like keys.
struct Shape {
    int hidden, heads, kv_heads, head_dim, layers, vocab, has_row_norms;
    float eps, attention_scale, embedding_multiplier, residual_multiplier, logits_divisor;
};

constexpr int kQkvParts = 3;

// `qkv`: one matrix or several, whose outputs are side by side; the others have n = 0. A norm that is null does not
// exist; the `after` ones are of what attention and MLP add to a row.
struct Layer {
    int has_rope;
    const float* attention_norm;
    Matrix qkv[kQkvParts];
    const float* query_norm;
    const float* key_norm;
    Matrix output;
    const float* after_attention_norm;
    const float* mlp_norm;
    int inner;  // of a dense MLP, like the next two
    Matrix gate_up;
    Matrix down;
    Experts experts;
    const float* after_mlp_norm;
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

// Float rows as the input of products: call `reserve`, then `prepare` for each row, then `multiply`, or
// `multiply_panel` for some rows and one panel.
class FloatRows {
  public:
    static constexpr bool kIsPlain = true;

    void reserve(std::size_t, int) {}
    void prepare(const float*, int, int) {}
    void multiply(Lane& lane, const float* x, int rows, const Matrix& w, float* y, int ldy, Into into) {
        linear(lane, x, w.k, rows, w, y, ldy, into);
    }
    void multiply_panel(const float* x, int begin, int end, const Matrix& w, int panel, const char* next,
                        const PanelOutput& output) const {
        if (w.coding != Coding::kFloat)
            multiply_coded_panel(x, w.k, begin, end, w, panel, next, output);
        else
            tandem::multiply_panel(x, w.k, begin, end, floats_at(w, panel), reinterpret_cast<const float*>(next), w.k,
                                   output);
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
        sums_.at_least(rows * width / kSumGroup);
    }
    void prepare(const float* x, int width, int row) { quantize_row(x, row, rows_of(width)); }
    void multiply(Lane& lane, const float*, int rows, const Matrix& w, float* y, int ldy, Into into) {
        linear(lane, rows_of(w.k), rows, w, y, ldy, into);
    }
    void multiply_panel(const float*, int begin, int end, const Matrix& w, int panel, const char* next,
                        const PanelOutput& output) {
        multiply_int8_panel(rows_of(w.k), begin, end, w, panel, next, output);
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
    // `embeddings` are [vocab, hidden], with n = 0 if they are the head's weights. All weights must outlive this object.
    Decoder(const Shape& shape, std::vector<Layer> layers, const float* norm, const Matrix& head,
            const Matrix& embeddings)
        : shape_(shape),
          layers_(std::move(layers)),
          norm_(norm),
          head_(head),
          embeddings_(embeddings.n ? embeddings : head),
          widths_(widths_of(shape_, layers_)) {}

    void forward(Team& team, const Step& step, float* hidden) override {
        const std::size_t rows = step.num_rows;
        const Shape& s = shape_;
        const Widths w = widths_;
        const Work work{
            .normed = normed_.at_least(rows * s.hidden),
            .qkv = qkv_.at_least(rows * qkv_width()),
            .mixed = mixed_.at_least(rows * s.heads * s.head_dim),
            .inner = inner_.at_least(rows * w.inner),
            .scratch = scratch_.at_least(team.size() * scratch_stride(step.pool)),
            .added = added_.at_least(rows * w.added),
            .logits = logits_.at_least(rows * w.experts),
            .weights = weights_.at_least(rows * w.chosen),
            .gathered = gathered_.at_least(rows * w.chosen * s.hidden),
            .expert_inner = expert_inner_.at_least(rows * w.expert_inner),
            .chosen = chosen_.at_least(rows * w.chosen),
        };
        input_.reserve(rows, std::max({s.hidden, w.inner, s.heads * s.head_dim}));
        places_.reserve(rows * w.chosen, w.experts);
        if (w.chosen) placed_.reserve(rows * w.chosen, w.placed);
        routers_.resize(team.size());
        for (Router& router : routers_) router.reserve(w.experts);
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
            if (shape_.logits_divisor == 1.0f) return;
            lane.wait();
            lane.share(num_rows, 1, [&](int begin, int end) {
                float* row = out + std::size_t(begin) * shape_.vocab;
                for (std::size_t i = 0; i < std::size_t(end - begin) * shape_.vocab; ++i) row[i] /= shape_.logits_divisor;
            });
        });
    }

    std::size_t buffer_bytes() const override {
        std::size_t total = input_.bytes() + placed_.bytes() + chosen_.bytes();
        for (const auto* buffer : {&normed_, &qkv_, &mixed_, &inner_, &scratch_, &added_, &logits_, &weights_,
                                   &gathered_, &expert_inner_})
            total += buffer->bytes();
        return total;
    }

  private:
    static constexpr int kRowGrain = 4;

    struct Work {
        float *normed, *qkv, *mixed, *inner, *scratch;
        float *added, *logits, *weights, *gathered, *expert_inner;
        int* chosen;
    };

    // Floats per row of buffers whose widths depend on the layers.
    struct Widths {
        int inner = 0, added = 0, experts = 0, chosen = 0, expert_inner = 0, placed = 0;
    };

    static Widths widths_of(const Shape& shape, const std::vector<Layer>& layers) {
        Widths w;
        bool adds_in_place = shape.residual_multiplier == 1.0f;
        for (const Layer& layer : layers) {
            const Experts& e = layer.experts;
            w.inner = std::max({w.inner, layer.inner, e.shared_inner});
            w.experts = std::max(w.experts, e.count);
            w.chosen = std::max(w.chosen, e.count ? e.routing.num_chosen : 0);
            w.expert_inner = std::max(w.expert_inner, e.count ? e.routing.num_chosen * e.inner : 0);
            w.placed = std::max({w.placed, shape.hidden, e.count ? e.inner : 0});
            adds_in_place = adds_in_place && !e.count && !layer.after_attention_norm && !layer.after_mlp_norm;
        }
        w.added = adds_in_place ? 0 : shape.hidden;
        return w;
    }

    void embed(std::int64_t token, float* out) const {
        embed_row(embeddings_, token, out);
        if (shape_.embedding_multiplier != 1.0f)
            for (int i = 0; i < shape_.hidden; ++i) out[i] *= shape_.embedding_multiplier;
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
        const float* in = normalise(lane, x, rows, layer.attention_norm, work.normed);
        lane.wait();
        int column = 0;
        for (const Matrix& part : layer.qkv) {
            if (part.n) input_.multiply(lane, in, rows, part, work.qkv + column, qkv_width(), Into::kStore);
            column += part.n;
        }
        lane.wait();
        place(lane, step, layer, index, work.qkv);
        lane.wait();
        attention(lane, work.qkv, qkv_width(), step.pool, index, step.sequences, s.heads, s.attention_scale,
                  work.mixed, s.heads * s.head_dim, work.scratch + lane.rank() * scratch_stride(step.pool));
        lane.wait();
        add_product(lane, work.mixed, rows, layer.output, layer.after_attention_norm, work.added, x);
        in = normalise(lane, x, rows, layer.mlp_norm, work.normed);
        lane.wait();
        if (layer.experts.count) {
            add_experts(lane, in, rows, layer, work, x);
            return;
        }
        input_.multiply(lane, in, rows, layer.gate_up, work.inner, layer.inner, Into::kSwiGlu);
        lane.wait();
        add_product(lane, work.inner, rows, layer.down, layer.after_mlp_norm, work.added, x);
    }

    // Adds the mixture of each row's experts to it, with a barrier at the end.
    void add_experts(Lane& lane, const float* in, int rows, const Layer& layer, const Work& work, float* x) {
        const Experts& e = layer.experts;
        const int chosen = e.routing.num_chosen, hidden = shape_.hidden, places = rows * chosen;
        linear(lane, in, hidden, rows, e.router, work.logits, e.count, Into::kStore);
        lane.wait();
        Router& router = routers_[lane.rank()];
        lane.share(rows, kRowGrain, [&](int begin, int end) {
            for (std::size_t r = begin; r < std::size_t(end); ++r)
                router.choose(e, work.logits + r * e.count, work.chosen + r * chosen, work.weights + r * chosen);
        });
        lane.wait();
        if (lane.rank() == 0) {
            places_.sort(work.chosen, places, e.count);
            places_.add_to(e.tokens);
        }
        lane.wait();
        lane.share(places, kRowGrain, [&](int begin, int end) {
            for (std::size_t p = begin; p < std::size_t(end); ++p) {
                const float* row = in + std::size_t(places_.source(p) / chosen) * hidden;
                if constexpr (Input::kIsPlain) copy_row(row, hidden, work.gathered + p * hidden);
                placed_.prepare(row, hidden, p);
            }
        });
        if (e.shared_inner)
            input_.multiply(lane, in, rows, e.shared_gate_up, work.inner, e.shared_inner, Into::kSwiGlu);
        lane.wait();
        places_.multiply(lane, placed_, work.gathered, e.gate_up, 2 * e.inner, work.expert_inner, e.inner,
                         Into::kSwiGlu);
        lane.wait();
        if constexpr (!Input::kIsPlain) {
            prepare(lane, placed_, work.expert_inner, places, e.inner);
            if (e.shared_inner) prepare(lane, input_, work.inner, rows, e.shared_inner);
            lane.wait();
        }
        // The copied rows are not read any more.
        places_.multiply(lane, placed_, work.expert_inner, e.down, hidden, work.gathered, hidden, Into::kStore);
        if (e.shared_inner)
            input_.multiply(lane, work.inner, rows, e.shared_down, work.added, hidden, Into::kStore);
        lane.wait();
        lane.share(rows, kRowGrain, [&](int begin, int end) {
            for (int r = begin; r < end; ++r) {
                float* added = work.added + std::size_t(r) * hidden;
                mix(e, in + std::size_t(r) * hidden, r, work, added);
                add_row(added, layer.after_mlp_norm, x + std::size_t(r) * hidden);
            }
        });
        lane.wait();
    }

    // Adds what a row's experts returned, in ascending order, to what all rows pass through, which `added` holds before.
    void mix(const Experts& e, const float* in, int row, const Work& work, float* added) const {
        const int chosen = e.routing.num_chosen, hidden = shape_.hidden;
        float gate = 1.0f;
        if (e.shared_gate) {
            float sum = 0.0f;
            for (int i = 0; i < hidden; ++i) sum = std::fma(in[i], e.shared_gate[i], sum);
            gate = 1.0f / (1.0f + std::exp(-sum));
        }
        if (!e.shared_inner) std::fill_n(added, hidden, 0.0f);
        const float* weights = work.weights + std::size_t(row) * chosen;
        for (int i = 0; i < hidden; ++i) added[i] *= gate;
        for (int c = 0; c < chosen; ++c) {
            const float* part = work.gathered + std::size_t(places_.place(row * chosen + c)) * hidden;
            for (int i = 0; i < hidden; ++i) added[i] += weights[c] * part[i];
        }
    }

    // Computes x += multiplier * norm(added) of one row; overwrites `added`.
    void add_row(float* added, const float* norm, float* x) const {
        const int hidden = shape_.hidden;
        if (norm) rms_norm(added, norm, shape_.eps, hidden, added);
        for (int i = 0; i < hidden; ++i) x[i] += shape_.residual_multiplier * added[i];
    }

    // Computes x += multiplier * norm(in * W^T), with a barrier at the end; `added` holds the product meanwhile.
    void add_product(Lane& lane, const float* in, int rows, const Matrix& weights, const float* norm, float* added,
                     float* x) {
        if constexpr (!Input::kIsPlain) {
            prepare(lane, input_, in, rows, weights.k);
            lane.wait();
        }
        const int hidden = shape_.hidden;
        if (!norm && shape_.residual_multiplier == 1.0f) {
            input_.multiply(lane, in, rows, weights, x, hidden, Into::kAdd);
            lane.wait();
            return;
        }
        input_.multiply(lane, in, rows, weights, added, hidden, Into::kStore);
        lane.wait();
        lane.share(rows, kRowGrain, [&](int begin, int end) {
            for (std::size_t r = begin; r < std::size_t(end); ++r) add_row(added + r * hidden, norm, x + r * hidden);
        });
        lane.wait();
    }

    // Prepares rows of `width` components, which are adjacent, as the input of a product.
    static void prepare(Lane& lane, Input& input, const float* x, int rows, int width) {
        lane.share(rows, kRowGrain, [&](int begin, int end) {
            for (int r = begin; r < end; ++r) input.prepare(x + std::size_t(r) * width, width, r);
        });
    }

    // Normalises rows and prepares them as the input of a product; returns that input, which is `x` without a norm.
    const float* normalise(Lane& lane, const float* x, int rows, const float* weight, float* out) {
        const int width = shape_.hidden;
        lane.share(rows, kRowGrain, [&](int begin, int end) {
            for (int r = begin; r < end; ++r) {
                const float* row = x + std::size_t(r) * width;
                if (weight) {
                    float* normed = out + std::size_t(r) * width;
                    rms_norm(row, weight, shape_.eps, width, normed);
                    row = normed;
                }
                input_.prepare(row, width, r);
            }
        });
        return weight ? out : x;
    }

    // Normalises and rotates queries in place, and writes keys and values to the pool.
    void place(Lane& lane, const Step& step, const Layer& layer, int index, float* qkv) {
        const Shape& s = shape_;
        const int dim = s.head_dim;
        lane.share(step.num_rows, kRowGrain, [&](int begin, int end) {
            for (int r = begin; r < end; ++r) {
                float* row = qkv + std::size_t(r) * qkv_width();
                const float* cos = step.cos + step.positions[r] * (dim / 2);
                const float* sin = step.sin + step.positions[r] * (dim / 2);
                if (s.has_row_norms) {
                    float* keys = row + std::size_t(s.heads) * dim;
                    rms_norm(row, layer.query_norm, s.eps, s.heads * dim, row);
                    rms_norm(keys, layer.key_norm, s.eps, s.kv_heads * dim, keys);
                }
                for (int h = 0; h < s.heads + s.kv_heads; ++h) {
                    float* head = row + std::size_t(h) * dim;
                    const bool is_key = h >= s.heads;
                    const float* norm = is_key ? layer.key_norm : layer.query_norm;
                    float* out = is_key ? pool_row(step.pool, step.slots[r], h - s.heads, index, 0) : head;
                    if (norm && !s.has_row_norms) rms_norm(head, norm, s.eps, dim, head);
                    if (layer.has_rope)
                        rotate(head, cos, sin, dim, out);
                    else if (is_key)
                        copy_row(head, dim, out);
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
    const Matrix embeddings_;
    const Widths widths_;
    Buffer<float> normed_, qkv_, mixed_, inner_, scratch_;
    Buffer<float> added_, logits_, weights_, gathered_, expert_inner_;
    Buffer<int> chosen_;
    Places places_;
    std::vector<Router> routers_;
    Input input_, placed_;
};

}  // namespace tandem
