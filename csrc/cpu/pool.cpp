#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

namespace hvds {
namespace {

// What is shared out: a counter of tasks, and the first exception that one of them threw.
class Job {
 public:
  Job(int tasks, const std::function<void(int)>& task) : tasks_(tasks), task_(task) {}

  void Work() {
    try {
      for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) task_(i);
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }
  void Rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const int tasks_;
  const std::function<void(int)>& task_;
  std::atomic<int> next_{0};
  std::mutex mutex_;
  std::exception_ptr error_;
};

// Threads that live as long as the process; a pool is never destroyed, since they may be waiting in
// it while the process exits.
class Pool {
 public:
  // False if another caller has the pool.
  bool TryRun(Job& job, int helpers) {
    std::unique_lock<std::mutex> taken(in_use_, std::try_to_lock);
    if (!taken.owns_lock()) return false;
    helpers = Spawn(helpers);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      open_places_ = helpers;
    }
    wake_.notify_all();
    job.Work();
    // A helper that has not come by now has nothing left to do, and is not waited for.
    std::unique_lock<std::mutex> lock(mutex_);
    open_places_ = 0;
    done_.wait(lock, [this] { return working_ == 0; });
    return true;
  }

 private:
  // Starts threads until there are `helpers`; returns how many there are, at most that.
  int Spawn(int helpers) {
    if (helpers <= spawned_) return helpers;
    // Signals are for the application's own threads.
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    try {
      for (; spawned_ < helpers; ++spawned_) std::thread([this] { Help(); }).detach();
    } catch (...) {  // of threads or memory there is no more
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return spawned_;
  }

  void Help() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return open_places_ > 0; });
      --open_places_;
      ++working_;
      Job* const job = job_;
      lock.unlock();
      job->Work();
      lock.lock();
      if (--working_ == 0) done_.notify_one();
    }
  }

  std::mutex in_use_;
  int spawned_ = 0;  // under in_use_

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  int open_places_ = 0;
  int working_ = 0;
};

std::atomic<Pool*> the_pool{nullptr};

// The parent's threads are not in the child, and its locks may be held for ever: start afresh.
void ForgetPool() { the_pool.store(nullptr); }
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, ForgetPool);

Pool& ThePool() {
  Pool* pool = the_pool.load();
  if (pool != nullptr) return *pool;
  Pool* fresh = new Pool;
  if (the_pool.compare_exchange_strong(pool, fresh)) return *fresh;
  delete fresh;
  return *pool;
}

}  // namespace

void Run(int tasks, int threads, const std::function<void(int)>& task) {
  if (tasks > 1 && threads > 1) {
    Job job(tasks, task);
    if (ThePool().TryRun(job, (threads < tasks ? threads : tasks) - 1)) {
      job.Rethrow();
      return;
    }
  }
  for (int i = 0; i < tasks; ++i) task(i);
}

}  // namespace hvds
