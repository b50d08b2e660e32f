// policy_loss on a run of tokens of one row, vector by vector. Names and formulas are those of
// grpo_kernels/policy_loss/eager.py. Included by isa_kernels.h once per instruction set.
// No lambda and no implicit constructor touches vectors: gcc compiles those for the baseline.

// What an objective sees of each token; 0 where the mask is off.
template <typename T>
struct TokenVecs {
  Vec<T> log_probs, log_ratio, ratio, advantages;
  Mask<T> capped;
};

template <typename T>
struct TokenObjective {
  Vec<T> value, coefficient;
  Mask<T> clipped;
};

// weight * by, and 0 where `by` is 0 though the weight is infinite.
template <typename T>
GRPO_INLINE Vec<T> times(Vec<T> weight, Vec<T> by) {
  const T infinity = std::numeric_limits<T>::infinity();
  const Mask<T> infinite = (weight == infinity) | (weight == -infinity);
  return select<T>((by == Vec<T>{}) & infinite, Vec<T>{}, weight * by);
}

template <typename T>
GRPO_INLINE Mask<T> out_of_range(Vec<T> log_ratio, const PolicyLossOptions<T>& o) {
  return (log_ratio > o.log_high) | (log_ratio < o.log_low);
}

template <typename T>
GRPO_INLINE Vec<T> clip_ratio(const TokenVecs<T>& t, const PolicyLossOptions<T>& o) {
  const Vec<T> below_high = select<T>(t.log_ratio > o.log_high, splat(o.high), t.ratio);
  return select<T>(t.log_ratio < o.log_low, splat(o.low), below_high);
}

// -min(r A, clip(r) A)
struct GrpoObjective {
  template <typename T>
  GRPO_INLINE static TokenObjective<T> of(const TokenVecs<T>& t, const PolicyLossOptions<T>& o) {
    const Mask<T> clipped = ((t.advantages >= Vec<T>{}) & (t.log_ratio > o.log_high)) |
        ((t.advantages < Vec<T>{}) & (t.log_ratio < o.log_low));
    const Vec<T> gain =
        times<T>(select<T>(clipped, clip_ratio(t, o), t.ratio), t.advantages);
    return {-gain, select<T>(clipped | t.capped, Vec<T>{}, -gain), clipped};
  }
};

// -clip(r) A, differentiated through the clip
struct ClippedRatioObjective {
  template <typename T>
  GRPO_INLINE static TokenObjective<T> of(const TokenVecs<T>& t, const PolicyLossOptions<T>& o) {
    const Mask<T> clipped = out_of_range(t.log_ratio, o);
    const Vec<T> gain = times<T>(clip_ratio(t, o), t.advantages);
    return {-gain, select<T>(clipped | t.capped, Vec<T>{}, -gain), clipped};
  }
};

// -sg(clip(r)) A l
struct CispoObjective {
  template <typename T>
  GRPO_INLINE static TokenObjective<T> of(const TokenVecs<T>& t, const PolicyLossOptions<T>& o) {
    const Vec<T> gain = times<T>(clip_ratio(t, o), t.advantages);
    return {-times<T>(t.log_probs, gain), -gain, out_of_range(t.log_ratio, o)};
  }
};

// The inputs of one vector of tokens, selected by the mask, and the masks that follow.
template <typename T>
struct MaskedInputs {
  Mask<T> asked, valid, trained;
  Vec<T> log_probs, old_log_probs, log_ratio;
};

template <typename T>
GRPO_INLINE MaskedInputs<T> select_tokens(
    const PolicyLossTokens<T>& tokens, int64_t at, const PolicyLossOptions<T>& o) {
  MaskedInputs<T> in;
  const Vec<T> old = load(tokens.old_log_probs + at);
  in.asked = tokens.mask ? load_mask<T>(tokens.mask + at) : Mask<T>{} == 0;
  in.valid = in.asked & (old - old == Vec<T>{});  // inf - inf is NaN
  in.log_probs = select<T>(in.valid, load(tokens.log_probs + at), Vec<T>{});
  in.old_log_probs = select<T>(in.valid, old, Vec<T>{});
  in.log_ratio = in.log_probs - in.old_log_probs;
  in.trained = in.valid;
  if (o.has_kl_mask) {
    const Vec<T> divergence = in.log_ratio * in.log_ratio * T(0.5);
    in.trained &= o.torchrl_semantics ? divergence <= o.kl_mask_threshold
                                      : ~(divergence > o.kl_mask_threshold);
  }
  return in;
}

template <typename T>
GRPO_INLINE bool is_capped(const PolicyLossOptions<T>& o) {
  return o.log_ratio_cap != std::numeric_limits<T>::infinity();
}

// Where log_ratio_cap holds the log-ratio; the log-ratio is held in place.
template <typename T>
GRPO_INLINE Mask<T> cap(Vec<T>& log_ratio, const PolicyLossOptions<T>& o) {
  if (!is_capped(o)) return Mask<T>{};
  const Mask<T> above = log_ratio > o.log_ratio_cap, below = log_ratio < -o.log_ratio_cap;
  log_ratio = select<T>(above, splat(o.log_ratio_cap), log_ratio);
  log_ratio = select<T>(below, splat(-o.log_ratio_cap), log_ratio);
  return above | below;
}

template <typename T>
GRPO_INLINE TokenVecs<T> trained_tokens(
    const MaskedInputs<T>& in, Vec<T> advantages, const PolicyLossOptions<T>& o) {
  TokenVecs<T> t;
  t.log_probs = select<T>(in.trained, in.log_probs, Vec<T>{});
  t.log_ratio = select<T>(in.trained, in.log_ratio, Vec<T>{});
  t.capped = cap(t.log_ratio, o);
  t.ratio = exp<T>(t.log_ratio);
  t.advantages = select<T>(in.trained, advantages, Vec<T>{});
  return t;
}

template <typename T>
GRPO_INLINE Mask<T> kl_mask(const MaskedInputs<T>& in, const PolicyLossOptions<T>& o) {
  return o.torchrl_semantics ? in.trained : in.valid;
}

template <typename T>
GRPO_INLINE Vec<T> kl_log_ratio(
    const MaskedInputs<T>& in, Vec<T> target_log_probs, const PolicyLossOptions<T>& o) {
  return select<T>(kl_mask(in, o), target_log_probs - in.log_probs, Vec<T>{});
}

template <typename T>
struct DoublesOf;

template <>
struct DoublesOf<double> {
  Vec<double> parts[1];
};

template <>
struct DoublesOf<float> {
  Vec<double> parts[2];
};

GRPO_INLINE DoublesOf<double> as_doubles(Vec<double> value) {
  return {{value}};
}

GRPO_INLINE DoublesOf<float> as_doubles(Vec<float> value) {
  typedef float HalfVec __attribute__((vector_size(GRPO_VECTOR_BYTES / 2)));
  HalfVec halves[2];
  __builtin_memcpy(halves, &value, sizeof(value));
#if GRPO_VECTOR_BYTES == 64  // gcc 12 splits its own conversion in two
  return {{(Vec<double>)_mm512_cvtps_pd((__m256)halves[0]),
           (Vec<double>)_mm512_cvtps_pd((__m256)halves[1])}};
#else
  return {{__builtin_convertvector(halves[0], Vec<double>),
           __builtin_convertvector(halves[1], Vec<double>)}};
#endif
}

// Doubles: n equal weights then give an effective sample size of exactly n.
template <typename T>
GRPO_INLINE void add_as_doubles(Vec<double>& total, Vec<double>& squares, Vec<T> weights) {
  for (const Vec<double> part : as_doubles(weights).parts) {
    total += part;
    squares += part * part;
  }
}

template <typename T>
GRPO_INLINE double sum_as_double(Vec<T> value) {
  Vec<double> total{};
  for (const Vec<double> part : as_doubles(value).parts) total += part;
  return sum_lanes<double>(total);
}

// Copies of the last, partial vector of a run, the rest masked off.
template <typename T>
struct Tail {
  T log_probs[lanes<T>] = {}, old_log_probs[lanes<T>] = {}, advantages[lanes<T>] = {};
  T ref_log_probs[lanes<T>] = {}, entropy[lanes<T>] = {};
  bool mask[lanes<T>] = {};
  PolicyLossTokens<T> tokens;

  Tail(const PolicyLossTokens<T>& from, int64_t at) {
    const int64_t count = from.count - at;
    const auto copy = [&](T* to, const T* source) {
      if (source) std::copy_n(source + at, count, to);
    };
    copy(log_probs, from.log_probs);
    copy(old_log_probs, from.old_log_probs);
    copy(advantages, from.advantages);
    copy(ref_log_probs, from.ref_log_probs);
    copy(entropy, from.entropy);
    for (int64_t i = 0; i < count; ++i) mask[i] = from.mask ? from.mask[at + i] : true;
    tokens = {count, log_probs, old_log_probs, advantages, mask,
              from.ref_log_probs ? ref_log_probs : nullptr, from.entropy ? entropy : nullptr};
  }
};

template <typename T>
GRPO_INLINE Vec<T> finite_or_zero(Vec<T> value) {
  return select<T>(value - value == Vec<T>{}, value, Vec<T>{});  // inf - inf is NaN
}

// Prompts and padding are whole vectors of masked tokens, half of a usual batch: nothing of them
// is computed.
template <typename T>
GRPO_INLINE bool is_masked(const PolicyLossTokens<T>& tokens, int64_t at) {
  return tokens.mask && none_of<T>(tokens.mask + at);
}

template <typename T>
GRPO_INLINE void store_zeros(T* results, int64_t at) {
  if (results) store(results + at, Vec<T>{});
}

template <typename T>
struct ForwardSums {
  Mask<T> valid{}, trained{}, clipped{};  // each lane counts down
  Vec<T> objective{}, kl_to_ref{}, kl_to_inference{}, entropy{}, entropy_trained{}, kl_approx{};
  Vec<T> largest{};  // starts at -inf
  Vec<double> ess_weights{}, ess_squares{};
};

template <typename T, typename ObjectiveOf>
GRPO_INLINE void forward_vector(
    const PolicyLossTokens<T>& tokens,
    int64_t at,
    const PolicyLossOptions<T>& o,
    const PolicyLossValues<T>& values,
    ForwardSums<T>& sums) {
  const MaskedInputs<T> in = select_tokens(tokens, at, o);
  const TokenVecs<T> t = trained_tokens(in, load(tokens.advantages + at), o);
  const TokenObjective<T> objective = ObjectiveOf::template of<T>(t, o);
  const Vec<T> value = select<T>(in.trained, objective.value + o.poison, Vec<T>{});

  sums.valid += in.valid;
  sums.trained += in.trained;
  sums.objective += value;
  sums.kl_approx -= in.log_ratio;
  sums.clipped += o.torchrl_semantics
      ? (out_of_range(in.log_ratio, o) | (in.log_ratio != in.log_ratio)) & in.valid
      : objective.clipped & in.trained;
  if (o.per_token) store(values.objective + at, value);

  sums.largest = maximum_ignoring_nan<T>(
      select<T>(in.trained, in.log_ratio, sums.largest), sums.largest);
  Vec<T> weight = t.ratio;
  if (is_capped(o)) weight = exp<T>(select<T>(in.trained, in.log_ratio, Vec<T>{}));
  add_as_doubles<T>(
      sums.ess_weights, sums.ess_squares, select<T>(in.trained, weight, Vec<T>{}));

  if (tokens.entropy) {
    const Vec<T> entropy = load(tokens.entropy + at);
    const Vec<T> trained = select<T>(in.trained, entropy, Vec<T>{});
    sums.entropy_trained += trained;
    sums.entropy += select<T>(o.torchrl_semantics ? in.asked : in.valid, entropy, Vec<T>{});
    if (o.entropy_of_pads) sums.entropy += select<T>(in.asked, Vec<T>{}, finite_or_zero<T>(entropy));
    if (values.entropy) store(values.entropy + at, trained * -o.entropy_coeff);
  }
  if (tokens.ref_log_probs) {
    Vec<T> log_ratio = kl_log_ratio(in, load(tokens.ref_log_probs + at), o);
    cap(log_ratio, o);
    const Vec<T> penalty = expm1_minus_x<T>(log_ratio);  // k3
    sums.kl_to_ref += penalty;
    if (values.kl_to_ref) store(values.kl_to_ref + at, penalty * o.kl_to_ref_coeff);
  }
  if (o.to_inference) {
    Vec<T> log_ratio = kl_log_ratio(in, in.old_log_probs, o);
    cap(log_ratio, o);
    const Vec<T> penalty = expm1_minus_x<T>(log_ratio);  // k3
    sums.kl_to_inference += penalty;
    if (values.kl_to_inference)
      store(values.kl_to_inference + at, penalty * o.kl_to_inference_coeff);
  }
}

template <typename T>
GRPO_INLINE int64_t count_lanes(Mask<T> value) {
  int64_t total = 0;
  for (int64_t lane = 0; lane < lanes<T>; ++lane) total -= value[lane];
  return total;
}

template <typename T>
GRPO_INLINE void add_shifted_weights(
    const PolicyLossTokens<T>& tokens,
    int64_t at,
    const PolicyLossOptions<T>& o,
    T base,
    Vec<double>& total,
    Vec<double>& squares) {
  const MaskedInputs<T> in = select_tokens(tokens, at, o);
  const Vec<T> shifted = select<T>(in.trained, in.log_ratio - base, Vec<T>{});
  add_as_doubles<T>(total, squares, select<T>(in.trained, exp<T>(shifted), Vec<T>{}));
}

// The ESS sums relative to the largest log-ratio, for runs whose weights leave the exponent range.
template <typename T>
void ess_sums_from_largest(
    const PolicyLossTokens<T>& tokens, const PolicyLossOptions<T>& o, PolicyLossSums& sums) {
  const T base = T(sums.ess_base);
  Vec<double> total{}, squares{};
  int64_t at = 0;
  for (; at + lanes<T> <= tokens.count; at += lanes<T>)
    add_shifted_weights<T>(tokens, at, o, base, total, squares);
  if (at < tokens.count)
    add_shifted_weights<T>(Tail<T>(tokens, at).tokens, 0, o, base, total, squares);
  sums.ess_weights = sum_lanes<double>(total);
  sums.ess_squares = sum_lanes<double>(squares);
}

// A run without what it doesn't have: the plain objective then compiles to a loop with no branch.
template <typename T>
GRPO_INLINE PolicyLossOptions<T> plain_options(const PolicyLossOptions<T>& o) {
  PolicyLossOptions<T> plain = o;
  plain.per_token = plain.to_inference = plain.has_kl_mask = false;
  plain.log_ratio_cap = std::numeric_limits<T>::infinity();
  return plain;
}

template <typename T>
bool is_plain(const PolicyLossTokens<T>& tokens, const PolicyLossOptions<T>& o) {
  return !tokens.ref_log_probs && !tokens.entropy && !o.per_token && !o.to_inference &&
      !o.has_kl_mask && !is_capped(o);
}

template <typename T, typename ObjectiveOf, bool torchrl, bool plain>
void forward_run(
    const PolicyLossTokens<T>& given,
    const PolicyLossOptions<T>& given_options,
    const PolicyLossValues<T>& values,
    PolicyLossSums& out) {
  PolicyLossTokens<T> tokens = given;
  PolicyLossOptions<T> o = given_options;
  o.torchrl_semantics = torchrl;  // a constant: a mask chosen at run time would leave its register
  if constexpr (plain) {
    o = plain_options(o);
    tokens.ref_log_probs = tokens.entropy = nullptr;
  }
  ForwardSums<T> sums;
  sums.largest = splat(-std::numeric_limits<T>::infinity());
  const int64_t whole = tokens.count / lanes<T> * lanes<T>;
  for (int64_t at = 0; at < whole; at += lanes<T>) {
    if (is_masked(tokens, at)) {
      store_zeros(values.objective, at);
      store_zeros(values.kl_to_ref, at);
      store_zeros(values.kl_to_inference, at);
      store_zeros(values.entropy, at);
      if (o.entropy_of_pads && tokens.entropy)
        sums.entropy += finite_or_zero<T>(load(tokens.entropy + at));
    } else {
      forward_vector<T, ObjectiveOf>(tokens, at, o, values, sums);
    }
  }
  if (whole < tokens.count) {
    const Tail<T> tail(tokens, whole);
    T results[4][lanes<T>] = {};
    const PolicyLossValues<T> to = {
        values.objective ? results[0] : nullptr,
        values.kl_to_ref ? results[1] : nullptr,
        values.kl_to_inference ? results[2] : nullptr,
        values.entropy ? results[3] : nullptr};
    forward_vector<T, ObjectiveOf>(tail.tokens, 0, o, to, sums);
    const auto copy = [&](const T* from, T* into) {
      if (into) std::copy_n(from, tail.tokens.count, into + whole);
    };
    copy(results[0], values.objective);
    copy(results[1], values.kl_to_ref);
    copy(results[2], values.kl_to_inference);
    copy(results[3], values.entropy);
  }
  out.valid = count_lanes<T>(sums.valid);
  out.trained = count_lanes<T>(sums.trained);
  out.clipped = count_lanes<T>(sums.clipped);
  out.objective = sum_as_double<T>(sums.objective);
  out.kl_to_ref = sum_as_double<T>(sums.kl_to_ref);
  out.kl_to_inference = sum_as_double<T>(sums.kl_to_inference);
  out.entropy = sum_as_double<T>(sums.entropy);
  out.entropy_trained = sum_as_double<T>(sums.entropy_trained);
  out.kl_approx = sum_as_double<T>(sums.kl_approx);
  out.ess_weights = sum_lanes<double>(sums.ess_weights);
  out.ess_squares = sum_lanes<double>(sums.ess_squares);

  const T largest = max_lanes<T>(sums.largest);
  // Within these the weights are normal floats and their squares finite doubles.
  const bool in_range = largest > -60 && largest < (sizeof(T) == 4 ? T(88) : T(300));
  if (!in_range && std::isfinite(largest)) {
    out.ess_base = largest;
    ess_sums_from_largest(given, o, out);
  }
}

// Calls run(struct of the objective, whether semantics are TorchRL's), both known by their types.
template <typename Run>
GRPO_INLINE void with_objective(Objective objective, bool torchrl, const Run& run) {
  switch (objective) {
#define GRPO_CASE(name, Struct) \
  case Objective::name:         \
    return torchrl ? run(Struct{}, std::true_type{}) : run(Struct{}, std::false_type{});
    GRPO_TOKEN_OBJECTIVES(GRPO_CASE)
#undef GRPO_CASE
  }
}

template <typename T>
void policy_loss_forward(
    const PolicyLossTokens<T>& tokens,
    const PolicyLossOptions<T>& o,
    const PolicyLossValues<T>& values,
    PolicyLossSums& sums) {
  with_objective(o.objective, o.torchrl_semantics, [&](auto objective, auto torchrl) {
    using ObjectiveOf = decltype(objective);
    if (is_plain(tokens, o))
      return forward_run<T, ObjectiveOf, torchrl, true>(tokens, o, values, sums);
    forward_run<T, ObjectiveOf, torchrl, false>(tokens, o, values, sums);
  });
}

template <typename T>
GRPO_INLINE Vec<T> scale_at(const PolicyLossScale<T>& scale, int64_t at) {
  return scale.upstream ? load(scale.upstream + at) * scale.weight : splat(scale.weight);
}

// By the target's log-prob; the negative is by the policy's.
template <typename T>
GRPO_INLINE Vec<T> kl_gradient(
    const MaskedInputs<T>& in, Vec<T> target_log_probs, Vec<T> scale, const PolicyLossOptions<T>& o) {
  Vec<T> log_ratio = kl_log_ratio(in, target_log_probs, o);
  const Mask<T> capped = cap(log_ratio, o);
  return select<T>(kl_mask(in, o) & ~capped, scale * expm1<T>(log_ratio), Vec<T>{});
}

template <typename T, typename ObjectiveOf>
GRPO_INLINE void backward_vector(
    const PolicyLossTokens<T>& tokens,
    int64_t at,
    const PolicyLossOptions<T>& o,
    const PolicyLossScales<T>& scales,
    const PolicyLossGradients<T>& gradients) {
  const MaskedInputs<T> in = select_tokens(tokens, at, o);
  Vec<T> by_log_probs{};
  if (scales.objective.wanted) {
    const TokenVecs<T> t = trained_tokens(in, load(tokens.advantages + at), o);
    const Vec<T> coefficient = ObjectiveOf::template of<T>(t, o).coefficient + o.poison;
    by_log_probs =
        select<T>(in.trained, scale_at(scales.objective, at) * coefficient, Vec<T>{});
  }
  if (scales.kl_to_ref.wanted) {
    const Vec<T> scale = scale_at(scales.kl_to_ref, at) * o.kl_to_ref_coeff;
    const Vec<T> by_ref = kl_gradient(in, load(tokens.ref_log_probs + at), scale, o);
    by_log_probs -= by_ref;
    if (gradients.ref_log_probs) store(gradients.ref_log_probs + at, by_ref);
  }
  if (scales.kl_to_inference.wanted) {
    const Vec<T> scale = scale_at(scales.kl_to_inference, at) * o.kl_to_inference_coeff;
    by_log_probs -= kl_gradient(in, in.old_log_probs, scale, o);
  }
  if (gradients.log_probs) store(gradients.log_probs + at, by_log_probs);
  if (gradients.entropy) {
    const Vec<T> by_entropy = scale_at(scales.entropy, at) * -o.entropy_coeff;
    store(gradients.entropy + at, select<T>(in.trained, by_entropy, Vec<T>{}));
  }
}

template <typename T, typename ObjectiveOf, bool torchrl>
void backward_run(
    const PolicyLossTokens<T>& tokens,
    const PolicyLossOptions<T>& given_options,
    const PolicyLossScales<T>& given_scales,
    const PolicyLossGradients<T>& gradients) {
  PolicyLossOptions<T> o = given_options;
  o.torchrl_semantics = torchrl;
  const PolicyLossScales<T> scales = given_scales;
  int64_t at = 0;
  for (; at + lanes<T> <= tokens.count; at += lanes<T>) {
    if (is_masked(tokens, at)) {
      store_zeros(gradients.log_probs, at);
      store_zeros(gradients.ref_log_probs, at);
      store_zeros(gradients.entropy, at);
    } else {
      backward_vector<T, ObjectiveOf>(tokens, at, o, scales, gradients);
    }
  }
  if (at == tokens.count) return;

  const Tail<T> tail(tokens, at);
  const int64_t count = tail.tokens.count;
  T upstream[4][lanes<T>] = {}, results[3][lanes<T>] = {};
  PolicyLossScales<T> tail_scales = scales;
  PolicyLossScale<T>* terms[] = {
      &tail_scales.objective, &tail_scales.kl_to_ref, &tail_scales.kl_to_inference, &tail_scales.entropy};
  for (int64_t i = 0; i < 4; ++i) {
    if (!terms[i]->upstream) continue;
    std::copy_n(terms[i]->upstream + at, count, upstream[i]);
    terms[i]->upstream = upstream[i];
  }
  backward_vector<T, ObjectiveOf>(
      tail.tokens,
      0,
      o,
      tail_scales,
      {gradients.log_probs ? results[0] : nullptr,
       gradients.ref_log_probs ? results[1] : nullptr,
       gradients.entropy ? results[2] : nullptr});
  if (gradients.log_probs) std::copy_n(results[0], count, gradients.log_probs + at);
  if (gradients.ref_log_probs) std::copy_n(results[1], count, gradients.ref_log_probs + at);
  if (gradients.entropy) std::copy_n(results[2], count, gradients.entropy + at);
}

template <typename T>
void policy_loss_backward(
    const PolicyLossTokens<T>& tokens,
    const PolicyLossOptions<T>& o,
    const PolicyLossScales<T>& scales,
    const PolicyLossGradients<T>& gradients) {
  with_objective(o.objective, o.torchrl_semantics, [&](auto objective, auto torchrl) {
    backward_run<T, decltype(objective), torchrl>(tokens, o, scales, gradients);
  });
}

constexpr PolicyLossKernels policy_loss_kernels = {
    .forward_float = policy_loss_forward<float>,
    .forward_double = policy_loss_forward<double>,
    .backward_float = policy_loss_backward<float>,
    .backward_double = policy_loss_backward<double>,
};
