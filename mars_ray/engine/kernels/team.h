// Threads that compute a step together.
//
// A thread that waits for others spins for a short time, because they are nearly done, and then sleeps. So it leaves its
// core to other work, perhaps to the thread that it waits for.
#pragma once
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

constexpr std::chrono::microseconds SPIN{50};

inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// A number that threads wait for.
class Signal {
 public:
  uint64_t number() const { return value.load(std::memory_order_acquire); }

  void set(uint64_t number) {
    value.store(number);
    if (!sleepers.load()) return;
    pthread_mutex_lock(&mutex);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
  }

  // Waits until the number differs from `old`, and returns it.
  uint64_t after(uint64_t old) {
    const auto end = std::chrono::steady_clock::now() + SPIN;
    do {
      for (int spin = 0; spin < 32; spin++) {
        if (const uint64_t now = number(); now != old) return now;
        pause_core();
      }
    } while (std::chrono::steady_clock::now() < end);
    pthread_mutex_lock(&mutex);
    sleepers++;
    while (value.load() == old) pthread_cond_wait(&changed, &mutex);
    sleepers--;
    pthread_mutex_unlock(&mutex);
    return number();
  }

 private:
  std::atomic<uint64_t> value{0};
  std::atomic<int> sleepers{0};
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
};

// The threads of one engine: the one that calls `run`, and workers that sleep between two calls.
class Team {
 public:
  Team() = default;
  Team(const Team&) = delete;

  ~Team() {
    begun.set(LAST);
    for (Worker* worker : workers) {
      pthread_join(worker->thread, nullptr);
      delete worker;
    }
  }

  // Calls `act(thread)` in each of `threads()` threads, and returns when all have returned. There are fewer threads
  // than `wanted` if the system starts no more.
  template <class Act>
  void run(int64_t wanted, const Act& act) {
    while (static_cast<int64_t>(workers.size()) + 1 < wanted && hire()) {
    }
    size = std::clamp<int64_t>(wanted, 1, workers.size() + 1);
    job = [](const void* given, int64_t thread) { (*static_cast<const Act*>(given))(thread); };
    argument = &act;
    // The number of threads travels in the signal: a worker that takes no part may read it while `size` changes.
    begun.set(++rounds << SIZE_BITS | size);
    act(0);
    wait();
  }

  int64_t threads() const { return size; }

  // Returns when all threads of the run have called it.
  void wait() {
    const int64_t all = size;  // once this thread has arrived, the next run may change it
    if (all == 1) return;
    const uint64_t old = passed.number();
    if (arrived.fetch_add(1) + 1 < all) {
      passed.after(old);
      return;
    }
    arrived.store(0);
    passed.set(old + 1);
  }

 private:
  static constexpr int SIZE_BITS = 16;
  static constexpr uint64_t LAST = 1;  // no run has this number, because runs count from 1

  struct Worker {
    Team* team;
    int64_t thread_number;
    pthread_t thread;
  };

  std::vector<Worker*> workers;
  uint64_t rounds = 0;
  int64_t size = 1;
  void (*job)(const void*, int64_t) = nullptr;
  const void* argument = nullptr;
  Signal begun, passed;
  std::atomic<int64_t> arrived{0};

  bool hire() {
    Worker* worker = new Worker{this, static_cast<int64_t>(workers.size()) + 1, {}};
    if (pthread_create(&worker->thread, nullptr, work, worker)) {
      delete worker;
      return false;
    }
    workers.push_back(worker);
    return true;
  }

  static void* work(void* given) {
    const Worker& self = *static_cast<Worker*>(given);
    Team& team = *self.team;
    for (uint64_t round = 0; (round = team.begun.after(round)) != LAST;) {
      if (self.thread_number >= static_cast<int64_t>(round & ((1 << SIZE_BITS) - 1))) continue;
      team.job(team.argument, self.thread_number);
      team.wait();
    }
    return nullptr;
  }
};

// Each engine decodes in its own thread, so the team is thread-local.
inline Team& own_team() {
  static thread_local Team team;
  return team;
}
