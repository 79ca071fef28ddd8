// Threads of their own, which work on a job while the one who gave it does something else, and takes part when it asks for the end.
#pragma once
#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "team.h"

namespace aengine {

class Job {
 public:
  virtual ~Job() = default;
  virtual void work(const Member& member) const = 0;  // on every thread that takes part
  virtual void end() const = 0;                       // once, when all work is done
};

// One job at a time. All calls come from one thread.
class Crew {
 public:
  Crew() = default;
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;
  ~Crew() {
    finish();
    announce(nullptr, 0);
    for (pthread_t worker : workers_) pthread_join(worker, nullptr);
  }

  bool busy() const { return job_ != nullptr; }

  // Lets `threads` - 1 workers begin, or as many as there can be.
  void begin(std::unique_ptr<Job> job, int threads) {
    while ((int)workers_.size() < threads - 1) {
      pthread_t worker;
      if (pthread_create(&worker, nullptr, [](void* crew) -> void* { return static_cast<Crew*>(crew)->serve(), nullptr; }, this)) break;
      workers_.push_back(worker);
    }
    announce(std::move(job), threads);
  }

  // Takes part in the job, if there is one, and returns when it has ended.
  void finish() {
    if (!busy()) return;
    job_->work(Member(team_, 0, size_));
    std::unique_ptr<Job> done;
    {
      std::lock_guard<std::mutex> lock(mutex_);  // nobody takes it up from here on
      done = std::move(job_);
    }
    spin_until([&] { return num_inside_.load(std::memory_order_acquire) == 0; });
    done->end();
  }

 private:
  static constexpr std::chrono::microseconds PATIENCE{300};  // before a worker sleeps: longer than from one step to the next

  // Tells the workers of a job, or without one that they are to leave for good.
  void announce(std::unique_ptr<Job> job, int size) {
    bool someone_sleeps;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      team_.taken.store(0, std::memory_order_relaxed);
      team_.done.store(0, std::memory_order_relaxed);
      job_ = std::move(job), size_ = size;
      number_.fetch_add(1, std::memory_order_release);
      someone_sleeps = num_asleep_ > 0;
    }
    if (someone_sleeps) wake_.notify_all();
  }

  void serve() {
    const int index = num_started_.fetch_add(1, std::memory_order_relaxed) + 1;
    for (u64 seen = 0;;) {
      seen = await_other_than(seen);
      const Job* job;
      int size;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        job = job_.get(), size = size_;
        if (size == 0) return;
        if (!job || index >= size) continue;
        num_inside_.fetch_add(1, std::memory_order_relaxed);
      }
      job->work(Member(team_, index, size));
      num_inside_.fetch_sub(1, std::memory_order_release);
    }
  }

  // The number of the latest announcement, once it is another than `seen`.
  u64 await_other_than(u64 seen) {
    const auto is_other = [&] { return number_.load(std::memory_order_acquire) != seen; };
    const auto begin = std::chrono::steady_clock::now();
    spin_until([&] { return is_other() || std::chrono::steady_clock::now() - begin > PATIENCE; });
    if (!is_other()) {
      std::unique_lock<std::mutex> lock(mutex_);
      num_asleep_++;
      wake_.wait(lock, is_other);
      num_asleep_--;
    }
    return number_.load(std::memory_order_acquire);
  }

  std::vector<pthread_t> workers_;
  std::atomic<int> num_started_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<u64> number_{0};  // of the latest announcement
  int num_asleep_ = 0;
  std::unique_ptr<Job> job_;  // null: none
  int size_ = -1;             // threads of it; 0: no job will come any more
  std::atomic<int> num_inside_{0};
  Team team_;
};

}  // namespace aengine
