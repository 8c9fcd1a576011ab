// Chooses experts for rows and multiplies rows with the weights of their experts. A row's result does not depend on
// other rows.
//
// The matrices of a layer's experts are one packed matrix, in which each expert begins at a panel of its own. Rows are
// copied in the order of their experts, so that an expert's product reads one run of rows, and only experts that some
// row has chosen are read.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "linear.hpp"
#include "panel.hpp"
#include "team.hpp"

namespace tandem {

enum class Scores { kSoftmax, kSigmoid, kSoftmaxOfChosen };

// See `ExpertRouting` of `tandem_kernels.contract`.
struct ExpertRouting {
    int num_chosen;
    Scores scores;
    int is_normalised;
    float scaling;
    int num_groups, num_chosen_groups;
};

struct Experts {
    int count;  // 0: the layer's MLP is dense
    int inner;
    ExpertRouting routing;
    Matrix router;             // [count, hidden]
    const float* choice_bias;  // [count] or null
    Matrix gate_up;            // [count * 2 * inner, hidden], each expert as kSwiGlu takes it
    Matrix down;               // [count * hidden, inner], the rows of each expert padded to whole panels
    int shared_inner;          // 0: there is no expert that every row passes through
    Matrix shared_gate_up, shared_down;
    const float* shared_gate;  // [hidden] or null
    std::int64_t* tokens;      // [count], tokens of each expert so far; another thread may read it meanwhile
};

// Writes the indices of the `count` greatest of `scores` [n] to `out` in ascending order; of equal ones the first are
// taken. `is_taken` [n] is scratch.
inline void greatest(const float* scores, int n, int count, int* out, std::vector<char>& is_taken) {
    is_taken.assign(n, 0);
    for (int c = 0; c < count; ++c) {
        int best = -1;
        for (int i = 0; i < n; ++i)
            if (!is_taken[i] && (best < 0 || scores[i] > scores[best])) best = i;
        is_taken[best] = 1;
    }
    for (int i = 0, c = 0; i < n; ++i)
        if (is_taken[i]) out[c++] = i;
}

// Replaces `x` [n] by its softmax.
inline void softmax(float* x, int n) {
    float most = x[0], total = 0.0f;
    for (int i = 1; i < n; ++i) most = std::max(most, x[i]);
    for (int i = 0; i < n; ++i) total += x[i] = std::exp(x[i] - most);
    for (int i = 0; i < n; ++i) x[i] /= total;
}

// Chooses the experts of rows. Its memory is reserved before a team runs, because a failed allocation would end the
// process there.
class Router {
  public:
    void reserve(int count) {
        ranked_.reserve(count);
        group_scores_.reserve(count);
        best_.reserve(count);
        is_taken_.reserve(count);
    }

    // Writes a row's experts in ascending order, and their weights, [num_chosen] each; overwrites `logits` [count].
    void choose(const Experts& layer, float* logits, int* experts, float* weights) {
        const ExpertRouting& routing = layer.routing;
        const int chosen = routing.num_chosen, count = layer.count;
        if (routing.scores == Scores::kSoftmaxOfChosen) {
            greatest(logits, count, chosen, experts, is_taken_);
            for (int c = 0; c < chosen; ++c) weights[c] = logits[experts[c]];
            softmax(weights, chosen);
        } else {
            if (routing.scores == Scores::kSoftmax)
                softmax(logits, count);
            else
                for (int i = 0; i < count; ++i) logits[i] = 1.0f / (1.0f + std::exp(-logits[i]));
            ranked_.assign(logits, logits + count);
            if (layer.choice_bias)
                for (int i = 0; i < count; ++i) ranked_[i] += layer.choice_bias[i];
            if (routing.num_groups > 1) exclude_groups(routing, count);
            greatest(ranked_.data(), count, chosen, experts, is_taken_);
            float total = kLeastSum;
            for (int c = 0; c < chosen; ++c) total += weights[c] = logits[experts[c]];
            if (routing.is_normalised)
                for (int c = 0; c < chosen; ++c) weights[c] /= total;
        }
        for (int c = 0; c < chosen; ++c) weights[c] *= routing.scaling;
    }

  private:
    static constexpr float kLeastSum = 1e-20f;

    // Sets the scores of the experts of all but the best groups to -inf. A group has the sum of its two greatest.
    void exclude_groups(const ExpertRouting& routing, int count) {
        const int groups = routing.num_groups, size = count / groups;
        group_scores_.resize(groups);
        for (int g = 0; g < groups; ++g) {
            float first = -INFINITY, second = -INFINITY;
            for (int i = g * size; i < (g + 1) * size; ++i) {
                second = std::max(second, std::min(first, ranked_[i]));
                first = std::max(first, ranked_[i]);
            }
            group_scores_[g] = first + second;
        }
        best_.resize(routing.num_chosen_groups);
        greatest(group_scores_.data(), groups, routing.num_chosen_groups, best_.data(), is_taken_);
        for (int i = 0; i < count; ++i)
            if (!is_taken_[i / size]) ranked_[i] = -INFINITY;
    }

    std::vector<float> ranked_, group_scores_;
    std::vector<int> best_;
    std::vector<char> is_taken_;
};

// The rows of a step in the order of their experts. A *place* is a pair of a row and one of its chosen experts.
class Places {
  public:
    // A run of places of one expert; `first_group` is the number of groups of kGroupRows rows before it.
    struct Run {
        int expert, begin, end, first_group;
        int num_groups() const { return (end - begin + kGroupRows - 1) / kGroupRows; }
    };

    void reserve(std::size_t num_places, int num_experts) {
        begins_.reserve(num_experts + 1);
        runs_.reserve(num_experts);
        source_.reserve(num_places);
        place_.reserve(num_places);
    }

    // Sorts `chosen` [num_places], experts of one row after the other, by expert.
    void sort(const int* chosen, int num_places, int num_experts) {
        begins_.assign(num_experts + 1, 0);
        for (int i = 0; i < num_places; ++i) ++begins_[chosen[i] + 1];
        runs_.clear();
        num_groups_ = 0;
        for (int e = 0; e < num_experts; ++e) {
            begins_[e + 1] += begins_[e];
            if (begins_[e] == begins_[e + 1]) continue;
            runs_.push_back({e, begins_[e], begins_[e + 1], num_groups_});
            num_groups_ += runs_.back().num_groups();
        }
        source_.resize(num_places);
        place_.resize(num_places);
        for (int i = 0; i < num_places; ++i) {
            place_[i] = begins_[chosen[i]]++;
            source_[place_[i]] = i;
        }
    }

    // Adds the number of each expert's places to `counts` [num_experts].
    void add_to(std::int64_t* counts) const {
        for (const Run& run : runs_) counts[run.expert] += run.end - run.begin;
    }

    // Index in `chosen` of what is at a place, and the reverse.
    int source(int place) const { return source_[place]; }
    int place(int index) const { return place_[index]; }

    // Multiplies the rows x [places, w.k], which `input` may have prepared, with the matrices of their experts, of
    // `features` features each, into y [places, ldy]. All lanes call it; no barrier at the end.
    template <typename Input>
    void multiply(Lane& lane, Input& input, const float* x, const Matrix& w, int features, float* y, int ldy,
                  Into into) const {
        const int panels = (features + kPanel - 1) / kPanel, items = num_groups_ * panels;
        const int grain = grain_of(items, lane.size());
        const auto next_of = [&](int item) {
            const int known = item < items ? item : items - 1;
            return panel_at(w, run_of(known / panels).expert * panels + known % panels);
        };
        lane.share(items, grain, [&](int first, int last) {
            for (int item = first; item < last; ++item) {
                const int group = item / panels, panel = item % panels;
                const Run& run = run_of(group);
                const int rows = run.end - run.begin, groups = run.num_groups(), index = group - run.first_group;
                const int begin = run.begin + part_begin(rows, index, groups);
                const int end = run.begin + part_begin(rows, index + 1, groups);
                const Matrix part = matrix_of(w, run.expert * panels, features);
                const PanelOutput output(part, panel, y, ldy, into);
                const char* next = next_of(item + 1 < last ? item + 1 : first + grain * lane.size());
                input.multiply_panel(x, begin, end, part, panel, next, output);
            }
        });
    }

  private:
    const Run& run_of(int group) const {
        return *(std::upper_bound(runs_.begin(), runs_.end(), group,
                                  [](int g, const Run& run) { return g < run.first_group; }) -
                 1);
    }

    // Returns the matrix of one expert, whose first panel is number `first` of those of all experts.
    static Matrix matrix_of(const Matrix& w, int first, int features) {
        Matrix part = w;
        part.first_panel = first;
        part.n = features;
        return part;
    }

    std::vector<int> begins_, source_, place_;
    std::vector<Run> runs_;
    int num_groups_ = 0;
};

}  // namespace tandem
