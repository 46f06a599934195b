// Attention of one kv head's queries, of one bundle of rows, through the rows' tables.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>
#include <vector>

#include "tiles.h"
#include "vector_math.h"

namespace meshdial {

constexpr int64_t kTileFloats = 4096;  // of values that stay in L1 while a bundle reads them
constexpr int kAhead = 6;              // blocks between what is read and what is prefetched
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Call {
  int64_t B, K, R, C, S, N, entries;  // `entries` of each row's table
  int64_t window;                     // 0: all positions are seen
  float soft_cap;                     // 0: none
  float scale;
  const float *query, *new_key, *new_value;
  const int32_t *table, *position;
  float *key, *value, *output;

  int64_t first_seen(int64_t row) const {
    return window > 0 ? std::max<int64_t>(0, position[row] - window + 1) : 0;
  }
  int64_t page(int64_t row, int64_t entry) const { return table[row * entries + entry]; }
  // Where a kv head's keys of a page begin, and its values, being as many.
  int64_t offset(int64_t page, int64_t head) const { return (page * K + head) * C * S; }
};

// Rows that read their shared pages together, for one kv head.
struct Bundle {
  int64_t first_row, end_row;
  int64_t shared_begin, shared_end;  // entries of the table
  int64_t head;                      // the kv head
};

// Memory that grows, of uninitialised floats.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  float* at_least(int64_t size) {
    if (size > size_) {
      std::free(data_);
      size_ = 0;
      const size_t bytes = (size * sizeof(float) + 4095) / 4096 * 4096;
      data_ = static_cast<float*>(std::aligned_alloc(64, bytes));
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = size;
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  int64_t size_ = 0;
};

// What a thread keeps between calls.
struct Scratch {
  Buffer floats;
  std::vector<const float*> blocks;
};

// The attention of one bundle. A block is what a page has of its head's keys, or values.
class Attention {
 public:
  Attention(const Call& call, const Bundle& bundle, Scratch& scratch)
      : call_(call), bundle_(bundle), scratch_(scratch) {
    const int64_t rows = bundle.end_row - bundle.first_row;
    int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;
    for (int64_t row = bundle.first_row; row < bundle.end_row; ++row) {
      begin = std::min(begin, call.first_seen(row));
      end = std::max<int64_t>(end, call.position[row] + 1);
    }
    base_ = begin / kLanes * kLanes;
    stride_ = (end - base_ + kLanes - 1) / kLanes * kLanes;
    queries_ = scratch.floats.at_least(rows * call.R * (call.C + stride_ + 1) + kLanes);
    scores_ = queries_ + (rows * call.R * call.C + kLanes - 1) / kLanes * kLanes;
    totals_ = scores_ + rows * call.R * stride_;
  }

  // `next` is what its thread will probably do then, and may be null.
  void run(const Bundle* next) {
    list_blocks(next);
    for_rows([this](int64_t row) { append(row); });
    for_rows([this](int64_t row) { begin_row(row); });
    for_parts([this](int64_t first, int64_t last, int64_t begin, int64_t end) {
      score(first, last, begin, end);
    });
    for_rows([this](int64_t row) { soften(row); });
    for_parts([this](int64_t first, int64_t last, int64_t begin, int64_t end) {
      weigh(first, last, begin, end);
    });
    for_rows([this](int64_t row) { normalise(row); });
  }

 private:
  template <typename Function>
  void for_rows(const Function& function) {
    for (int64_t row = bundle_.first_row; row < bundle_.end_row; ++row) function(row);
  }

  // function(first row, end row, begin, end) for the positions before the shared pages, in them,
  // and after.
  template <typename Function>
  void for_parts(const Function& function) {
    const int64_t begin = bundle_.shared_begin * call_.S, end = bundle_.shared_end * call_.S;
    if (begin < end) {
      for_rows([&](int64_t row) { function(row, row + 1, call_.first_seen(row), begin); });
      function(bundle_.first_row, bundle_.end_row, begin, end);
    }
    for_rows([&](int64_t row) {
      const int64_t from = begin < end ? end : call_.first_seen(row);
      function(row, row + 1, from, int64_t{call_.position[row]} + 1);
    });
  }

  // function(first query head, Q as a constant) for each register tile of a kv head's queries.
  template <typename Function>
  void for_tiles(const Function& function) {
    for (int64_t q = 0; q < call_.R; q += kMaxQueries) {
      with_constant<kMaxQueries>(std::min<int64_t>(kMaxQueries, call_.R - q),
                                 [&](auto Q) { function(q, Q); });
    }
  }

  // All blocks in the order in which they are read, the first ones of `next`, and enough to look
  // ahead from the last.
  void list_blocks(const Bundle* next) {
    std::vector<const float*>& blocks = scratch_.blocks;
    blocks.clear();
    for (const float* pool : {call_.key, call_.value}) {
      for_parts([&](int64_t first_row, int64_t, int64_t begin, int64_t end) {
        add_blocks(pool, bundle_.head, first_row, begin, end);
      });
    }
    if (next != nullptr) {
      const int64_t row = next->first_row, begin = call_.first_seen(row);
      const int64_t end = std::min<int64_t>(call_.position[row] + 1, begin + kAhead * call_.S);
      add_blocks(call_.key, next->head, row, begin, end);
    }
    blocks.resize(blocks.size() + kAhead, blocks.back());
    block_ = blocks.data();
  }

  void add_blocks(const float* pool, int64_t head, int64_t row, int64_t begin, int64_t end) {
    for (int64_t entry = begin / call_.S; entry * call_.S < end; ++entry) {
      scratch_.blocks.push_back(pool + call_.offset(call_.page(row, entry), head));
    }
  }

  int64_t query_of(int64_t row) const { return (row - bundle_.first_row) * call_.R; }
  float* queries(int64_t row) { return queries_ + query_of(row) * call_.C; }
  float* scores(int64_t row) { return scores_ + query_of(row) * stride_; }
  float* output(int64_t row) {
    return call_.output + (row * call_.K + bundle_.head) * call_.R * call_.C;
  }

  void append(int64_t row) {
    const int64_t C = call_.C, S = call_.S, entry = call_.position[row] / S;
    const int64_t slot = call_.position[row] % S;
    const int64_t offset = call_.offset(call_.page(row, entry), bundle_.head);
    const int64_t from = (row * call_.K + bundle_.head) * C;
    float* key = call_.key + offset + slot;
    for (int64_t c = 0; c < C; ++c) key[c * S] = call_.new_key[from + c];
    std::copy_n(call_.new_value + from, C, call_.value + offset + slot * C);
  }

  void begin_row(int64_t row) {
    const int64_t C = call_.C;
    const float* from = call_.query + (row * call_.K + bundle_.head) * call_.R * C;
    std::fill_n(output(row), call_.R * C, 0.0f);
    for_tiles([&](int64_t first, auto Q) {
      float* packed = queries(row) + first * C;
      for (int64_t c = 0; c < C; ++c) {
        for (int q = 0; q < Q; ++q) packed[c * Q + q] = from[(first + q) * C + c] * call_.scale;
      }
    });
  }

  // The scores of positions [begin, end), and of their neighbours in the same vectors.
  void score(int64_t first_row, int64_t end_row, int64_t begin, int64_t end) {
    if (call_.S % kLanes == 0) {
      score_vectors<kLanes>(first_row, end_row, begin / kLanes, (end + kLanes - 1) / kLanes);
    } else {
      constexpr int W = std::min(kLanes, 8);
      score_vectors<W>(first_row, end_row, begin / W, (end + W - 1) / W);
    }
  }

  template <int W>
  void score_vectors(int64_t first_row, int64_t end_row, int64_t begin, int64_t end) {
    const int64_t of_page = call_.S / W;
    const float* const* blocks = block_ - begin / of_page;
    block_ = blocks + (end + of_page - 1) / of_page;
    for (int64_t width; begin < end; begin += width) {
      width = std::min<int64_t>(end - begin, kMaxVectors);
      const float *keys[kMaxVectors], *next[kMaxVectors];
      for (int64_t v = 0; v < width; ++v) {
        const int64_t page = (begin + v) / of_page, part = (begin + v) % of_page;
        keys[v] = blocks[page] + part * W;
        next[v] = blocks[page + kAhead] + part * W * call_.C;
      }
      for (int64_t row = first_row; row < end_row; ++row) {
        const float* const* to_prefetch = row == first_row ? next : keys;
        for_tiles([&](int64_t first, auto Q) {
          float* to = scores(row) + first * stride_ + begin * W - base_;
          score_queries<Q, W>(queries(row) + first * call_.C, keys, to_prefetch, width, to);
        });
      }
    }
  }

  template <int Q, int W>
  void score_queries(const float* query, const float* const* keys, const float* const* next,
                     int64_t width, float* to) {
    constexpr int kMost = tile_vectors(Q);
    for (int64_t v = 0; v < width; v += kMost) {
      with_constant<kMost>(std::min<int64_t>(kMost, width - v), [&](auto V) {
        score_tile<Q, V, W>(query, keys + v, next + v, call_.C, call_.S, to + v * W, stride_);
      });
    }
  }

  // Scores become weights that are not normalised yet, 0 where nothing is seen.
  void soften(int64_t row) {
    const int64_t begin = call_.first_seen(row) - base_, end = call_.position[row] + 1 - base_;
    const int64_t first = begin / kLanes * kLanes;
    const int64_t last = (end + kLanes - 1) / kLanes * kLanes;
    for (int64_t q = 0; q < call_.R; ++q) {
      float* scores = this->scores(row) + q * stride_;
      std::fill(scores + first, scores + begin, -kInfinity);
      std::fill(scores + end, scores + last, -kInfinity);
      if (call_.soft_cap > 0) cap(scores, first, last);
      totals_[query_of(row) + q] = soften(scores, first, last);
    }
  }

  void cap(float* scores, int64_t first, int64_t last) {
    const float cap = call_.soft_cap, inverse = 1.0f / cap;
    for (int64_t i = first; i < last; i += kLanes) {
      const Vector<kLanes> score = load<kLanes>(scores + i);
      const Vector<kLanes> capped = cap * hyperbolic_tangent<kLanes>(score * inverse);
      store<kLanes>(scores + i, score == -kInfinity ? score : capped);
    }
  }

  static float soften(float* scores, int64_t first, int64_t last) {
    Vector<kLanes> largest = load<kLanes>(scores + first), total = {};
    for (int64_t i = first + kLanes; i < last; i += kLanes) {
      const Vector<kLanes> score = load<kLanes>(scores + i);
      largest = score > largest ? score : largest;
    }
    float maximum = largest[0], sum = 0;
    for (int lane = 1; lane < kLanes; ++lane) maximum = std::max(maximum, largest[lane]);
    for (int64_t i = first; i < last; i += kLanes) {
      const Vector<kLanes> weight = exponential<kLanes>(load<kLanes>(scores + i) - maximum);
      store<kLanes>(scores + i, weight);
      total += weight;
    }
    for (int lane = 0; lane < kLanes; ++lane) sum += total[lane];
    return sum;
  }

  // Adds the values of positions [begin, end) to the rows' outputs.
  void weigh(int64_t first_row, int64_t end_row, int64_t begin, int64_t end) {
    const int64_t S = call_.S, pages = std::max<int64_t>(1, kTileFloats / (S * call_.C));
    for (int64_t stop; begin < end; begin = stop) {
      stop = std::min(end, (begin / S + pages) * S);
      for (int64_t row = first_row; row < end_row; ++row) {
        const Span span{begin, stop, S, call_.C, block_, row == first_row ? kAhead : 0};
        for_tiles([&](int64_t first, auto Q) {
          const float* weights = scores(row) + first * stride_ - base_;
          weigh_channels<Q>(span, weights, output(row) + first * call_.C);
        });
      }
      block_ += (stop + S - 1) / S - begin / S;
    }
  }

  template <int Q>
  void weigh_channels(const Span& span, const float* weights, float* to) {
    constexpr int kMost = tile_vectors(Q), kNarrow = std::min(kLanes, 8);
    int64_t channel = 0;
    while (call_.C - channel >= kLanes) {
      const int64_t width = std::min<int64_t>(kMost, (call_.C - channel) / kLanes);
      with_constant<kMost>(width, [&](auto M) {
        value_tile<Q, M, kLanes>(span, channel, weights, stride_, to + channel);
      });
      channel += width * kLanes;
    }
    for (; channel < call_.C; channel += kNarrow) {
      value_tile<Q, 1, kNarrow>(span, channel, weights, stride_, to + channel);
    }
  }

  void normalise(int64_t row) {
    for (int64_t q = 0; q < call_.R; ++q) {
      const float inverse = 1.0f / totals_[query_of(row) + q];
      float* channels = output(row) + q * call_.C;
      for (int64_t c = 0; c < call_.C; ++c) channels[c] *= inverse;
    }
  }

  const Call& call_;
  const Bundle& bundle_;
  int64_t base_, stride_;  // scores begin at position base_, those of the next query stride_ later
  float *queries_, *scores_, *totals_;
  Scratch& scratch_;
  const float* const* block_;  // the one that is read next
};

}  // namespace meshdial
