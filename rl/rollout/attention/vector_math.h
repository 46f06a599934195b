// Vectors of floats as wide as the machine's registers, in the extension that GCC and Clang share,
// and the functions that attention needs of them.
#pragma once

#include <cstdint>
#include <cstring>

namespace meshdial {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRegisters = 32;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif

template <int W>
struct Vectors;
template <>
struct Vectors<4> {
  typedef float Float __attribute__((vector_size(16)));
  typedef int32_t Int __attribute__((vector_size(16)));
};
template <>
struct Vectors<8> {
  typedef float Float __attribute__((vector_size(32)));
  typedef int32_t Int __attribute__((vector_size(32)));
};
template <>
struct Vectors<16> {
  typedef float Float __attribute__((vector_size(64)));
  typedef int32_t Int __attribute__((vector_size(64)));
};
template <int W>
using Vector = typename Vectors<W>::Float;

template <int W>
inline Vector<W> load(const float* from) {
  Vector<W> vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

// A vector that several products use, kept in a register: else each would load it again.
template <typename Float>
inline Float hold(Float vector) {
#if defined(__x86_64__)
  asm("" : "+v"(vector));
#elif defined(__aarch64__)
  asm("" : "+w"(vector));
#endif
  return vector;
}

template <int W>
inline void store(float* to, const Vector<W>& vector) {
  std::memcpy(to, &vector, sizeof(vector));
}

// e^x for x <= 88, within 1e-7 of itself; 0 below -87, where it would leave the normal numbers.
template <int W>
inline Vector<W> exponential(const Vector<W>& x) {
  using Int = typename Vectors<W>::Int;
  const Vector<W> zero = {};
  const float round = 12582912.0f;  // 1.5 * 2^23: adding it leaves a whole number in the low bits
  const Vector<W> shifted = x * 1.44269504f + round;
  const Vector<W> whole = shifted - round;
  const Vector<W> rest = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;  // |rest| <= ln(2)/2
  Vector<W> series = rest * 0.0013933652f + 0.008363182f;  // of (e^r - 1 - r) / r^2
  series = series * rest + 0.041666467f;
  series = series * rest + 0.16666576f;
  series = series * rest + 0.5f;
  series = series * (rest * rest) + rest + 1.0f;
  Int bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits + 127) << 23;
  Vector<W> power;
  std::memcpy(&power, &bits, sizeof(power));
  return x < -87.0f ? zero : series * power;
}

// tanh(x), within 2e-7 of itself: a series where it is small, by e^2x elsewhere.
template <int W>
inline Vector<W> hyperbolic_tangent(const Vector<W>& x) {
  const Vector<W> size = x < 0.0f ? -x : x;
  const Vector<W> square = x * x;
  Vector<W> series = square * -0.006104948f + 0.021003641f;  // of (tanh(x) - x) / x^3
  series = series * square - 0.0538525f;
  series = series * square + 0.13332783f;
  series = series * square - 0.33333328f;
  series = series * (square * x) + x;
  const Vector<W> limit = Vector<W>{} + 40.0f;
  const Vector<W> twice = size + size;
  const Vector<W> power = exponential<W>(twice > limit ? limit : twice);
  const Vector<W> large = 1.0f - 2.0f / (power + 1.0f);
  return size < 0.625f ? series : (x < 0.0f ? -large : large);
}

}  // namespace meshdial
