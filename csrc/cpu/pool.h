// One pool of threads for the process.
#pragma once

#include <functional>

namespace hvds {

// Runs task(0) .. task(tasks - 1) on at most `threads` threads, the caller's among them, and
// returns when all are done. Tasks are handed out in order, and may run in any. With one thread,
// one task, or the pool taken by another caller, the caller runs them all and touches nothing
// shared. After a fork the child starts a pool of its own. Throws what a task threw.
void Run(int tasks, int threads, const std::function<void(int)>& task);

}  // namespace hvds
