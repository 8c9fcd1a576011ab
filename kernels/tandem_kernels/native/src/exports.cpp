// What Python calls, as plain C: teams, decoders, and each kernel by itself; never throws across the boundary.
//
// `tandem_kernels.native.library` declares the same structs and functions.
#include <cstdint>
#include <cstring>
#include <new>

#include "attention.hpp"
#include "decoder.hpp"
#include "digest.hpp"
#include "linear.hpp"
#include "linear_int8.hpp"
#include "rows.hpp"
#include "team.hpp"

using namespace tandem;

namespace {

struct LinearSpec {
    const void* panels;
    const float* scales;  // null: panels of floats
    const float* bias;
    int n, k, group;
};

struct LayerSpec {
    const float* attention_norm;
    LinearSpec qkv;
    const float* query_norm;
    const float* key_norm;
    LinearSpec output;
    const float* mlp_norm;
    LinearSpec gate_up;
    LinearSpec down;
};

struct DecoderSpec {
    Shape shape;
    const LayerSpec* layers;
    const float* norm;
    LinearSpec head;
    const float* embeddings;  // [vocab, hidden]; null: the head's weights
};

template <typename Weights>
Weights weights_of(const LinearSpec& spec);

template <>
Matrix weights_of(const LinearSpec& spec) {
    return {static_cast<const float*>(spec.panels), spec.bias, spec.n, spec.k};
}

template <>
Int8Matrix weights_of(const LinearSpec& spec) {
    return {static_cast<const std::uint8_t*>(spec.panels), spec.scales, spec.bias, spec.n, spec.k, spec.group};
}

void embed(const Matrix& table, std::int64_t token, float* out) {
    const float* column = table.panels + (token / kPanel) * table.k * kPanel + token % kPanel;
    for (int i = 0; i < table.k; ++i) out[i] = column[std::size_t(i) * kPanel];
}

void embed(const Int8Matrix& table, std::int64_t token, float* out) { embed_int8(table, token, out); }

template <typename Weights>
AnyDecoder* make_decoder(const DecoderSpec& spec) {
    std::vector<Layer<Weights>> layers;
    for (int i = 0; i < spec.shape.layers; ++i) {
        const LayerSpec& l = spec.layers[i];
        layers.push_back({l.attention_norm, weights_of<Weights>(l.qkv), l.query_norm, l.key_norm,
                          weights_of<Weights>(l.output), l.mlp_norm, weights_of<Weights>(l.gate_up),
                          weights_of<Weights>(l.down)});
    }
    const int width = spec.shape.hidden;
    const Weights head = weights_of<Weights>(spec.head);
    typename Decoder<Weights>::Embed from = [head](std::int64_t token, float* out) { embed(head, token, out); };
    if (const float* table = spec.embeddings)
        from = [table, width](std::int64_t token, float* out) { copy_row(table + token * width, width, out); };
    return new Decoder<Weights>(spec.shape, std::move(layers), spec.norm, head, std::move(from));
}

// What a call returns: null when it went well, else a message that lives for ever.
template <typename Work>
const char* guarded(Work work) {
    try {
        work();
        return nullptr;
    } catch (const std::bad_alloc&) {
        return "out of memory";
    } catch (...) {
        return "a compiled kernel failed";
    }
}

}  // namespace

extern "C" {

int tandem_vector_width() { return kWidth; }

Team* tandem_team_new(int size) {
    try {
        return new Team(size);
    } catch (...) {
        return nullptr;
    }
}

void tandem_team_delete(Team* team) { delete team; }

AnyDecoder* tandem_decoder_new(const DecoderSpec* spec) {
    try {
        return spec->head.scales ? make_decoder<Int8Matrix>(*spec) : make_decoder<Matrix>(*spec);
    } catch (...) {
        return nullptr;
    }
}

void tandem_decoder_delete(AnyDecoder* decoder) { delete decoder; }

std::size_t tandem_decoder_buffer_bytes(const AnyDecoder* decoder) { return decoder->buffer_bytes(); }

const char* tandem_decoder_forward(AnyDecoder* decoder, Team* team, const Step* step, float* hidden) {
    return guarded([&] { decoder->forward(*team, *step, hidden); });
}

const char* tandem_decoder_logits(AnyDecoder* decoder, Team* team, const float* hidden, int rows, float* out) {
    return guarded([&] { decoder->logits(*team, hidden, rows, out); });
}

void tandem_linear(Team* team, const float* x, int ldx, int m, const LinearSpec* spec, float* y, int ldy, int into) {
    const Matrix w = weights_of<Matrix>(*spec);
    team->run([&](Lane& lane) { linear(lane, x, ldx, m, w, y, ldy, static_cast<Into>(into)); });
}

const char* tandem_linear_int8(Team* team, const float* x, int m, const LinearSpec* spec, float* y, int ldy, int into) {
    return guarded([&] {
        const Int8Matrix w = weights_of<Int8Matrix>(*spec);
        Input<Int8Matrix> input;
        input.reserve(m, w.k);
        team->run([&](Lane& lane) {
            lane.share(m, 1, [&](int begin, int end) {
                for (int r = begin; r < end; ++r) input.prepare(x + std::size_t(r) * w.k, w.k, r);
            });
            lane.wait();
            input.multiply(lane, x, m, w, y, ldy, static_cast<Into>(into));
        });
    });
}

void tandem_embed_int8(const LinearSpec* table, const std::int64_t* tokens, int count, float* out) {
    const Int8Matrix w = weights_of<Int8Matrix>(*table);
    for (std::int64_t i = 0; i < count; ++i) embed_int8(w, tokens[i], out + i * w.k);
}

const char* tandem_attention(Team* team, const float* query, int ldq, const Pool* pool, int layer, const Rows* rows,
                             int heads, float scale, float* out, int ldo) {
    return guarded([&] {
        const std::size_t stride = (attention_scratch_floats(*pool, heads) + 15) / 16 * 16;
        Buffer<float> scratch;
        float* memory = scratch.at_least(stride * team->size());
        team->run([&](Lane& lane) {
            attention(lane, query, ldq, *pool, layer, *rows, heads, scale, out, ldo, memory + lane.rank() * stride);
        });
    });
}

void tandem_rms_norm(const float* x, const float* weight, float eps, int rows, int width, float* out) {
    for (std::int64_t r = 0; r < rows; ++r) rms_norm(x + r * width, weight, eps, width, out + r * width);
}

void tandem_block_digest(const std::uint64_t* pool, std::int64_t slab_words, int heads, int head_start,
                         const std::int64_t* block_ids, const std::int64_t* block_indices, int count,
                         std::uint64_t* out) {
    for (std::int64_t i = 0; i < count; ++i)
        for (int h = 0; h < heads; ++h)
            out[i * heads + h] = slab_digest(pool + (block_ids[i] * heads + h) * slab_words, slab_words,
                                             head_start + h, block_indices[i]);
}

}  // extern "C"
