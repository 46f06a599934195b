// The two products of attention, on tiles that stay in registers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "vector_math.h"

namespace meshdial {

constexpr int kMaxQueries = 4;  // query heads of a tile
constexpr int kMaxVectors = 4;
constexpr int kToL2 = 2;  // the locality that GCC's prefetch calls moderate

// Beside the sums of Q queries there is room for the vectors that they share, and a query's number.
constexpr int tile_vectors(int Q) { return std::min(kMaxVectors, (kRegisters - 1) / (Q + 1)); }

// Sets scores[q * stride + v * W + lane] for Q queries, interleaved as [C, Q], and V vectors of W
// slots. Prefetches C times W floats from each of `next`.
template <int Q, int V, int W>
__attribute__((noinline)) void score_tile(const float* query, const float* const* keys,
                                          const float* const* next, int64_t C, int64_t S,
                                          float* scores, int64_t stride) {
  Vector<W> sums[Q][V] = {};
  for (int64_t c = 0; c < C; ++c) {
    Vector<W> key[V];
    for (int v = 0; v < V; ++v) key[v] = hold(load<W>(keys[v] + c * S));
    for (int v = 0; v < V; ++v) __builtin_prefetch(next[v] + c * W, 0, kToL2);
    for (int q = 0; q < Q; ++q) {
      for (int v = 0; v < V; ++v) sums[q][v] += query[c * Q + q] * key[v];
    }
  }
  for (int q = 0; q < Q; ++q) {
    for (int v = 0; v < V; ++v) store<W>(scores + q * stride + v * W, sums[q][v]);
  }
}

// What a value tile reads: positions [begin, end) of pages of S slots of C channels. `blocks` are
// the pages from that of `begin` on; while one is read, the one `ahead` of it is prefetched.
struct Span {
  int64_t begin, end, S, C;
  const float* const* blocks;
  int64_t ahead;
};

// Adds to output[q * C + i], for Q queries and M vectors of W channels, the weighted values of a
// span from `channel` on. The weight of position p is weights[q * stride + p].
template <int Q, int M, int W>
__attribute__((noinline)) void value_tile(const Span& span, int64_t channel, const float* weights,
                                          int64_t stride, float* output) {
  const int64_t C = span.C, S = span.S;
  Vector<W> sums[Q][M];
  for (int q = 0; q < Q; ++q) {
    for (int m = 0; m < M; ++m) sums[q][m] = load<W>(output + q * C + m * W);
  }
  int64_t position = span.begin;
  for (const float* const* block = span.blocks; position < span.end; ++block) {
    const int64_t stop = std::min(span.end, (position / S + 1) * S);
    const float* value = block[0] + position % S * C + channel;
    const float* next = block[span.ahead] + position % S * C + channel;
    for (; position < stop; ++position, value += C, next += C) {
      Vector<W> channels[M];
      for (int m = 0; m < M; ++m) channels[m] = hold(load<W>(value + m * W));
      for (int m = 0; m < M; ++m) __builtin_prefetch(next + m * W, 0, kToL2);
      for (int q = 0; q < Q; ++q) {
        for (int m = 0; m < M; ++m) sums[q][m] += weights[q * stride + position] * channels[m];
      }
    }
  }
  for (int q = 0; q < Q; ++q) {
    for (int m = 0; m < M; ++m) store<W>(output + q * C + m * W, sums[q][m]);
  }
}

// Calls function(std::integral_constant<int, n>) for a number n in [1, Max].
template <int Max, typename Function>
void with_constant(int64_t n, const Function& function) {
  if constexpr (Max > 1) {
    if (n < Max) return with_constant<Max - 1>(n, function);
  }
  function(std::integral_constant<int, Max>());
}

}  // namespace meshdial
