// token_log_probs on the CPU: rows in parallel, each row in the chosen instruction set's kernel.
#include "token_log_probs.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#include "kernel_table.h"

namespace grpo_kernels {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Below this many logits a thread costs more than it saves.
constexpr int64_t logits_per_task = 32768;

// What one dtype of the logits needs: its row kernels and its scalars as double.
struct LogitsType {
  int64_t bytes;
  SummarizeRow summarize;
  DifferentiateRow differentiate;
  double (*read)(const void* at);
  void (*write)(void* at, double value);
};

template <typename S>
LogitsType logits_type(SummarizeRow summarize, DifferentiateRow differentiate) {
  return {
      sizeof(S),
      summarize,
      differentiate,
      [](const void* at) { return double(*static_cast<const S*>(at)); },
      [](void* at, double value) {
        if constexpr (sizeof(S) == 2)
          *static_cast<S*>(at) = S(float(value));
        else
          *static_cast<S*>(at) = S(value);
      },
  };
}

LogitsType logits_type(ScalarType dtype) {
  const TokenLogProbsKernels& k = kernels().token_log_probs;
  switch (dtype) {
    case ScalarType::Float:
      return logits_type<float>(k.summarize_float, k.differentiate_float);
    case ScalarType::Double:
      return logits_type<double>(k.summarize_double, k.differentiate_double);
    case ScalarType::BFloat16:
      return logits_type<c10::BFloat16>(k.summarize_bfloat16, k.differentiate_bfloat16);
    case ScalarType::Half:
      return logits_type<c10::Half>(k.summarize_float16, k.differentiate_float16);
    default:
      STD_TORCH_CHECK(false, "token_log_probs: unsupported dtype of logits");
  }
}

// A [B, T] tensor's values as doubles; absent: one value for all. Any strides.
class Values {
 public:
  Values(const std::optional<Tensor>& tensor, int64_t columns, double otherwise)
      : columns_(columns), otherwise_(otherwise) {
    if (!tensor) return;
    data_ = tensor->const_data_ptr();
    is_double_ = tensor->scalar_type() == ScalarType::Double;
    STD_TORCH_CHECK(
        is_double_ || tensor->scalar_type() == ScalarType::Float, "expected float or double");
    row_stride_ = tensor->stride(0);
    column_stride_ = tensor->stride(1);
  }

  double operator[](int64_t row) const {
    if (!data_) return otherwise_;
    const int64_t at = row / columns_ * row_stride_ + row % columns_ * column_stride_;
    return is_double_ ? static_cast<const double*>(data_)[at]
                      : static_cast<const float*>(data_)[at];
  }

 private:
  const void* data_ = nullptr;
  bool is_double_ = false;
  int64_t columns_, row_stride_ = 0, column_stride_ = 0;
  double otherwise_;
};

// The rows of a [B, T, V] tensor with inner stride 1.
struct Rows {
  char* data;
  int64_t columns, row_bytes, column_bytes;

  Rows(const Tensor& tensor, int64_t bytes)
      : data(static_cast<char*>(tensor.mutable_data_ptr())),
        columns(tensor.size(1)),
        row_bytes(tensor.stride(0) * bytes),
        column_bytes(tensor.stride(1) * bytes) {
    STD_TORCH_CHECK(tensor.stride(2) == 1 || tensor.size(2) < 2, "expected inner stride 1");
  }

  char* operator[](int64_t row) const {
    return data + row / columns * row_bytes + row % columns * column_bytes;
  }
};

// tokens [B, T] int64 and mask [B, T] bool, both contiguous.
struct Selection {
  const int64_t* tokens;
  const bool* mask;

  Selection(const Tensor& tokens, const std::optional<Tensor>& mask)
      : tokens(tokens.const_data_ptr<int64_t>()),
        mask(mask ? mask->const_data_ptr<bool>() : nullptr) {
    STD_TORCH_CHECK(tokens.is_contiguous(), "expected contiguous tokens");
    STD_TORCH_CHECK(!mask || mask->is_contiguous(), "expected a contiguous mask");
  }

  bool operator[](int64_t row) const {
    return !mask || mask[row];
  }
};

void check_tokens(const Selection& selection, int64_t rows, int64_t columns, int64_t vocab) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t token = selection.tokens[row];
    STD_TORCH_CHECK(
        !selection[row] || (token >= 0 && token < vocab),
        "tokens must be in [0, ", vocab, ") wherever the mask is true, got ", token,
        " at row ", row, " of the flattened tokens");
  }
}

Tensor new_like(const Tensor& logits, ScalarType dtype, int64_t rows, int64_t columns) {
  const int64_t sizes[] = {rows, columns};
  return torch::stable::new_empty(logits, {sizes, 2}, dtype);
}

template <typename T>
void store_row(const Tensor& tensor, int64_t row, double value) {
  static_cast<T*>(tensor.mutable_data_ptr())[row] = T(value);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> token_log_probs_forward(
    const Tensor& logits,
    const Tensor& tokens,
    const std::optional<Tensor>& mask,
    const std::optional<Tensor>& temperatures,
    double temperature,
    bool entropy,
    double softcap) {
  const LogitsType type = logits_type(logits.scalar_type());
  const int64_t columns = logits.size(1), vocab = logits.size(2);
  const int64_t rows = logits.size(0) * columns;
  const bool is_double = logits.scalar_type() == ScalarType::Double;
  const ScalarType dtype = is_double ? ScalarType::Double : ScalarType::Float;
  const Tensor log_probs = new_like(logits, dtype, logits.size(0), columns);
  const Tensor entropies = new_like(logits, dtype, entropy ? logits.size(0) : 0, columns);
  const Tensor row_max = new_like(logits, dtype, logits.size(0), columns);
  const Tensor log_sum = new_like(logits, dtype, logits.size(0), columns);
  if (rows == 0) return {log_probs, entropies, row_max, log_sum};

  const Selection selection(tokens, mask);
  check_tokens(selection, rows, columns, vocab);
  const Rows logits_rows(logits, type.bytes);
  const Values temperature_of(temperatures, columns, temperature);
  const auto store = is_double ? store_row<double> : store_row<float>;
  const int64_t grain = std::max<int64_t>(1, logits_per_task / vocab);
  torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      RowSummary summary = {0, 0, 0};
      double log_prob = 0;
      if (selection[row]) {
        const char* at = logits_rows[row];
        const RowScale scale = {1 / temperature_of[row], softcap};
        summary = type.summarize(at, vocab, scale, entropy);
        double logit = type.read(at + selection.tokens[row] * type.bytes);
        if (softcap != 0) logit = softcap * std::tanh(logit / softcap);
        log_prob = (logit - summary.max) * scale.inverse_temperature - summary.log_sum;
      }
      store(log_probs, row, log_prob);
      if (entropy) store(entropies, row, summary.entropy);
      store(row_max, row, summary.max);
      store(log_sum, row, summary.log_sum);
    }
  });
  return {log_probs, entropies, row_max, log_sum};
}

// Logits may be a slice of the vocabulary, tokens then count from its first and may lie outside.
void token_log_probs_backward(
    const std::optional<Tensor>& grad_log_probs,
    const std::optional<Tensor>& grad_entropy,
    const Tensor& logits,
    const Tensor& tokens,
    const std::optional<Tensor>& mask,
    const std::optional<Tensor>& temperatures,
    double temperature,
    double softcap,
    const std::optional<Tensor>& entropies,
    const Tensor& row_max,
    const Tensor& log_sum,
    const Tensor& grad_logits) {
  const LogitsType type = logits_type(logits.scalar_type());
  const int64_t columns = logits.size(1), vocab = logits.size(2);
  const int64_t rows = logits.size(0) * columns;
  if (rows == 0) return;
  const Selection selection(tokens, mask);
  const Rows logits_rows(logits, type.bytes), grad_rows(grad_logits, type.bytes);
  const Values temperature_of(temperatures, columns, temperature);
  const Values log_prob_slope(grad_log_probs, columns, 0), entropy_slope(grad_entropy, columns, 0);
  const Values entropy_of(entropies, columns, 0);
  const Values max_of(row_max, columns, 0), log_sum_of(log_sum, columns, 0);
  const int64_t grain = std::max<int64_t>(1, logits_per_task / vocab);
  torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      char* grad = grad_rows[row];
      if (!selection[row]) {
        std::fill_n(grad, vocab * type.bytes, char(0));
        continue;
      }
      const char* at = logits_rows[row];
      const RowScale scale = {1 / temperature_of[row], softcap};
      const RowSummary summary = {max_of[row], log_sum_of[row], entropy_of[row]};
      const RowGradient outer = {log_prob_slope[row], entropy_slope[row]};

      // The token's own logit is read first: grad may lie over the logits.
      const int64_t token = selection.tokens[row];
      const bool inside = token >= 0 && token < vocab;
      double on_token = 0;
      if (inside) {
        double logit = type.read(at + token * type.bytes), derivative = scale.inverse_temperature;
        if (softcap != 0) {
          const double tanh_logit = std::tanh(logit / softcap);
          logit = softcap * tanh_logit;
          derivative *= 1 - tanh_logit * tanh_logit;
        }
        const double log_p = (logit - summary.max) * scale.inverse_temperature - summary.log_sum;
        const double p = std::exp(log_p);
        const double slope =
            p == 0 ? 0 : p * (outer.log_prob + outer.entropy * (log_p + summary.entropy));
        on_token = (outer.log_prob - slope) * derivative;
      }
      type.differentiate(at, grad, vocab, scale, summary, outer);
      if (inside) type.write(grad + token * type.bytes, on_token);
    }
  });
}

}  // namespace
}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY_FRAGMENT(grpo_kernels_cpp, m) {
  m.def(
      "token_log_probs_forward(Tensor logits, Tensor tokens, Tensor? mask, Tensor? temperatures, "
      "float temperature, bool entropy, float softcap) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "token_log_probs_backward(Tensor? grad_log_probs, Tensor? grad_entropy, Tensor logits, "
      "Tensor tokens, Tensor? mask, Tensor? temperatures, float temperature, float softcap, "
      "Tensor? entropy, Tensor row_max, Tensor log_sum, Tensor(a!) grad_logits) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(grpo_kernels_cpp, CPU, m) {
  m.impl("token_log_probs_forward", TORCH_BOX(&grpo_kernels::token_log_probs_forward));
  m.impl("token_log_probs_backward", TORCH_BOX(&grpo_kernels::token_log_probs_backward));
}
