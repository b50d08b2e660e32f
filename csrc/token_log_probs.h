// One row of logits: its log-sum-exp and entropy, and the gradient of both. The row kernels are
// compiled for each instruction set (token_log_probs_kernel.h) and reached through KernelTable.
#pragma once

#include <cstdint>

namespace grpo_kernels {

// 16-bit floats as the kernels see them: bits to convert.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// z = (c - max(c)) / temperature with c the logits, soft-capped if softcap is not 0.
struct RowScale {
  double inverse_temperature;
  double softcap;
};

struct RowSummary {
  double max;  // of c
  double log_sum;  // log sum e^z
  double entropy;  // log_sum - E[z]
};

struct RowGradient {
  double log_prob;  // d loss / d log_prob
  double entropy;  // d loss / d entropy
};

using SummarizeRow = RowSummary (*)(
    const void* logits, int64_t vocab, const RowScale& scale, bool entropy);

// Writes the gradient of the row, all but the share of log_prob that falls on the token alone.
using DifferentiateRow = void (*)(
    const void* logits,
    void* grad,
    int64_t vocab,
    const RowScale& scale,
    const RowSummary& summary,
    const RowGradient& outer);

// One entry for each dtype of the logits.
struct TokenLogProbsKernels {
  SummarizeRow summarize_float, summarize_double, summarize_bfloat16, summarize_float16;
  DifferentiateRow differentiate_float, differentiate_double, differentiate_bfloat16,
      differentiate_float16;
};

}  // namespace grpo_kernels
