// Runs one function on a team of threads, with dynamic sharing of items and barriers between them.
//
// A step is one call of `Team::run`: every thread executes the same function with its own `Lane`, so that a whole
// forward pass wakes the threads once. `Lane::share` assigns items to lanes on demand, because a core of a shared
// machine may be slow for a while; results must not depend on which lane computes an item.
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

// Returns the core that the caller runs on, -1 if the system does not report it.
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

// Handle of one thread in a run. All lanes must call `share` and `wait` in the same order.
class Lane {
  public:
    Lane(Team& team, int rank) : team_(team), rank_(rank) {}

    int rank() const { return rank_; }
    int size() const;

    // Calls `work(begin, end)` for pieces of [0, count) of up to `grain` items until none is left. No barrier at the
    // end.
    template <typename Work>
    void share(int count, int grain, Work work);

    // Barrier: returns when all lanes have called it. Their earlier writes are visible afterwards.
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

    // Runs `work` on every lane, with the caller's thread as lane 0; returns when all have finished. One run at a time.
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
    // How long a lane spins in a barrier before it sleeps. Waking up takes a virtual core about 100 us, as long as one
    // product of a decode step. Lanes of one run have about the same work, so a longer wait means that another lane has
    // lost its core, and this core may be needed by another thread.
    static constexpr std::chrono::microseconds kPatience{1000};
    static constexpr std::chrono::microseconds kNone{0};
    static constexpr int kSpins = 64;  // between two readings of the clock

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

    // Returns whether no other lane was on the caller's `core` at its last barrier. When other cores are busy, the
    // system may schedule several lanes on one core, where a spinning lane only keeps the others from running: each of
    // the about 240 barriers of a step then took all of kPatience.
    bool is_alone(int rank, int core) const {
        for (int other = 0; core >= 0 && other < size_; ++other)
            if (other != rank && cores_[other].load(std::memory_order_relaxed) == core) return false;
        return true;
    }

    struct alignas(64) Counter {
        std::atomic<int> next{0};
    };

    const int size_;
    std::vector<std::atomic<int>> cores_;  // core of each lane at its last barrier
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
    // At most kPhases calls of `share` between two barriers.
    std::atomic<int>& next = team_.counters_[phase_++ % Team::kPhases].next;
    for (int begin; (begin = next.fetch_add(grain, std::memory_order_relaxed)) < count;)
        work(begin, begin + grain < count ? begin + grain : count);
}

inline void Lane::wait() {
    if (team_.size_ > 1) team_.arrive(rank_);
    phase_ = 0;
}

}  // namespace tandem
