// Threads that run one function together, share its items and wait for each other; owns no data of a model.
//
// A step is one call of `Team::run`: every thread executes the same function with its own `Lane`, so that a whole
// forward pass wakes the threads once. `Lane::share` deals items out as lanes ask for them, because a core of a shared
// machine may be slow for a while; which lane computes an item must never show in the result.
#pragma once

#if defined(__linux__)
#include <sched.h>
#endif

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tandem {

// The core that the caller runs on, -1 where nobody can say.
inline int current_core() {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Team;

// One thread's part in a run. All lanes call `share` and `wait` in the same order.
class Lane {
  public:
    Lane(Team& team, int rank) : team_(team), rank_(rank) {}

    int rank() const { return rank_; }
    int size() const;

    // Calls `work(begin, end)` for pieces of [0, count) of up to `grain` items until none is left. Does not wait.
    template <typename Work>
    void share(int count, int grain, Work work);

    // Returns when all lanes have called it; what they wrote before is visible after.
    void wait();

  private:
    Team& team_;
    int rank_;
    int phase_ = 0;
};

class Team {
  public:
    explicit Team(int size) : size_(size), cores_(size) {
        for (std::atomic<int>& core : cores_) core.store(-1, std::memory_order_relaxed);
        for (int rank = 1; rank < size_; ++rank) threads_.emplace_back([this, rank] { serve(rank); });
    }

    ~Team() {
        {
            std::lock_guard<std::mutex> hold(mutex_);
            is_open_ = false;
            ++run_;
        }
        begun_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    // Runs `work` on every lane, the caller's thread being lane 0; returns when all have ended. One run at a time.
    void run(const std::function<void(Lane&)>& work) {
        if (size_ > 1) {
            std::lock_guard<std::mutex> hold(mutex_);
            work_ = &work;
            ++run_;
        }
        if (size_ > 1) begun_.notify_all();
        Lane lane(*this, 0);
        work(lane);
        lane.wait();
    }

  private:
    friend class Lane;
    static constexpr int kPhases = 64;
    // How long a lane looks for the others before it sleeps. To wake up costs a virtual core some hundred microseconds,
    // a product's share of a decode step; lanes of one run have about the same work, so a longer wait means that a
    // partner has lost its core, and then somebody else may want this one.
    static constexpr std::chrono::microseconds kPatience{1000};
    static constexpr std::chrono::microseconds kNone{0};
    static constexpr int kSpins = 64;  // between two looks at the clock

    void serve(int rank) {
        std::uint64_t seen = 0;
        while (true) {
            const std::function<void(Lane&)>* work = nullptr;
            {
                std::unique_lock<std::mutex> hold(mutex_);
                begun_.wait(hold, [&] { return run_ != seen; });
                seen = run_;
                if (!is_open_) return;
                work = work_;
            }
            Lane lane(*this, rank);
            (*work)(lane);
            lane.wait();
        }
    }

    void arrive(int rank) {
        const int core = current_core();
        cores_[rank].store(core, std::memory_order_relaxed);
        const std::uint32_t generation = generation_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            for (Counter& counter : counters_) counter.next.store(0, std::memory_order_relaxed);
            arrived_.store(0, std::memory_order_relaxed);
            generation_.store(generation + 1, std::memory_order_release);
            generation_.notify_all();
            return;
        }
        const auto until = std::chrono::steady_clock::now() + (is_alone(rank, core) ? kPatience : kNone);
        do {
            for (int spin = 0; spin < kSpins; ++spin) {
                if (generation_.load(std::memory_order_acquire) != generation) return;
                relax();
            }
        } while (std::chrono::steady_clock::now() < until);
        while (generation_.load(std::memory_order_acquire) == generation) generation_.wait(generation);
    }

    // Whether no other lane was last seen on the caller's `core`. A system whose other cores are busy keeps lanes on
    // one, and there a lane that looks for the others only keeps them from running: each wait of a step, some 240, then
    // took all of the patience.
    bool is_alone(int rank, int core) const {
        for (int other = 0; core >= 0 && other < size_; ++other)
            if (other != rank && cores_[other].load(std::memory_order_relaxed) == core) return false;
        return true;
    }

    struct alignas(64) Counter {
        std::atomic<int> next{0};
    };

    const int size_;
    std::vector<std::atomic<int>> cores_;  // where each lane was when it last arrived
    Counter counters_[kPhases];
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<std::uint32_t> generation_{0};
    std::mutex mutex_;
    std::condition_variable begun_;
    std::uint64_t run_ = 0;
    const std::function<void(Lane&)>* work_ = nullptr;
    bool is_open_ = true;
    std::vector<std::thread> threads_;
};

inline int Lane::size() const { return team_.size_; }

template <typename Work>
void Lane::share(int count, int grain, Work work) {
    if (team_.size_ == 1) {
        for (int begin = 0; begin < count; begin += grain) work(begin, begin + grain < count ? begin + grain : count);
        return;
    }
    // At most kPhases shares between two waits.
    std::atomic<int>& next = team_.counters_[phase_++ % Team::kPhases].next;
    for (int begin; (begin = next.fetch_add(grain, std::memory_order_relaxed)) < count;)
        work(begin, begin + grain < count ? begin + grain : count);
}

inline void Lane::wait() {
    if (team_.size_ > 1) team_.arrive(rank_);
    phase_ = 0;
}

}  // namespace tandem
