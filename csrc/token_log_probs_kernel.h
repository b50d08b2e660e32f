// The row kernels of token_log_probs for one instruction set; see token_log_probs.h.

// Elements in a block: its maximum is taken first, its exponentials then from the L1 cache.
inline constexpr int64_t block_size = 2048;
// Vectors in flight: hides the latency of the exponential's chain.
inline constexpr int64_t unroll = 4;

struct Sums {
  double exp;  // sum e^z
  double exp_z;  // sum z e^z
};

template <bool kSoftcap, typename T>
inline Vec<T> capped(Vec<T> logits, T softcap, T inverse_softcap) {
  if constexpr (kSoftcap) return softcap * tanh<T>(logits * inverse_softcap);
  return logits;
}

// Copies up to a block, converted and capped, and pads it with -inf to whole steps.
template <typename T, bool kSoftcap, typename S>
inline int64_t fill_block(T* block, const S* logits, int64_t count, T softcap) {
  const T inverse_softcap = kSoftcap ? T(1) / softcap : T(0);
  int64_t i = 0;
  for (; i + lanes<T> <= count; i += lanes<T>)
    store<T>(
        block + i,
        capped<kSoftcap, T>(load_converted<T>(logits + i), softcap, inverse_softcap));
  if (i < count) {
    S tail[lanes<T>] = {};
    std::copy(logits + i, logits + count, tail);
    store<T>(block + i, capped<kSoftcap, T>(load_converted<T>(tail), softcap, inverse_softcap));
  }
  constexpr int64_t step = unroll * lanes<T>;
  const int64_t padded = (count + step - 1) / step * step;
  std::fill(block + count, block + padded, -std::numeric_limits<T>::infinity());
  return padded;
}

template <typename T>
inline T block_max(const T* block, int64_t count) {
  Vec<T> largest[unroll];
  for (auto& one : largest) one = splat(-std::numeric_limits<T>::infinity());
  for (int64_t i = 0; i < count; i += unroll * lanes<T>)
    for (int64_t j = 0; j < unroll; ++j)
      largest[j] = maximum_ignoring_nan<T>(load<T>(block + i + j * lanes<T>), largest[j]);
  for (int64_t j = 1; j < unroll; ++j) largest[0] = maximum_ignoring_nan<T>(largest[j], largest[0]);
  return max_lanes<T>(largest[0]);
}

// Sums over a block of e^z and z e^z; meanwhile the block at `next` comes into the cache.
template <typename T, bool kEntropy>
inline Sums block_sums(
    const T* block, int64_t count, T offset, T inverse_temperature, const char* next, int64_t ratio) {
  Vec<T> exp_sum[unroll] = {}, exp_z_sum[unroll] = {};
  for (int64_t i = 0; i < count; i += unroll * lanes<T>) {
    for (int64_t line = 0; line < GRPO_VECTOR_BYTES * unroll / ratio; line += 64)
      __builtin_prefetch(next + i * int64_t(sizeof(T)) / ratio + line);
    for (int64_t j = 0; j < unroll; ++j) {
      const Vec<T> z = (load<T>(block + i + j * lanes<T>) - offset) * inverse_temperature;
      const Vec<T> exp_z = exp_nonpositive<T>(z);
      exp_sum[j] += exp_z;
      // z is -inf where the logit is; 0 * -inf would be NaN.
      if constexpr (kEntropy) exp_z_sum[j] += select<T>(exp_z == T(0), Vec<T>{}, exp_z * z);
    }
  }
  for (int64_t j = 1; j < unroll; ++j) {
    exp_sum[0] += exp_sum[j];
    exp_z_sum[0] += exp_z_sum[j];
  }
  return {sum_lanes<T>(exp_sum[0]), sum_lanes<T>(exp_z_sum[0])};
}

template <typename S, typename T, bool kSoftcap, bool kEntropy>
RowSummary summarize(const S* logits, int64_t vocab, T inverse_temperature, T softcap) {
  constexpr bool direct = std::is_same_v<S, T> && !kSoftcap;
  constexpr T no_max = -std::numeric_limits<T>::infinity();
  alignas(64) T buffer[block_size];
  T max = no_max;
  Sums total = {0, 0};
  for (int64_t begin = 0; begin < vocab; begin += block_size) {
    const int64_t valid = std::min(block_size, vocab - begin);
    const T* block = buffer;
    int64_t count = valid;
    if constexpr (direct)
      if (valid == block_size) block = logits + begin;
    if (block == buffer) count = fill_block<T, kSoftcap>(buffer, logits + begin, valid, softcap);

    const T largest = block_max<T>(block, count);
    if (largest > max) {
      if (max != no_max) {
        const double shift = (double(max) - double(largest)) * inverse_temperature;
        const double factor = std::exp(shift);
        total = {total.exp * factor, (total.exp_z + shift * total.exp) * factor};
      }
      max = largest;
    }
    // While there is no maximum every logit is -inf or NaN, and NaN must come through.
    const Sums sums = block_sums<T, kEntropy>(
        block,
        count,
        max == no_max ? T(0) : max,
        inverse_temperature,
        reinterpret_cast<const char*>(logits + begin + valid),
        sizeof(T) / sizeof(S));
    total.exp += sums.exp;
    total.exp_z += sums.exp_z;
  }
  const double log_sum = std::log(total.exp);
  return {max, log_sum, log_sum - total.exp_z / total.exp};
}

template <typename S, typename T>
RowSummary summarize_row(const void* row, int64_t vocab, const RowScale& scale, bool entropy) {
  const S* logits = static_cast<const S*>(row);
  const T inverse_temperature = scale.inverse_temperature;
  const T softcap = scale.softcap;
  if (softcap != 0)
    return entropy ? summarize<S, T, true, true>(logits, vocab, inverse_temperature, softcap)
                   : summarize<S, T, true, false>(logits, vocab, inverse_temperature, softcap);
  return entropy ? summarize<S, T, false, true>(logits, vocab, inverse_temperature, softcap)
                 : summarize<S, T, false, false>(logits, vocab, inverse_temperature, softcap);
}

// d loss / d logits = p (log_prob_slope + entropy_slope z) with z = log p, times the softcap's own.
template <typename T>
struct GradientTerms {
  T max, inverse_temperature, log_sum, softcap, inverse_softcap, constant, slope;
};

template <bool kSoftcap, typename T>
inline Vec<T> gradient(Vec<T> logits, const GradientTerms<T>& terms) {
  Vec<T> capped_logits = logits;
  Vec<T> derivative = splat(T(1));
  if constexpr (kSoftcap) {
    const Vec<T> tanh_logits = tanh<T>(logits * terms.inverse_softcap);
    capped_logits = terms.softcap * tanh_logits;
    derivative = T(1) - tanh_logits * tanh_logits;
  }
  const Vec<T> log_p =
      (capped_logits - terms.max) * terms.inverse_temperature - terms.log_sum;
  const Vec<T> p = exp_nonpositive<T>(log_p);
  Vec<T> out = p * (terms.slope * log_p + terms.constant);
  if constexpr (kSoftcap) out *= derivative;
  // log_p is -inf where the logit is; 0 * -inf would be NaN.
  return select<T>(p == T(0), Vec<T>{}, out);
}

template <typename S, typename T, bool kSoftcap>
void differentiate(const S* logits, S* grad, int64_t vocab, const GradientTerms<T>& terms) {
  int64_t i = 0;
  for (; i + lanes<T> <= vocab; i += lanes<T>)
    store_converted<T>(
        grad + i, gradient<kSoftcap, T>(load_converted<T>(logits + i), terms));
  if (i < vocab) {
    S tail[lanes<T>] = {};
    std::copy(logits + i, logits + vocab, tail);
    store_converted<T>(tail, gradient<kSoftcap, T>(load_converted<T>(tail), terms));
    std::copy(tail, tail + (vocab - i), grad + i);
  }
}

template <typename S, typename T>
void differentiate_row(
    const void* row,
    void* grad_row,
    int64_t vocab,
    const RowScale& scale,
    const RowSummary& summary,
    const RowGradient& outer) {
  const GradientTerms<T> terms = {
      .max = T(summary.max),
      .inverse_temperature = T(scale.inverse_temperature),
      .log_sum = T(summary.log_sum),
      .softcap = T(scale.softcap),
      .inverse_softcap = scale.softcap == 0 ? T(0) : T(1 / scale.softcap),
      .constant =
          T(-(outer.log_prob + outer.entropy * summary.entropy) * scale.inverse_temperature),
      .slope = T(-outer.entropy * scale.inverse_temperature),
  };
  const S* logits = static_cast<const S*>(row);
  S* grad = static_cast<S*>(grad_row);
  if (scale.softcap != 0)
    differentiate<S, T, true>(logits, grad, vocab, terms);
  else
    differentiate<S, T, false>(logits, grad, vocab, terms);
}

inline constexpr TokenLogProbsKernels token_log_probs_kernels = {
    .summarize_float = summarize_row<float, float>,
    .summarize_double = summarize_row<double, double>,
    .summarize_bfloat16 = summarize_row<BFloat16, float>,
    .summarize_float16 = summarize_row<Float16, float>,
    .differentiate_float = differentiate_row<float, float>,
    .differentiate_double = differentiate_row<double, double>,
    .differentiate_bfloat16 = differentiate_row<BFloat16, float>,
    .differentiate_float16 = differentiate_row<Float16, float>,
};
