// Worker threads that run a job, beside the caller or while it does something else. The caller takes part when it asks for the end.
#pragma once
#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "team.h"

namespace aengine {

class Job {
 public:
  virtual ~Job() = default;
  virtual void work(const Member& member) const = 0;  // on every thread that takes part
  virtual Status end() const = 0;                     // once, on the caller's thread, when all work is done
};

// One job at a time. All calls come from one thread.
class WorkerThreads {
 public:
  WorkerThreads() = default;
  WorkerThreads(const WorkerThreads&) = delete;
  WorkerThreads& operator=(const WorkerThreads&) = delete;
  ~WorkerThreads() {
    finish();
    set_job(nullptr, 0);
    for (pthread_t worker : workers_) pthread_join(worker, nullptr);
  }

  bool busy() const { return job_ != nullptr; }

  // Starts the job on `threads` - 1 workers, or as many as can be created.
  void begin(std::unique_ptr<Job> job, int threads) {
    while ((int)workers_.size() < threads - 1) {
      pthread_t worker;
      const auto run = [](void* self) -> void* { return static_cast<WorkerThreads*>(self)->run(), nullptr; };
      if (pthread_create(&worker, nullptr, run, this)) break;
      workers_.push_back(worker);
    }
    set_job(std::move(job), threads);
  }

  // Takes part in the job, if there is one, and returns when it has ended, with its status.
  Status finish() {
    if (!busy()) return OK;
    job_->work(Member(team_, 0, size_));
    std::unique_ptr<Job> done;
    {
      std::lock_guard<std::mutex> lock(mutex_);  // no worker starts on it from here on
      done = std::move(job_);
    }
    spin_until([&] { return num_inside_.load(std::memory_order_acquire) == 0; });
    return done->end();
  }

  // Runs body(member) on the caller's thread and `threads` - 1 workers. No job is under way.
  template <class Body>
  void run(int threads, const Body& body) {
    std::unique_ptr<Job> job(threads <= 1 ? nullptr : new (std::nothrow) BodyJob<Body>(body));
    if (!job) {
      Team alone;
      return body(Member(alone, 0, 1));
    }
    begin(std::move(job), threads);
    finish();
  }

 private:
  template <class Body>
  class BodyJob final : public Job {
   public:
    explicit BodyJob(const Body& body) : body_(body) {}
    void work(const Member& member) const override { body_(member); }
    Status end() const override { return OK; }

   private:
    const Body& body_;
  };

  static constexpr std::chrono::microseconds SPIN_TIME{300};  // before a worker sleeps: longer than from one step to the next

  // Hands a job to the workers; without one they end.
  void set_job(std::unique_ptr<Job> job, int size) {
    bool some_sleep;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      team_.taken.store(0, std::memory_order_relaxed);
      team_.done.store(0, std::memory_order_relaxed);
      job_ = std::move(job), size_ = size;
      number_.fetch_add(1, std::memory_order_release);
      some_sleep = num_asleep_ > 0;
    }
    if (some_sleep) wake_.notify_all();
  }

  void run() {
    const int index = num_started_.fetch_add(1, std::memory_order_relaxed) + 1;
    for (u64 seen = 0;;) {
      seen = wait_for_job(seen);
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

  // Waits until the number of the job is not `seen`, and returns it.
  u64 wait_for_job(u64 seen) {
    const auto is_new = [&] { return number_.load(std::memory_order_acquire) != seen; };
    const auto begin = std::chrono::steady_clock::now();
    spin_until([&] { return is_new() || std::chrono::steady_clock::now() - begin > SPIN_TIME; });
    if (!is_new()) {
      std::unique_lock<std::mutex> lock(mutex_);
      num_asleep_++;
      wake_.wait(lock, is_new);
      num_asleep_--;
    }
    return number_.load(std::memory_order_acquire);
  }

  std::vector<pthread_t> workers_;
  std::atomic<int> num_started_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<u64> number_{0};  // how many times a job was set
  int num_asleep_ = 0;
  std::unique_ptr<Job> job_;  // null: none
  int size_ = -1;             // threads of it; 0: the workers end
  std::atomic<int> num_inside_{0};
  Team team_;
};

}  // namespace aengine
