// Vectors of float or double and the functions the kernels need of them, on the compiler's own
// vector types: one source for SSE2, AVX2, AVX-512 and NEON.
//
// isa_kernels.h includes this file once per instruction set, inside a namespace of that name, with
// GRPO_VECTOR_BYTES set to the register width. So there is no include guard.

// Always: a call would pass vectors, and the running sums, through memory.
#undef GRPO_INLINE
#define GRPO_INLINE inline __attribute__((always_inline))

template <typename T>
struct LaneTypes;

template <>
struct LaneTypes<float> {
  typedef float Value __attribute__((vector_size(GRPO_VECTOR_BYTES)));
  typedef int32_t Integer __attribute__((vector_size(GRPO_VECTOR_BYTES)));
  typedef uint8_t Byte __attribute__((vector_size(GRPO_VECTOR_BYTES / 4)));
  typedef uint16_t Half __attribute__((vector_size(GRPO_VECTOR_BYTES / 2)));
};

template <>
struct LaneTypes<double> {
  typedef double Value __attribute__((vector_size(GRPO_VECTOR_BYTES)));
  typedef int64_t Integer __attribute__((vector_size(GRPO_VECTOR_BYTES)));
  typedef uint8_t Byte __attribute__((vector_size(GRPO_VECTOR_BYTES / 8)));
};

// A register of T, and a lane mask: every lane all ones or all zeros, as comparisons give it.
template <typename T>
using Vec = typename LaneTypes<T>::Value;
template <typename T>
using Mask = typename LaneTypes<T>::Integer;

template <typename T>
inline constexpr int64_t lanes = GRPO_VECTOR_BYTES / sizeof(T);

template <typename T>
GRPO_INLINE Vec<T> splat(T value) {
  return Vec<T>{} + value;
}

template <typename T>
GRPO_INLINE Vec<T> load(const T* from) {
  Vec<T> out;
  __builtin_memcpy(&out, from, sizeof(out));
  return out;
}

template <typename T>
GRPO_INLINE void store(T* to, Vec<T> value) {
  __builtin_memcpy(to, &value, sizeof(value));
}

// Loads and stores with conversion. 16-bit floats round to nearest, ties to even.
template <typename T>
GRPO_INLINE Vec<T> load_converted(const T* from) {
  return load(from);
}

template <typename T>
GRPO_INLINE void store_converted(T* to, Vec<T> value) {
  store(to, value);
}

using Bits = uint32_t __attribute__((vector_size(GRPO_VECTOR_BYTES)));

GRPO_INLINE Bits load_16_bits(const void* from) {
  LaneTypes<float>::Half bits;
  __builtin_memcpy(&bits, from, sizeof(bits));
  return __builtin_convertvector(bits, Bits);
}

GRPO_INLINE void store_16_bits(void* to, Bits value) {
  const auto bits = __builtin_convertvector(value, LaneTypes<float>::Half);
  __builtin_memcpy(to, &bits, sizeof(bits));
}

template <typename T>
GRPO_INLINE Vec<T> load_converted(const BFloat16* from) {
  return (Vec<T>)(load_16_bits(from) << 16);
}

template <typename T>
GRPO_INLINE void store_converted(BFloat16* to, Vec<T> value) {
  const Bits bits = (Bits)value;
  const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  store_16_bits(to, value == value ? rounded : (bits >> 16) | 0x40);
}

template <typename T>
GRPO_INLINE Vec<T> load_converted(const Float16* from) {
#if GRPO_VECTOR_BYTES == 64
  return (Vec<T>)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
  const Bits half = load_16_bits(from);
  const Bits magnitude = (half & 0x7fff) << 13;
  // The product with 2^112 moves the exponent's bias and normalises denormals.
  const Bits finite = (Bits)((Vec<T>)magnitude * 0x1p112f);
  const Bits bits = magnitude >= 0x0f800000u ? magnitude | 0x7f800000 : finite;
  return (Vec<T>)(bits | (half & 0x8000) << 16);
#endif
}

template <typename T>
GRPO_INLINE void store_converted(Float16* to, Vec<T> value) {
#if GRPO_VECTOR_BYTES == 64
  const __m256i bits = _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256((__m256i*)to, bits);
#else
  const Bits sign = ((Bits)value >> 16) & 0x8000;
  const Bits magnitude = (Bits)value & 0x7fffffff;
  const Bits normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Adding 1/2 rounds at the last bit of a half-precision denormal.
  const Bits denormal = (Bits)((Vec<T>)magnitude + 0.5f) - 0x3f000000;
  const Bits not_finite = magnitude > 0x7f800000u ? Bits{} + 0x7e00u : Bits{} + 0x7c00u;
  const Bits finite = magnitude < 0x38800000u ? denormal : normal;
  store_16_bits(to, sign | (magnitude >= 0x47800000u ? not_finite : finite));
#endif
}

// Whether the next lanes<T> flags are all false.
template <typename T>
GRPO_INLINE bool none_of(const bool* from) {
  if constexpr (lanes<T> % 8 == 0) {
    uint64_t any = 0, eight;
    for (int64_t at = 0; at < lanes<T>; at += 8) {
      __builtin_memcpy(&eight, from + at, 8);
      any |= eight;
    }
    return any == 0;
  } else {
    bool any = false;
    for (int64_t lane = 0; lane < lanes<T>; ++lane) any |= from[lane];
    return !any;
  }
}

// Bytes to lanes. gcc 12 scalarises __builtin_convertvector here, hence the intrinsics.
template <typename T>
GRPO_INLINE Mask<T> load_mask(const bool* from) {
#if GRPO_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4)
    return (Mask<T>)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)) != 0;
  else
    return (Mask<T>)_mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)from)) != 0;
#elif GRPO_VECTOR_BYTES == 32
  if constexpr (sizeof(T) == 4)
    return (Mask<T>)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)) != 0;
  else
    return (Mask<T>)_mm256_cvtepu8_epi64(_mm_loadu_si32(from)) != 0;
#else
  Mask<T> out{};
  for (int64_t lane = 0; lane < lanes<T>; ++lane) out[lane] = from[lane];
  return out != 0;
#endif
}

template <typename T>
GRPO_INLINE Vec<T> select(Mask<T> condition, Vec<T> if_true, Vec<T> if_false) {
  return condition ? if_true : if_false;
}

// NaN in either operand wins, as in torch.maximum.
template <typename T>
GRPO_INLINE Vec<T> maximum(Vec<T> a, Vec<T> b) {
  return select<T>((a >= b) | (a != a), a, b);
}

// b where a is NaN: for running maxima over values that a NaN poisons by another way.
template <typename T>
GRPO_INLINE Vec<T> maximum_ignoring_nan(Vec<T> a, Vec<T> b) {
  return select<T>(a > b, a, b);
}

template <typename T>
GRPO_INLINE T sum_lanes(Vec<T> value) {
  T total = 0;
  for (int64_t lane = 0; lane < lanes<T>; ++lane) total += value[lane];
  return total;
}

template <typename T>
GRPO_INLINE T max_lanes(Vec<T> value) {
  T largest = value[0];
  for (int64_t lane = 1; lane < lanes<T>; ++lane)
    largest = value[lane] > largest ? value[lane] : largest;
  return largest;
}

// Range reduction x = n ln2 + r, |r| <= ln2 / 2, and q(r) = (e^r - 1 - r) / r^2 as a Chebyshev fit.
template <typename T>
struct ExpTerms {
  Vec<T> n, r, q;
};

GRPO_INLINE ExpTerms<float> exp_terms(Vec<float> x) {
  // Adding 1.5 * 2^23 rounds to an integer in the low mantissa bits.
  const Vec<float> n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  const Vec<float> r = (x - n * 0.693145751953125f) - n * 1.42860682e-6f;
  Vec<float> q = splat(1.98910805e-4f);
  q = q * r + 1.39337307e-3f;
  q = q * r + 8.33331084e-3f;
  q = q * r + 4.16664642e-2f;
  q = q * r + 1.66666667e-1f;
  q = q * r + 0.5f;
  return {n, r, q};
}

GRPO_INLINE ExpTerms<double> exp_terms(Vec<double> x) {
  const Vec<double> n = (x * 1.442695040888963407 + 6755399441055744.0) - 6755399441055744.0;
  const Vec<double> r = (x - n * 0.6931471803691238) - n * 1.908214929270587816e-10;
  Vec<double> q = splat(1.6086677666787361503e-10);
  q = q * r + 2.0918212319133978201e-9;
  q = q * r + 2.5052070959803661989e-8;
  q = q * r + 2.7557263077309411451e-7;
  q = q * r + 2.7557319247344509509e-6;
  q = q * r + 2.4801587336630946966e-5;
  q = q * r + 1.9841269841263251867e-4;
  q = q * r + 1.3888888888879003084e-3;
  q = q * r + 8.3333333333333340131e-3;
  q = q * r + 4.1666666666666676865e-2;
  q = q * r + 1.6666666666666666667e-1;
  q = q * r + 0.5;
  return {n, r, q};
}

// 2^n for integral n with 2^n normal.
GRPO_INLINE Vec<float> exp2_integer(Vec<float> n) {
  const auto bits = (__builtin_convertvector(n, Mask<float>) + 127) << 23;
  return (Vec<float>)bits;  // the same bits
}

GRPO_INLINE Vec<double> exp2_integer(Vec<double> n) {
  const auto bits = (__builtin_convertvector(n, Mask<double>) + 1023) << 52;
  return (Vec<double>)bits;  // the same bits
}

template <typename T>
inline constexpr T exp_overflow = sizeof(T) == 4 ? T(88.7228394) : T(709.782712893384);
template <typename T>
inline constexpr T exp_underflow = sizeof(T) == 4 ? T(-103.972084) : T(-745.133219101941);
template <typename T>
inline constexpr T exp_smallest_normal = sizeof(T) == 4 ? T(-87.3365) : T(-708.396);

// exp_terms of x where e^x is neither 0 nor infinite, of the nearest such number elsewhere. NaN
// stays NaN.
template <typename T>
GRPO_INLINE ExpTerms<T> bounded_exp_terms(Vec<T> x) {
#if GRPO_VECTOR_BYTES == 64
  // scalef goes through denormals to 0, and to infinity; n and r are of use within these bounds.
  // The order of the operands lets NaN through.
  const Vec<T> highest = splat(exp_overflow<T> + 10), lowest = splat(exp_underflow<T> - 10);
  const Vec<T> below = highest < x ? highest : x;
  return exp_terms(lowest > below ? lowest : below);
#else
  return exp_terms(select<T>(
      x > exp_overflow<T>,
      splat(exp_overflow<T>),
      select<T>(x < exp_underflow<T>, splat(exp_underflow<T>), x)));
#endif
}

// e^x from bounded_exp_terms(x).
template <typename T>
GRPO_INLINE Vec<T> exp_of_terms(Vec<T> x, const ExpTerms<T>& terms) {
  const auto [n, r, q] = terms;
  const Vec<T> mantissa = q * (r * r) + r + T(1);
#if GRPO_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4)
    return (Vec<T>)_mm512_scalef_ps((__m512)mantissa, (__m512)n);
  else
    return (Vec<T>)_mm512_scalef_pd((__m512d)mantissa, (__m512d)n);
#else
  // 2^n may be beyond the normal range, its two halves are not. NaN survives the products.
  const Vec<T> safe_n = select<T>(n == n, n, Vec<T>{});
  const Vec<T> half_n = __builtin_convertvector(
      __builtin_convertvector(safe_n, Mask<T>) >> 1, Vec<T>);
  Vec<T> out = mantissa * exp2_integer(half_n) * exp2_integer(safe_n - half_n);
  out = select<T>(x > exp_overflow<T>, splat(std::numeric_limits<T>::infinity()), out);
  return select<T>(x < exp_underflow<T>, Vec<T>{}, out);
#endif
}

// e^x within 2 ulp over the whole range, denormals included; inf, 0 and NaN as in std::exp.
template <typename T>
GRPO_INLINE Vec<T> exp(Vec<T> x) {
  return exp_of_terms<T>(x, bounded_exp_terms<T>(x));
}

// e^x for x <= 0 within 2 ulp; 0 where the result would be denormal. NaN stays NaN. The softmax's exp.
template <typename T>
GRPO_INLINE Vec<T> exp_nonpositive(Vec<T> x) {
  const auto [n, r, q] = exp_terms(x);
  const Vec<T> mantissa = q * (r * r) + r + T(1);
#if GRPO_VECTOR_BYTES == 64
  Vec<T> out;
  if constexpr (sizeof(T) == 4)
    out = (Vec<T>)_mm512_scalef_ps((__m512)mantissa, (__m512)n);
  else
    out = (Vec<T>)_mm512_scalef_pd((__m512d)mantissa, (__m512d)n);
#else
  const Mask<T> in_range = x >= exp_smallest_normal<T>;
  const Vec<T> out = mantissa * exp2_integer(select<T>(in_range, n, Vec<T>{}));
#endif
  return select<T>(x < exp_smallest_normal<T>, Vec<T>{}, out);
}

// e^x - 1 and e^x - 1 - x, accurate also near 0, where the plain differences cancel.
template <typename T>
GRPO_INLINE Vec<T> expm1(Vec<T> x) {
  const ExpTerms<T> terms = bounded_exp_terms<T>(x);
  const auto [n, r, q] = terms;
  return select<T>(n == Vec<T>{}, q * (r * r) + r, exp_of_terms<T>(x, terms) - T(1));
}

template <typename T>
GRPO_INLINE Vec<T> expm1_minus_x(Vec<T> x) {
  const ExpTerms<T> terms = bounded_exp_terms<T>(x);
  const auto [n, r, q] = terms;
  return select<T>(n == Vec<T>{}, q * (r * r), exp_of_terms<T>(x, terms) - T(1) - x);
}

// tanh(x), relative error under 1e-6 (float) also near 0.
template <typename T>
GRPO_INLINE Vec<T> tanh(Vec<T> x) {
  const Vec<T> magnitude = select<T>(x < T(0), -x, x);
  // tanh is 1 to rounding from 20 on, and e^-inf - 1 + inf would be no number.
  const Vec<T> y = T(-2) * select<T>(magnitude > T(20), splat(T(20)), magnitude);
  const Vec<T> exp_minus_one = expm1<T>(y);
  const Vec<T> out = -exp_minus_one / (exp_minus_one + T(2));
  return select<T>(x < T(0), -out, out);
}
