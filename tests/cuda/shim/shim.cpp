// The device behind shim.h: fibers, their scheduler, and a loop that serves launches.
//
// A request on standard input, in native byte order: the kernel's name (u32 length, bytes), u32
// blocks, u32 threads, u64 seed; u32 buffers, each u64 bytes and its contents; u32 relocations,
// each (u32 buffer, u64 offset, u32 target, u64 target offset): an address of ours is stored there
// for the launch; u32 arguments, each u8 kind (0 scalar: u8 bytes, u64 value; 1 address: u32
// buffer, u64 offset; 2 null). The answer on standard output: u32 0, and the contents of all
// buffers, without the relocated addresses. A launch that goes wrong ends the process; standard
// error says why.
#include "shim.h"

#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#if defined(HVDS_ADDRESS_SANITIZER)
#include <sanitizer/common_interface_defs.h>
#endif

// Switching between fibers. ucontext.h does it anywhere, with a system call each time; where
// threads meet as often as in a warp, that is most of the time.
#if defined(__x86_64__)

extern "C" void shim_switch(void** from, void* to);
asm(R"(
.text
.type shim_switch, @function
shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size shim_switch, . - shim_switch
)");

struct Context {
  void* stack_pointer = nullptr;

  void Prepare(char* stack, size_t bytes, void (*enter)()) {
    void** top = reinterpret_cast<void**>(stack + bytes / 16 * 16);
    *--top = nullptr;  // the return address of `enter`, which does not return
    *--top = reinterpret_cast<void*>(enter);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    stack_pointer = top;
  }
  void SwitchTo(Context& other) { shim_switch(&stack_pointer, other.stack_pointer); }
};

#else

struct Context {
  ucontext_t context;

  void Prepare(char* stack, size_t bytes, void (*enter)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = bytes;
    context.uc_link = nullptr;
    makecontext(&context, enter, 0);
  }
  void SwitchTo(Context& other) { swapcontext(&context, &other.context); }
};

#endif

namespace shim {
namespace {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = size_t{64} << 10;
constexpr unsigned kGarbage = 0xa5;

struct Block;

struct Fiber {
  Context context;
  std::unique_ptr<char[]> stack;
  Block* block = nullptr;
  unsigned thread = 0;
  const char* waits_for = nullptr;  // null: it can run
  int line = 0;
  uint64_t result = 0;  // of the last collective
  bool done = false;
  void* fake_stack = nullptr;
};

struct Warp {
  unsigned arrived = 0;
  int line = 0;
  Collective collective = Collective::kBallot;
  uint64_t values[kLanes] = {};
  unsigned parameters[kLanes] = {};
};

struct Block {
  unsigned index = 0;
  std::vector<Fiber*> fibers;
  std::vector<Warp> warps;
  unsigned at_barrier = 0;
  int barrier_line = 0;
  unsigned finished = 0;
  std::map<const void*, std::unique_ptr<char[]>> shared;
};

struct KernelInfo {
  Entry entry;
  std::vector<size_t> parameter_bytes;
};

std::map<std::string, KernelInfo>& Kernels() {
  static std::map<std::string, KernelInfo> kernels;
  return kernels;
}

class Device {
 public:
  void Launch(Entry entry, const std::vector<uint64_t>& arguments, unsigned blocks,
              unsigned threads, uint64_t seed);

  Fiber* running = nullptr;
  Entry entry = nullptr;
  const uint64_t* arguments = nullptr;
  unsigned grid = 0;
  std::mt19937_64 random;
  uint64_t idle_spins = 0;
  bool has_reductions = true;
  size_t live = 0;

  void Wait(const char* what, int line) {
    running->waits_for = what;
    running->line = line;
    SwitchToScheduler();
  }
  void GiveWay(bool behind) {
    behind ? runnable_.push_front(running) : runnable_.push_back(running);
    SwitchToScheduler();
  }
  void Wake(Fiber* fiber) {
    fiber->waits_for = nullptr;
    runnable_.push_back(fiber);
  }
  void Finish();

 private:
  Fiber* NewFiber();
  Fiber* Pick();
  void Start(unsigned block_index, unsigned threads);
  void SwitchTo(Fiber* fiber);
  void SwitchToScheduler();

  Context scheduler_;
  void* scheduler_fake_stack_ = nullptr;
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_stack_bytes_ = 0;
  std::deque<Fiber*> runnable_;
  std::vector<std::unique_ptr<Fiber>> pool_;
  std::vector<Fiber*> unused_;
  std::map<unsigned, std::unique_ptr<Block>> resident_;
  friend void Enter();
};

Device device;

void Enter() {
#if defined(HVDS_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(nullptr, &device.scheduler_stack_,
                                  &device.scheduler_stack_bytes_);
#endif
  for (;;) {  // a fiber serves one thread after another
    device.entry(device.arguments);
    device.Finish();
  }
}

Fiber* Device::NewFiber() {
  if (unused_.empty()) {
    pool_.push_back(std::make_unique<Fiber>());
    Fiber* const fiber = pool_.back().get();
    fiber->stack.reset(new char[kStackBytes]);
    fiber->context.Prepare(fiber->stack.get(), kStackBytes, Enter);
    return fiber;
  }
  Fiber* const fiber = unused_.back();
  unused_.pop_back();
  return fiber;
}

void Device::SwitchTo(Fiber* fiber) {
  running = fiber;
#if defined(HVDS_ADDRESS_SANITIZER)
  __sanitizer_start_switch_fiber(&scheduler_fake_stack_, fiber->stack.get(), kStackBytes);
#endif
  scheduler_.SwitchTo(fiber->context);
#if defined(HVDS_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(scheduler_fake_stack_, nullptr, nullptr);
#endif
  running = nullptr;
}

void Device::SwitchToScheduler() {
  Fiber* const fiber = running;
#if defined(HVDS_ADDRESS_SANITIZER)
  __sanitizer_start_switch_fiber(&fiber->fake_stack, scheduler_stack_, scheduler_stack_bytes_);
#endif
  fiber->context.SwitchTo(scheduler_);
#if defined(HVDS_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(fiber->fake_stack, &scheduler_stack_, &scheduler_stack_bytes_);
#endif
}

void Device::Start(unsigned block_index, unsigned threads) {
  auto& block = resident_[block_index] = std::make_unique<Block>();
  block->index = block_index;
  block->warps.resize((threads + kLanes - 1) / kLanes);
  for (unsigned thread = 0; thread < threads; ++thread) {
    Fiber* const fiber = NewFiber();
    fiber->block = block.get();
    fiber->thread = thread;
    fiber->done = false;
    block->fibers.push_back(fiber);
    Wake(fiber);
  }
  live += threads;
}

void Device::Finish() {
  Block* const block = running->block;
  running->done = true;
  ++block->finished;
  if (block->at_barrier > 0) Fail("a thread ends while others of its block wait at a barrier");
  NoteProgress();
  SwitchToScheduler();
}

// Three habits by turns, so that both the oldest and the newest fiber get far ahead of the others.
Fiber* Device::Pick() {
  const uint64_t draw = random();
  size_t at = draw % runnable_.size();
  if (draw >> 60 < 14) at = (draw >> 32) % 3 == 0 ? 0 : runnable_.size() - 1;
  if (idle_spins > 64) at = (draw >> 8) % runnable_.size();
  Fiber* const fiber = runnable_[at];
  runnable_[at] = runnable_.back();
  runnable_.pop_back();
  return fiber;
}

void Device::Launch(Entry kernel, const std::vector<uint64_t>& kernel_arguments, unsigned blocks,
                    unsigned threads, uint64_t seed) {
  entry = kernel;
  arguments = kernel_arguments.data();
  grid = blocks;
  random.seed(seed);
  has_reductions = seed % 2 == 0;
  idle_spins = 0;
  // Blocks start in ascending, descending or random order, one to four at a time, or as many as a
  // look-back has to read in two goes.
  std::vector<unsigned> order(blocks);
  for (unsigned i = 0; i < blocks; ++i) order[i] = seed % 3 == 1 ? blocks - 1 - i : i;
  if (seed % 3 == 2) std::shuffle(order.begin(), order.end(), random);
  const size_t most_resident = seed / 3 % 5 == 4 ? 48 : 1 + seed / 3 % 5;

  size_t next = 0;
  while (next < order.size() || live > 0) {
    while (next < order.size() && resident_.size() < most_resident) Start(order[next++], threads);
    if (runnable_.empty()) {
      for (auto& [index, block] : resident_) {
        for (const Fiber* fiber : block->fibers) {
          if (fiber->done) continue;
          std::fprintf(stderr, "block %u thread %u waits for %s at line %d\n", index, fiber->thread,
                       fiber->waits_for, fiber->line);
        }
      }
      Fail("deadlock");
    }
    Fiber* const fiber = Pick();
    SwitchTo(fiber);
    if (fiber->done) {
      --live;
      Block* const block = fiber->block;
      if (block->finished == block->fibers.size()) {
        unused_.insert(unused_.end(), block->fibers.begin(), block->fibers.end());
        resident_.erase(block->index);
      }
    }
    if (idle_spins > 1000 * (live + 100)) Fail("livelock: every thread spins");
  }
}

void ReadAll(void* to, size_t bytes) {
  if (bytes != 0 && std::fread(to, 1, bytes, stdin) != bytes) std::exit(0);
}

template <typename T>
T ReadOne() {
  T value;
  ReadAll(&value, sizeof value);
  return value;
}

void WriteAll(const void* from, size_t bytes) {
  if (bytes != 0 && std::fwrite(from, 1, bytes, stdout) != bytes) std::exit(1);
}

struct Buffer {
  std::unique_ptr<char[]> data;
  size_t bytes;
};

void ServeOne() {
  std::string name(ReadOne<uint32_t>(), '\0');
  ReadAll(name.data(), name.size());
  const auto blocks = ReadOne<uint32_t>(), threads = ReadOne<uint32_t>();
  const auto seed = ReadOne<uint64_t>();

  std::vector<Buffer> buffers(ReadOne<uint32_t>());
  for (Buffer& buffer : buffers) {
    buffer.bytes = ReadOne<uint64_t>();
    buffer.data.reset(new char[buffer.bytes]);
    ReadAll(buffer.data.get(), buffer.bytes);
  }
  const auto relocations = ReadOne<uint32_t>();
  std::map<char*, uint64_t> relocated;
  for (uint32_t i = 0; i < relocations; ++i) {
    const auto buffer = ReadOne<uint32_t>();
    const auto offset = ReadOne<uint64_t>();
    const auto target = ReadOne<uint32_t>();
    const auto target_offset = ReadOne<uint64_t>();
    char* const place = buffers.at(buffer).data.get() + offset;
    const char* const address = buffers.at(target).data.get() + target_offset;
    std::memcpy(&relocated[place], place, sizeof(uint64_t));
    std::memcpy(place, &address, sizeof address);
  }

  const auto found = Kernels().find(name);
  if (found == Kernels().end()) Fail(("there is no kernel " + name).c_str());
  const std::vector<size_t>& expected = found->second.parameter_bytes;
  std::vector<uint64_t> arguments(ReadOne<uint32_t>());
  if (arguments.size() != expected.size()) {
    Fail((name + " takes " + std::to_string(expected.size()) + " arguments, not " +
          std::to_string(arguments.size()))
             .c_str());
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto kind = ReadOne<uint8_t>();
    size_t bytes = sizeof(void*);
    if (kind == 0) {
      bytes = ReadOne<uint8_t>();
      arguments[i] = ReadOne<uint64_t>();
    } else if (kind == 1) {
      const auto buffer = ReadOne<uint32_t>();
      const auto offset = ReadOne<uint64_t>();
      const char* const address = buffers.at(buffer).data.get() + offset;
      std::memcpy(&arguments[i], &address, sizeof address);
    }
    if (bytes != expected[i]) {
      Fail((name + ": argument " + std::to_string(i) + " has " + std::to_string(expected[i]) +
            " bytes, not " + std::to_string(bytes))
               .c_str());
    }
  }

  device.Launch(found->second.entry, arguments, blocks, threads, seed);

  for (const auto& [place, value] : relocated) std::memcpy(place, &value, sizeof value);
  const uint32_t success = 0;
  WriteAll(&success, sizeof success);
  for (const Buffer& buffer : buffers) WriteAll(buffer.data.get(), buffer.bytes);
  std::fflush(stdout);
}

// The fiber that runs leaves its warp's collective with these results.
void Complete(const Warp& warp, Fiber* const* lanes, unsigned mask) {
  unsigned ballot = 0;
  uint64_t largest = 0, sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (warp.values[lane] != 0) ballot |= 1u << lane;
    largest = std::max(largest, warp.values[lane]);
    sum += warp.values[lane];
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const int parameter = static_cast<int>(warp.parameters[lane]);
    int from = lane;
    switch (warp.collective) {
      case Collective::kBallot:
        lanes[lane]->result = ballot;
        continue;
      case Collective::kMatch:
        lanes[lane]->result = 0;
        for (int other = 0; other < kLanes; ++other) {
          if (warp.values[other] == warp.values[lane]) lanes[lane]->result |= 1u << other;
        }
        continue;
      case Collective::kMax:
        lanes[lane]->result = largest;
        continue;
      case Collective::kSum:
        lanes[lane]->result = sum;
        continue;
      case Collective::kShuffle:
        from = parameter & (kLanes - 1);
        break;
      case Collective::kShuffleUp:
        from = lane >= parameter ? lane - parameter : lane;
        break;
      case Collective::kShuffleDown:
        from = lane + parameter < kLanes ? lane + parameter : lane;
        break;
    }
    lanes[lane]->result = warp.values[from];
  }
}

}  // namespace

unsigned ThreadX() { return device.running->thread; }
unsigned BlockX() { return device.running->block->index; }
unsigned GridX() { return device.grid; }

void Fail(const char* what) {
  std::fprintf(stderr, "shim: %s\n", what);
  std::fflush(stderr);
  std::_Exit(3);
}

namespace {

#if defined(__SSE__)
constexpr unsigned kDenormalsAreZero = 0x8040;  // of operands and of results

// Switches denormals on for as long as it lives.
class Ieee {
 public:
  Ieee() : before_(_mm_getcsr()) { _mm_setcsr(before_ & ~kDenormalsAreZero); }
  ~Ieee() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};

void FlushDenormals() { _mm_setcsr(_mm_getcsr() | kDenormalsAreZero); }
#else
struct Ieee {
  ~Ieee() {}
};

void FlushDenormals() {}
#endif

}  // namespace

// Through volatile variables: the compiler knows of no connection between a number and the mode.
float Add(float a, float b) {
  const Ieee ieee;
  volatile float x = a, sum;
  sum = x + b;
  return sum;
}

float Multiply(float a, float b) {
  const Ieee ieee;
  volatile float x = a, product;
  product = x * b;
  return product;
}

float WidenFloat16(uint16_t h) {
  const Ieee ieee;
  volatile uint16_t half = h;
  volatile float x = hvds::WidenFloat16(half);
  return x;
}

uint16_t NarrowFloat16(float x) {
  const Ieee ieee;
  volatile float wide = x;
  volatile uint16_t h = hvds::NarrowFloat16(wide);
  return h;
}

bool IsMutated(int mutation) {
  static const char* const chosen = std::getenv("HVDS_MUTATION");
  return chosen != nullptr && std::atoi(chosen) == mutation;
}

bool HasReductions() { return device.has_reductions; }

void NoteProgress() { device.idle_spins = 0; }

void MaybeYield() {
  if (device.running != nullptr && device.random() % 4 == 0) device.GiveWay(false);
}

void SpinYield() {
  ++device.idle_spins;
  device.GiveWay(true);
}

void* SharedArray(const void* key, size_t bytes) {
  auto& array = device.running->block->shared[key];
  if (array == nullptr) {
    array.reset(new char[bytes]);
    std::memset(array.get(), kGarbage, bytes);
  }
  return array.get();
}

void Barrier(int line) {
  Block* const block = device.running->block;
  if (block->finished > 0) Fail("a barrier that threads of the block did not reach");
  if (block->at_barrier > 0 && block->barrier_line != line) {
    Fail("threads of a block wait at different barriers");
  }
  block->barrier_line = line;
  if (++block->at_barrier < block->fibers.size()) {
    device.Wait("a barrier", line);
    return;
  }
  block->at_barrier = 0;
  NoteProgress();
  for (Fiber* fiber : block->fibers) {
    if (fiber != device.running) device.Wake(fiber);
  }
  device.GiveWay(false);
}

uint64_t OfWarp(Collective collective, unsigned mask, uint64_t value, unsigned parameter,
                int line) {
  Fiber* const fiber = device.running;
  Block* const block = fiber->block;
  const unsigned lane = fiber->thread % kLanes;
  Warp& warp = block->warps[fiber->thread / kLanes];
  Fiber* const* const lanes = &block->fibers[fiber->thread / kLanes * kLanes];
  if (mask != 0xffffffffu) Fail("a warp collective without all lanes");
  if (warp.arrived != 0 && (warp.line != line || warp.collective != collective)) {
    Fail("lanes of a warp are at different collectives");
  }
  warp.line = line;
  warp.collective = collective;
  warp.values[lane] = value;
  warp.parameters[lane] = parameter;
  warp.arrived |= 1u << lane;
  if (warp.arrived != mask) {
    device.Wait("the other lanes of its warp", line);
    return fiber->result;
  }
  warp.arrived = 0;
  Complete(warp, lanes, mask);
  for (int other = 0; other < kLanes; ++other) {
    if (lanes[other] != fiber) device.Wake(lanes[other]);
  }
  device.GiveWay(false);
  return fiber->result;
}

Kernel::Kernel(const char* name, Entry entry, std::initializer_list<size_t> parameter_bytes) {
  Kernels()[name] = KernelInfo{entry, parameter_bytes};
}

}  // namespace shim

// Called by code that is built with -fsanitize=thread, before every access to memory; this is not
// ThreadSanitizer's library, but takes its place.
namespace {

void Traced(const void* address) {
  const shim::Fiber* const fiber = shim::device.running;
  if (fiber == nullptr) return;
  const char* const stack = fiber->stack.get();
  const auto* const at = static_cast<const char*>(address);
  if (at >= stack && at < stack + shim::kStackBytes) return;
  const uint64_t draw = shim::device.random();
  if (draw % 8 == 0) shim::device.GiveWay(draw >> 8 & 1);  // for long, or for a moment
}

}  // namespace

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define HVDS_TRACED(name) \
  void name(void* address) { Traced(address); }
HVDS_TRACED(__tsan_read1)
HVDS_TRACED(__tsan_read2)
HVDS_TRACED(__tsan_read4)
HVDS_TRACED(__tsan_read8)
HVDS_TRACED(__tsan_read16)
HVDS_TRACED(__tsan_write1)
HVDS_TRACED(__tsan_write2)
HVDS_TRACED(__tsan_write4)
HVDS_TRACED(__tsan_write8)
HVDS_TRACED(__tsan_write16)
HVDS_TRACED(__tsan_unaligned_read2)
HVDS_TRACED(__tsan_unaligned_read4)
HVDS_TRACED(__tsan_unaligned_read8)
HVDS_TRACED(__tsan_unaligned_read16)
HVDS_TRACED(__tsan_unaligned_write2)
HVDS_TRACED(__tsan_unaligned_write4)
HVDS_TRACED(__tsan_unaligned_write8)
HVDS_TRACED(__tsan_unaligned_write16)
HVDS_TRACED(__tsan_vptr_read)
void __tsan_vptr_update(void**, void*) {}
void __tsan_read_range(void* address, unsigned long) { Traced(address); }
void __tsan_write_range(void* address, unsigned long) { Traced(address); }
}

int main() {
  shim::FlushDenormals();
  for (;;) shim::ServeOne();
}
