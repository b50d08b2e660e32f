// grpo_kernels_cpp::group_subset and its batched form.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cmath>
#include <tuple>
#include <vector>

#include "group_subset_search.h"

namespace grpo_kernels {

using torch::stable::Tensor;

// values: contiguous double or float [n]. Returns the Proof, then the indices; or only -1 for a
// value that isn't finite.
std::vector<int64_t> group_subset(
    const Tensor& values,
    int64_t k,
    int64_t rule,
    bool bounded,
    double low,
    double high,
    int64_t enumeration_limit,
    int64_t budget) {
  const int64_t n = values.numel();
  std::vector<double> wide;
  const double* data;
  if (values.scalar_type() == torch::headeronly::ScalarType::Float) {
    const auto* narrow = static_cast<const float*>(values.data_ptr());
    wide.assign(narrow, narrow + n);
    data = wide.data();
  } else {
    data = static_cast<const double*>(values.data_ptr());
  }
  for (int64_t i = 0; i < n; ++i)
    if (!std::isfinite(data[i])) return {-1};
  const SubsetQuery query{
      data,
      n,
      k,
      static_cast<SubsetRule>(rule),
      bounded,
      low,
      high,
      enumeration_limit,
      budget};
  Subset subset = find_subset(query);
  subset.indices.insert(subset.indices.begin(), static_cast<int64_t>(subset.proof));
  return subset.indices;
}

// values: contiguous double [groups, n]; lengths: int64 [groups], k <= length <= n.
std::tuple<Tensor, Tensor> group_subsets(
    const Tensor& values,
    const Tensor& lengths,
    int64_t k,
    int64_t rule,
    bool bounded,
    double low,
    double high,
    int64_t enumeration_limit,
    int64_t budget) {
  const int64_t groups = values.size(0), stride = values.size(1);
  Tensor indices = torch::stable::new_empty(lengths, {groups, k});
  Tensor proofs = torch::stable::new_empty(lengths, {groups});
  const SubsetQuery query{
      nullptr, 0, k, static_cast<SubsetRule>(rule), bounded, low, high, enumeration_limit, budget};
  torch::stable::parallel_for(0, groups, 1, [&](int64_t begin, int64_t end) {
    find_subsets(
        query,
        static_cast<const double*>(values.data_ptr()),
        static_cast<const int64_t*>(lengths.data_ptr()),
        stride,
        begin,
        end,
        static_cast<int64_t*>(indices.data_ptr()),
        static_cast<int64_t*>(proofs.data_ptr()));
  });
  return {indices, proofs};
}

}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY_FRAGMENT(grpo_kernels_cpp, m) {
  m.def(
      "group_subset(Tensor values, int k, int rule, bool bounded, float low, float high, "
      "int enumeration_limit, int budget) -> int[]");
  m.def(
      "group_subsets(Tensor values, Tensor lengths, int k, int rule, bool bounded, float low, "
      "float high, int enumeration_limit, int budget) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(grpo_kernels_cpp, CPU, m) {
  m.impl("group_subset", TORCH_BOX(&grpo_kernels::group_subset));
  m.impl("group_subsets", TORCH_BOX(&grpo_kernels::group_subsets));
}
