// One decode token a row: its key and value go to their slot of the paged pool, in place, and its
// query attends to the row's pages through its table.
//
// Rows that stand side by side and begin with the same pages make a bundle, for which a shared page
// is read once. Whatever a row is bundled with, each of its numbers comes from the same operations
// in the same order: scores over channels, the maximum and the sum of its softmax over positions
// counted from a multiple of a register's lanes, outputs over positions.
//
// Pools are [N, K, C, S] for keys and [N, K, S, C] for values: N pages of S slots, K kv heads of C
// channels. R = H / K query heads read one kv head.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "bundle_attention.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace meshdial {
namespace {

constexpr int kMaxRows = 16;                // of a bundle
constexpr int64_t kScoreFloats = 1 << 16;   // of a bundle of several rows: these stay in L2
constexpr double kFlopsOfThread = 1 << 20;  // less work is not worth waking a thread

// How many leading entries, from `begin` on, two rows have in common, of at most `end`.
int64_t common_end(const Call& call, int64_t row, int64_t other, int64_t begin, int64_t end) {
  while (begin < end && call.page(row, begin) == call.page(other, begin)) ++begin;
  return begin;
}

// Adds rows to a bundle for as long as that saves reading pages.
Bundle bundle_from(const Call& call, int64_t row, int64_t max_rows) {
  const int64_t S = call.S;
  Bundle bundle{row, row + 1, 0, 0, 0};
  int64_t begin = (call.first_seen(row) + S - 1) / S, end = call.position[row] / S;
  for (int64_t next = row + 1; next < std::min(call.B, row + max_rows); ++next) {
    const int64_t next_begin = std::max(begin, (call.first_seen(next) + S - 1) / S);
    const int64_t most = std::min<int64_t>(end, call.position[next] / S);
    const int64_t next_end = common_end(call, row, next, next_begin, most);
    const int64_t rows = bundle.end_row - bundle.first_row;
    const int64_t saved = (rows - 1) * (end - begin), next_saved = rows * (next_end - next_begin);
    if (next_saved <= 0 || next_saved < saved) break;
    begin = bundle.shared_begin = next_begin;
    end = bundle.shared_end = next_end;
    bundle.end_row = next + 1;
  }
  return bundle;
}

// All that is to be done, the heads of some rows one after the other.
std::vector<Bundle> bundles(const Call& call, int64_t num_threads) {
  int64_t longest = 1;
  for (int64_t row = 0; row < call.B; ++row) {
    longest = std::max<int64_t>(longest, call.position[row] - call.first_seen(row) + 1);
  }
  const int64_t in_cache = kScoreFloats / (call.R * longest);
  const int64_t in_balance = num_threads > 1 ? call.B * call.K / (4 * num_threads) : kMaxRows;
  const int64_t most = std::max<int64_t>(1, std::min({int64_t{kMaxRows}, in_cache, in_balance}));
  std::vector<Bundle> all;
  for (int64_t row = 0; row < call.B;) {
    Bundle bundle = bundle_from(call, row, most);
    for (; bundle.head < call.K; ++bundle.head) all.push_back(bundle);
    row = bundle.end_row;
  }
  return all;
}

// Runs function(i) for i in [0, size), on the calling thread and on those of the pool that come to
// it in time. The caller waits only for what another thread has begun, so it needs no free thread.
template <typename Function>
void parallel_for(ffi::ThreadPool& pool, int64_t size, int64_t num_threads, Function function) {
  struct State {
    std::atomic<int64_t> taken{0};
    std::mutex mutex;
    std::condition_variable is_done;
    int64_t done = 0;
    bool failed = false;
  };
  auto state = std::make_shared<State>();
  auto work = [state, size, &function] {
    for (int64_t i; (i = state->taken.fetch_add(1)) < size;) {
      bool failed = false;
      try {
        function(i);
      } catch (const std::bad_alloc&) {
        failed = true;
      }
      std::lock_guard<std::mutex> lock(state->mutex);
      state->failed |= failed;
      if (++state->done == size) state->is_done.notify_all();
    }
  };
  for (int64_t i = 1; i < num_threads; ++i) pool.Schedule([work] { work(); });
  work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->is_done.wait(lock, [&] { return state->done == size; });
  if (state->failed) throw std::bad_alloc();
}

int64_t useful_threads(const Call& call, ffi::ThreadPool& pool) {
  double seen = 0;
  for (int64_t row = 0; row < call.B; ++row) seen += call.position[row] + 1 - call.first_seen(row);
  const double flops = 4 * seen * call.K * call.R * call.C;
  const double most = std::min<double>(call.B * call.K, flops / kFlopsOfThread);
  return std::max<int64_t>(1, std::min<int64_t>(pool.num_threads(), static_cast<int64_t>(most)));
}

void attend(const Call& call, ffi::ThreadPool& pool) {
  const int64_t num_threads = useful_threads(call, pool);
  const std::vector<Bundle> all = bundles(call, num_threads);
  const int64_t size = static_cast<int64_t>(all.size());
  const auto attend_one = [&](int64_t i) {
    static thread_local Scratch scratch;
    const bool is_last = i + num_threads >= size;
    Attention(call, all[i], scratch).run(is_last ? nullptr : &all[i + num_threads]);
  };
  if (num_threads > 1) return parallel_for(pool, size, num_threads, attend_one);
  for (int64_t i = 0; i < size; ++i) attend_one(i);
}

// What is wrong with the positions and tables, or nothing.
std::string complaint(const Call& call) {
  for (int64_t row = 0; row < call.B; ++row) {
    const int64_t position = call.position[row];
    if (position < 0 || position >= call.entries * call.S) {
      return "position " + std::to_string(position) + " of row " + std::to_string(row) +
             ", expected one of the " + std::to_string(call.entries) + " pages of " +
             std::to_string(call.S) + " slots of its table";
    }
    for (int64_t entry = call.first_seen(row) / call.S; entry <= position / call.S; ++entry) {
      const int64_t page = call.page(row, entry);
      if (page < 0 || page >= call.N) {
        return "page " + std::to_string(page) + " in entry " + std::to_string(entry) + " of row " +
               std::to_string(row) + ", expected one of the pool's " + std::to_string(call.N);
      }
    }
  }
  return "";
}

using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;
using FloatResult = ffi::Result<Floats>;

bool has_shape(const Floats& buffer, std::initializer_list<int64_t> shape) {
  const auto found = buffer.dimensions();
  return std::equal(found.begin(), found.end(), shape.begin(), shape.end());
}

ffi::Error append_and_attend(ffi::ThreadPool pool, Floats query_BHC, Floats key_BKC,
                             Floats value_BKC, Floats key_NKCS, Floats value_NKSC, Ints table_BN,
                             Ints position_B, FloatResult output_BHC, FloatResult new_key_NKCS,
                             FloatResult new_value_NKSC, int64_t window, float soft_cap) {
  const auto query = query_BHC.dimensions(), keys = key_NKCS.dimensions();
  const auto table = table_BN.dimensions(), position = position_B.dimensions();
  if (query.size() != 3 || keys.size() != 4 || table.size() != 2 || position.size() != 1) {
    return ffi::Error::InvalidArgument("paged attention: arrays of wrong ranks");
  }
  const int64_t B = query[0], H = query[1], N = keys[0], K = keys[1], C = keys[2], S = keys[3];
  const bool fits = has_shape(query_BHC, {B, H, C}) && has_shape(key_BKC, {B, K, C}) &&
                    has_shape(value_BKC, {B, K, C}) && has_shape(value_NKSC, {N, K, S, C}) &&
                    has_shape(*output_BHC, {B, H, C}) && table[0] == B && position[0] == B;
  if (!fits || K < 1 || H < 1 || H % K || C < 8 || C % 8 || S < 8 || S % 8) {
    return ffi::Error::InvalidArgument("paged attention: arrays of shapes that do not fit");
  }
  if (key_NKCS.typed_data() != new_key_NKCS->typed_data() ||
      value_NKSC.typed_data() != new_value_NKSC->typed_data()) {
    return ffi::Error::Internal("paged attention: the pool was copied, expected it in place");
  }
  const Call call{B, K, H / K, C, S, N, table[1], window, soft_cap,
                  1.0f / std::sqrt(static_cast<float>(C)), query_BHC.typed_data(),
                  key_BKC.typed_data(), value_BKC.typed_data(), table_BN.typed_data(),
                  position_B.typed_data(), new_key_NKCS->typed_data(),
                  new_value_NKSC->typed_data(), output_BHC->typed_data()};
  const std::string wrong = complaint(call);
  if (!wrong.empty()) return ffi::Error(ffi::ErrorCode::kOutOfRange, "paged attention: " + wrong);
  try {
    attend(call, pool);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "paged attention: out of memory");
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace meshdial

XLA_FFI_DEFINE_HANDLER_SYMBOL(MeshdialAppendAndAttend, meshdial::append_and_attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap"));
