// Exports teams, decoders and single kernels to Python as C functions; no exception crosses the boundary.
//
// `tandem_kernels.native.library` declares the same structs and functions.
#include <cstdint>
#include <cstring>
#include <new>

#include "attention.hpp"
#include "coded.hpp"
#include "decoder.hpp"
#include "digest.hpp"
#include "linear.hpp"
#include "linear_int8.hpp"
#include "rows.hpp"
#include "team.hpp"

using namespace tandem;

namespace {

struct DecoderSpec {
    Shape shape;
    const Layer* layers;
    const float* norm;
    Matrix head;
    Matrix embeddings;  // [vocab, hidden]; n is 0 if they are the head's weights
    int quantizes_rows;
};

template <typename Input>
AnyDecoder* make_decoder(const DecoderSpec& spec) {
    return new Decoder<Input>(spec.shape, {spec.layers, spec.layers + spec.shape.layers}, spec.norm, spec.head,
                              spec.embeddings);
}

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
        return spec->quantizes_rows ? make_decoder<QuantizedRows>(*spec) : make_decoder<FloatRows>(*spec);
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

void tandem_linear(Team* team, const float* x, int ldx, int m, const Matrix* w, float* y, int ldy, int into) {
    team->run([&](Lane& lane) { linear(lane, x, ldx, m, *w, y, ldy, static_cast<Into>(into)); });
}

void tandem_embed(const Matrix* table, const std::int64_t* tokens, int count, float* out) {
    for (std::int64_t i = 0; i < count; ++i) embed_row(*table, tokens[i], out + i * table->k);
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
