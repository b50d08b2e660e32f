// What passes between policy_loss.cpp, which walks over tensors, and policy_loss_kernel.h, which
// does the arithmetic on a run of tokens of one row. The formulas are in
// grpo_kernels/policy_loss/eager.py, under the same names.
#pragma once

#include <cstdint>
#include <limits>

namespace grpo_kernels {

// The functions of a token: their names in TOKEN_OBJECTIVES of grpo_kernels/policy_loss/options.py,
// and their structs in policy_loss_kernel.h.
#define GRPO_TOKEN_OBJECTIVES(X)          \
  X(grpo, GrpoObjective)                  \
  X(clipped_ratio, ClippedRatioObjective) \
  X(cispo, CispoObjective)

enum class Objective {
#define GRPO_NAME(name, Struct) name,
  GRPO_TOKEN_OBJECTIVES(GRPO_NAME)
#undef GRPO_NAME
};

template <typename T>
struct PolicyLossOptions {
  Objective objective;
  bool torchrl_semantics;
  bool per_token;  // aggregation "none"
  bool to_inference;  // the KL penalty to the sampling policy is asked for
  T low, high, log_low, log_high;  // the ratio's range and its logarithm
  T poison;  // NaN if a bound is: it clips nothing, and that must show; else 0
  bool has_kl_mask;
  T kl_mask_threshold;
  T log_ratio_cap;  // infinity: no cap
  T kl_to_ref_coeff, kl_to_inference_coeff, entropy_coeff;
  bool entropy_of_pads;  // finite entropies of masked tokens count in the metric
};

// A run of tokens of one row; an absent input is null. Every pointer has stride 1.
template <typename T>
struct PolicyLossTokens {
  int64_t count;
  const T* log_probs;
  const T* old_log_probs;
  const T* advantages;
  const bool* mask;
  const T* ref_log_probs;
  const T* entropy;
};

// Per-token results of the forward, for aggregation "none"; null otherwise.
template <typename T>
struct PolicyLossValues {
  T* objective = nullptr;
  T* kl_to_ref = nullptr;
  T* kl_to_inference = nullptr;
  T* entropy = nullptr;
};

// Sums over a run of tokens.
struct PolicyLossSums {
  int64_t valid = 0, trained = 0, clipped = 0;
  double objective = 0, kl_to_ref = 0, kl_to_inference = 0;
  double entropy = 0, entropy_trained = 0, kl_approx = 0;
  // sum exp(log_ratio - ess_base) and its squares' sum over the trained tokens
  double ess_base = 0, ess_weights = 0, ess_squares = 0;
};

// Upstream gradient times row weight of one loss term: one number for the run, or one a token.
template <typename T>
struct PolicyLossScale {
  bool wanted = false;
  T weight = 0;  // includes the upstream gradient where that is one number
  const T* upstream = nullptr;
};

template <typename T>
struct PolicyLossScales {
  PolicyLossScale<T> objective, kl_to_ref, kl_to_inference, entropy;
};

// Where the gradients of a run go; null where not wanted.
template <typename T>
struct PolicyLossGradients {
  T* log_probs;
  T* ref_log_probs;
  T* entropy;
};

template <typename T>
using PolicyLossForward = void (*)(
    const PolicyLossTokens<T>&, const PolicyLossOptions<T>&, const PolicyLossValues<T>&, PolicyLossSums&);

template <typename T>
using PolicyLossBackward = void (*)(
    const PolicyLossTokens<T>&,
    const PolicyLossOptions<T>&,
    const PolicyLossScales<T>&,
    const PolicyLossGradients<T>&);

struct PolicyLossKernels {
  PolicyLossForward<float> forward_float;
  PolicyLossForward<double> forward_double;
  PolicyLossBackward<float> backward_float;
  PolicyLossBackward<double> backward_double;
};

}  // namespace grpo_kernels
