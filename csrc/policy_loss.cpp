// grpo_kernels_cpp::policy_loss_forward and _backward: the walk over rows and runs of tokens, the
// merge of their sums in an order that depends on shapes only, and the final means.
#include "policy_loss.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "kernel_table.h"
#include "strided.h"

namespace grpo_kernels {
namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kRun = 1024;  // tokens a kernel call: seven inputs and outputs stay within L1
constexpr int64_t kGrain = 32;  // runs worth a thread

template <typename T>
constexpr auto forward_kernel() {
  if constexpr (std::is_same_v<T, double>)
    return &PolicyLossKernels::forward_double;
  else
    return &PolicyLossKernels::forward_float;
}

template <typename T>
constexpr auto backward_kernel() {
  if constexpr (std::is_same_v<T, double>)
    return &PolicyLossKernels::backward_double;
  else
    return &PolicyLossKernels::backward_float;
}

// The [B, T] inputs, each with its own dtype and strides.
struct Inputs {
  int64_t rows, columns;
  StridedInput log_probs, old_log_probs, advantages, mask, ref_log_probs, entropy;

  int64_t runs_per_row() const {
    return (columns + kRun - 1) / kRun;
  }
};

// One run's inputs as contiguous T, converted into scratch where they are not that already.
template <typename T>
struct Run {
  int64_t row, begin, count;
  T scratch[5][kRun];
  bool mask_scratch[kRun];

  PolicyLossTokens<T> read(const Inputs& in, int64_t index) {
    row = index / in.runs_per_row();
    begin = index % in.runs_per_row() * kRun;
    count = std::min(kRun, in.columns - begin);
    return {
        count,
        in.log_probs.read<T>(row, begin, count, scratch[0]),
        in.old_log_probs.read<T>(row, begin, count, scratch[1]),
        in.advantages.read<T>(row, begin, count, scratch[2]),
        in.mask.read<bool>(row, begin, count, mask_scratch),
        in.ref_log_probs.read<T>(row, begin, count, scratch[3]),
        in.entropy.read<T>(row, begin, count, scratch[4])};
  }
};

Objective objective_named(const std::string& name) {
#define GRPO_MATCH(objective, Struct) \
  if (name == #objective) return Objective::objective;
  GRPO_TOKEN_OBJECTIVES(GRPO_MATCH)
#undef GRPO_MATCH
  throw std::invalid_argument("policy_loss has no objective " + name);
}

// The hyper-parameters as they come from grpo_kernels/policy_loss/cpu.py.
struct Arguments {
  Objective objective;
  double log_low, log_high;
  std::optional<double> kl_mask_threshold;
  std::string aggregation;
  std::optional<double> kl_to_ref_coeff, kl_to_inference_coeff, entropy_coeff;
  bool torchrl_semantics;
  std::optional<double> log_ratio_cap;
  bool entropy_of_pads;

  template <typename T>
  PolicyLossOptions<T> as() const {
    const double infinity = std::numeric_limits<double>::infinity();
    return {
        objective,
        torchrl_semantics,
        aggregation == "none",
        kl_to_inference_coeff.has_value(),
        T(std::exp(log_low)),
        T(std::exp(log_high)),
        T(log_low),
        T(log_high),
        std::isnan(log_low + log_high) ? std::numeric_limits<T>::quiet_NaN() : T(0),
        kl_mask_threshold.has_value(),
        T(kl_mask_threshold.value_or(infinity)),
        T(log_ratio_cap.value_or(infinity)),
        T(kl_to_ref_coeff.value_or(0)),
        T(kl_to_inference_coeff.value_or(0)),
        T(entropy_coeff.value_or(0)),
        torchrl_semantics && entropy_of_pads};
  }
};

// Row sums, and sums over all rows, of the runs.
struct Totals {
  std::vector<PolicyLossSums> rows;
  PolicyLossSums all;
};

void add(PolicyLossSums& to, const PolicyLossSums& from) {
  to.valid += from.valid;
  to.trained += from.trained;
  to.clipped += from.clipped;
  to.objective += from.objective;
  to.kl_to_ref += from.kl_to_ref;
  to.kl_to_inference += from.kl_to_inference;
  to.entropy += from.entropy;
  to.entropy_trained += from.entropy_trained;
  to.kl_approx += from.kl_approx;
}

Totals merge(const std::vector<PolicyLossSums>& runs, int64_t rows) {
  Totals totals;
  totals.rows.resize(rows);
  const int64_t runs_per_row = rows ? int64_t(runs.size()) / rows : 0;
  double base = -std::numeric_limits<double>::infinity();
  for (const auto& run : runs)
    if (run.ess_weights != 0) base = std::max(base, run.ess_base);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t run = 0; run < runs_per_row; ++run)
      add(totals.rows[row], runs[row * runs_per_row + run]);
    add(totals.all, totals.rows[row]);
  }
  for (const auto& run : runs) {
    if (run.ess_weights == 0) continue;
    const double scale = std::exp(run.ess_base - base);
    totals.all.ess_weights += run.ess_weights * scale;
    totals.all.ess_squares += run.ess_squares * scale * scale;
  }
  return totals;
}

// eager.row_weights for one mask, of which `count` gives each row's tokens.
template <typename T, typename Count>
void write_row_weights(
    const Totals& totals,
    Count count,
    const std::string& aggregation,
    bool torchrl_semantics,
    std::optional<double> normaliser,
    T* to) {
  const auto& rows = totals.rows;
  double denominator = 1;
  if (aggregation != "none") {
    int64_t default_count = 0;
    if (aggregation == "token_mean")
      default_count = count(totals.all);
    else
      for (const auto& row : rows) default_count += torchrl_semantics || count(row) > 0;
    denominator = normaliser.value_or(double(std::max<int64_t>(default_count, 1)));
  }
  for (size_t row = 0; row < rows.size(); ++row) {
    const double row_tokens =
        aggregation == "prompt_mean" ? double(std::max<int64_t>(count(rows[row]), 1)) : 1;
    to[2 * row] = T(1 / row_tokens / denominator);
  }
}

template <typename T>
Tensor scalar(double value, bool as_vector) {
  Tensor out = as_vector ? empty<1>({1}, dtype_of<T>) : empty<0>({}, dtype_of<T>);
  *static_cast<T*>(out.mutable_data_ptr()) = T(value);
  return out;
}

using ForwardResult = std::tuple<
    Tensor, OptionalTensor, OptionalTensor, OptionalTensor,  // losses
    Tensor, Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor,  // metrics
    Tensor>;  // what the backward needs

template <typename T>
ForwardResult forward(
    const Inputs& in, const Arguments& arguments, std::optional<double> normaliser) {
  const PolicyLossOptions<T> options = arguments.as<T>();
  const bool has_ref = in.ref_log_probs.present(), has_entropy = in.entropy.present();
  const bool corrected = !options.torchrl_semantics;
  const bool ref_loss = has_ref && arguments.kl_to_ref_coeff;
  const bool entropy_loss = has_entropy && arguments.entropy_coeff;

  OptionalTensor objective, kl_to_ref, kl_to_inference, entropy;
  PolicyLossValues<T> values;
  if (options.per_token) {
    const auto per_token = [&](OptionalTensor& tensor, T*& pointer) {
      tensor = empty<2>({in.rows, in.columns}, dtype_of<T>);
      pointer = static_cast<T*>(tensor->mutable_data_ptr());
    };
    per_token(objective, values.objective);
    if (corrected && ref_loss) per_token(kl_to_ref, values.kl_to_ref);
    if (corrected && options.to_inference) per_token(kl_to_inference, values.kl_to_inference);
    if (entropy_loss) per_token(entropy, values.entropy);
  }

  const auto kernel = kernels().policy_loss.*forward_kernel<T>();
  std::vector<PolicyLossSums> runs(in.rows * in.runs_per_row());
  torch::stable::parallel_for(0, runs.size(), kGrain, [&](int64_t from, int64_t to) {
    Run<T> run;
    for (int64_t index = from; index < to; ++index) {
      const PolicyLossTokens<T> tokens = run.read(in, index);
      const auto at = [&](T* base) {
        return base ? base + run.row * in.columns + run.begin : nullptr;
      };
      kernel(
          tokens,
          options,
          {at(values.objective), at(values.kl_to_ref), at(values.kl_to_inference), at(values.entropy)},
          runs[index]);
    }
  });
  const Totals totals = merge(runs, in.rows);
  const PolicyLossSums& all = totals.all;

  // Row weights and, last, the bounds as they are: a scheduled one may move before the backward.
  Tensor saved = empty<2>({in.rows + 1, 2}, dtype_of<T>);
  T* row_weights = static_cast<T*>(saved.mutable_data_ptr());
  row_weights[2 * in.rows] = options.log_low;
  row_weights[2 * in.rows + 1] = options.log_high;
  const double positions = double(std::max<int64_t>(in.rows * in.columns, 1));
  const auto trained = [](const PolicyLossSums& sums) { return sums.trained; };
  const auto valid = [](const PolicyLossSums& sums) { return sums.valid; };
  write_row_weights<T>(
      totals, trained, arguments.aggregation, !corrected, normaliser, row_weights);
  if (corrected)
    write_row_weights<T>(
        totals, valid, arguments.aggregation, !corrected, normaliser, row_weights + 1);
  else
    for (int64_t row = 0; row < in.rows; ++row) row_weights[2 * row + 1] = T(1 / positions);

  // sum_b weights[b] sum_t value: `which` is 0 for the objective's weights, 1 for the KL's.
  const auto aggregate = [&](double PolicyLossSums::* sum, int64_t which) {
    double total = 0;
    for (int64_t row = 0; row < in.rows; ++row)
      total += double(row_weights[2 * row + which]) * (totals.rows[row].*sum);
    return total;
  };
  const bool as_vector = arguments.aggregation == "prompt_mean" && !corrected;
  if (!options.per_token) {
    objective = scalar<T>(aggregate(&PolicyLossSums::objective, 0), as_vector);
    if (entropy_loss)
      entropy = scalar<T>(
          -*arguments.entropy_coeff * aggregate(&PolicyLossSums::entropy_trained, 0), as_vector);
  }
  if (ref_loss && !kl_to_ref)
    kl_to_ref = scalar<T>(
        *arguments.kl_to_ref_coeff * aggregate(&PolicyLossSums::kl_to_ref, 1), false);
  if (options.to_inference && !kl_to_inference)
    kl_to_inference = scalar<T>(
        *arguments.kl_to_inference_coeff * aggregate(&PolicyLossSums::kl_to_inference, 1), false);

  const double denominator = corrected ? double(std::max<int64_t>(all.valid, 1)) : positions;
  const auto mean = [&](double sum) { return scalar<T>(sum / denominator, false); };
  // Of no weight at all 0; NaN <= 0 is false, so that a NaN log-ratio stays visible.
  const double ess = all.ess_squares <= 0
      ? 0
      : (all.ess_weights / all.ess_squares) * (all.ess_weights / double(all.trained));
  OptionalTensor mean_entropy, mean_kl_to_ref, mean_kl_to_inference;
  if (has_entropy) mean_entropy = mean(all.entropy);
  if (has_ref) mean_kl_to_ref = mean(all.kl_to_ref);
  if (options.to_inference) mean_kl_to_inference = mean(all.kl_to_inference);
  return {
      *objective, kl_to_ref, kl_to_inference, entropy,
      mean(double(all.clipped)), mean(all.kl_approx), scalar<T>(ess, false),
      mean_entropy, mean_kl_to_ref, mean_kl_to_inference, saved};
}

// The upstream gradient of one loss term: absent, one number, or one a token.
template <typename T>
struct Upstream {
  bool wanted, per_token;
  T number = 0;
  StridedInput tokens;
  int64_t which;  // column of the row weights

  Upstream(const OptionalTensor& gradient, int64_t which) : wanted(gradient.has_value()), which(which) {
    per_token = wanted && gradient->dim() == 2;
    if (!wanted) return;
    tokens = per_token ? StridedInput(*gradient) : StridedInput::of_scalar(*gradient);
    if (!per_token) number = *tokens.read<T>(0, 0, 1, &number);
  }

  PolicyLossScale<T> at(
      const T* row_weights, int64_t row, int64_t begin, int64_t count, T* scratch) const {
    if (!wanted) return {};
    const T weight = row_weights[2 * row + which];
    if (per_token) return {true, weight, tokens.read<T>(row, begin, count, scratch)};
    return {true, number * weight, nullptr};
  }
};

using BackwardResult = std::tuple<OptionalTensor, OptionalTensor, OptionalTensor>;

template <typename T>
BackwardResult backward(
    const OptionalTensor (&upstream)[4],
    const Inputs& in,
    const Arguments& arguments,
    const T* row_weights,
    bool wants_log_probs,
    bool wants_ref_log_probs,
    bool wants_entropy) {
  const PolicyLossOptions<T> options = arguments.as<T>();
  const Upstream<T> by_objective(upstream[0], 0), by_kl_to_ref(upstream[1], 1),
      by_kl_to_inference(upstream[2], 1), by_entropy(upstream[3], 0);

  StridedOutput log_probs(wants_log_probs, in.log_probs, in.rows, in.columns);
  StridedOutput ref_log_probs(
      wants_ref_log_probs && by_kl_to_ref.wanted, in.ref_log_probs, in.rows, in.columns);
  StridedOutput entropy(wants_entropy && by_entropy.wanted, in.entropy, in.rows, in.columns);

  const auto kernel = kernels().policy_loss.*backward_kernel<T>();
  torch::stable::parallel_for(0, in.rows * in.runs_per_row(), kGrain, [&](int64_t from, int64_t to) {
    Run<T> run;
    T upstream_scratch[4][kRun], results[3][kRun];
    for (int64_t index = from; index < to; ++index) {
      const PolicyLossTokens<T> tokens = run.read(in, index);
      const auto scale = [&](const Upstream<T>& term, int64_t slot) {
        return term.at(row_weights, run.row, run.begin, run.count, upstream_scratch[slot]);
      };
      const PolicyLossGradients<T> gradients = {
          log_probs.place<T>(run.row, run.begin, results[0]),
          ref_log_probs.place<T>(run.row, run.begin, results[1]),
          entropy.place<T>(run.row, run.begin, results[2])};
      kernel(
          tokens,
          options,
          {scale(by_objective, 0), scale(by_kl_to_ref, 1), scale(by_kl_to_inference, 2), scale(by_entropy, 3)},
          gradients);
      log_probs.write(run.row, run.begin, run.count, gradients.log_probs);
      ref_log_probs.write(run.row, run.begin, run.count, gradients.ref_log_probs);
      entropy.write(run.row, run.begin, run.count, gradients.entropy);
    }
  });
  return {log_probs.tensor, ref_log_probs.tensor, entropy.tensor};
}

Inputs read_inputs(
    const Tensor& log_probs,
    const Tensor& old_log_probs,
    const Tensor& advantages,
    const OptionalTensor& mask,
    const OptionalTensor& ref_log_probs,
    const OptionalTensor& entropy) {
  const auto strided = [](const OptionalTensor& tensor) {
    return tensor ? StridedInput(*tensor) : StridedInput();
  };
  return {
      log_probs.size(0), log_probs.size(1),
      StridedInput(log_probs), StridedInput(old_log_probs), StridedInput(advantages),
      strided(mask), strided(ref_log_probs), strided(entropy)};
}

// A bound given as a tensor is compared in its own precision, as a scheduled buffer is.
double log1p_of(std::optional<double> bound, const OptionalTensor& tensor, double sign) {
  if (!tensor) return std::log1p(sign * bound.value());
  const double number = sign * StridedInput::of_scalar(*tensor).number();
  switch (tensor->scalar_type()) {
    case ScalarType::Double:
      return std::log1p(number);
    case ScalarType::BFloat16:
      return torch::headeronly::BFloat16(std::log1p(float(number)));
    case ScalarType::Half:
      return torch::headeronly::Half(std::log1p(float(number)));
    default:
      return std::log1p(float(number));
  }
}

ForwardResult policy_loss_forward(
    Tensor log_probs,
    Tensor old_log_probs,
    Tensor advantages,
    OptionalTensor mask,
    OptionalTensor ref_log_probs,
    OptionalTensor entropy,
    std::string objective,
    std::optional<double> clip_low,
    OptionalTensor clip_low_tensor,
    std::optional<double> clip_high,
    OptionalTensor clip_high_tensor,
    std::optional<double> kl_mask_threshold,
    std::string aggregation,
    std::optional<double> kl_to_ref_coeff,
    std::optional<double> kl_to_inference_coeff,
    std::optional<double> entropy_coeff,
    std::string semantics,
    std::optional<double> log_ratio_cap,
    std::optional<double> normaliser,
    OptionalTensor normaliser_tensor,
    bool entropy_of_pads) {
  const Inputs in =
      read_inputs(log_probs, old_log_probs, advantages, mask, ref_log_probs, entropy);
  const Arguments arguments{
      objective_named(objective), log1p_of(clip_low, clip_low_tensor, -1),
      log1p_of(clip_high, clip_high_tensor, 1), kl_mask_threshold, std::move(aggregation),
      kl_to_ref_coeff, kl_to_inference_coeff, entropy_coeff, semantics == "torchrl",
      log_ratio_cap, entropy_of_pads};
  if (normaliser_tensor) normaliser = StridedInput::of_scalar(*normaliser_tensor).number();
  return log_probs.scalar_type() == ScalarType::Double
      ? forward<double>(in, arguments, normaliser)
      : forward<float>(in, arguments, normaliser);
}

BackwardResult policy_loss_backward(
    OptionalTensor grad_objective,
    OptionalTensor grad_kl_to_ref,
    OptionalTensor grad_kl_to_inference,
    OptionalTensor grad_entropy,
    Tensor log_probs,
    Tensor old_log_probs,
    Tensor advantages,
    OptionalTensor mask,
    OptionalTensor ref_log_probs,
    OptionalTensor entropy,
    std::string objective,
    std::optional<double> clip_low,
    OptionalTensor clip_low_tensor,
    std::optional<double> clip_high,
    OptionalTensor clip_high_tensor,
    std::optional<double> kl_mask_threshold,
    std::string aggregation,
    std::optional<double> kl_to_ref_coeff,
    std::optional<double> kl_to_inference_coeff,
    std::optional<double> entropy_coeff,
    std::string semantics,
    std::optional<double> log_ratio_cap,
    std::optional<double> normaliser,
    OptionalTensor normaliser_tensor,
    bool entropy_of_pads,
    Tensor saved,
    bool wants_log_probs,
    bool wants_ref_log_probs,
    bool wants_entropy) {
  const Inputs in =
      read_inputs(log_probs, old_log_probs, advantages, mask, ref_log_probs, entropy);
  const OptionalTensor upstream[] = {
      grad_objective, grad_kl_to_ref, grad_kl_to_inference, grad_entropy};
  const auto run = [&](auto* row_weights) {
    const auto* bounds = row_weights + 2 * in.rows;
    const Arguments arguments{
        objective_named(objective), bounds[0], bounds[1], kl_mask_threshold, std::move(aggregation),
        kl_to_ref_coeff, kl_to_inference_coeff, entropy_coeff, semantics == "torchrl",
        log_ratio_cap, entropy_of_pads};
    return backward(
        upstream, in, arguments, row_weights, wants_log_probs, wants_ref_log_probs, wants_entropy);
  };
  const void* data = saved.const_data_ptr();
  return log_probs.scalar_type() == ScalarType::Double ? run(static_cast<const double*>(data))
                                                       : run(static_cast<const float*>(data));
}

}  // namespace
}  // namespace grpo_kernels

// The options are OPTIONS_SCHEMA of grpo_kernels/policy_loss/options.py.
#define POLICY_LOSS_INPUTS                                                                    \
  "Tensor log_probs, Tensor old_log_probs, Tensor advantages, Tensor? mask, "                 \
  "Tensor? ref_log_probs, Tensor? entropy, str objective, float? clip_low, "                  \
  "Tensor? clip_low_tensor, float? clip_high, Tensor? clip_high_tensor, "                     \
  "float? kl_mask_threshold, str aggregation, float? kl_to_ref_coeff, "                       \
  "float? kl_to_inference_coeff, float? entropy_coeff, str semantics, float? log_ratio_cap, " \
  "float? normaliser, Tensor? normaliser_tensor, bool entropy_of_pads"

STABLE_TORCH_LIBRARY_FRAGMENT(grpo_kernels_cpp, m) {
  m.def("policy_loss_forward(" POLICY_LOSS_INPUTS
        ") -> (Tensor, Tensor?, Tensor?, Tensor?, Tensor, Tensor, Tensor, Tensor?, Tensor?, "
        "Tensor?, Tensor)");
  m.def("policy_loss_backward(Tensor? grad_objective, Tensor? grad_kl_to_ref, "
        "Tensor? grad_kl_to_inference, Tensor? grad_entropy, " POLICY_LOSS_INPUTS
        ", Tensor saved, bool wants_log_probs, bool wants_ref_log_probs, "
        "bool wants_entropy) -> (Tensor?, Tensor?, Tensor?)");
}

STABLE_TORCH_LIBRARY_IMPL(grpo_kernels_cpp, CPU, m) {
  m.impl("policy_loss_forward", TORCH_BOX(&grpo_kernels::policy_loss_forward));
  m.impl("policy_loss_backward", TORCH_BOX(&grpo_kernels::policy_loss_backward));
}
