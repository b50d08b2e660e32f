// Which k of n candidate returns to train on. Plain C++: no torch, so that it builds alone under
// the sanitizers (tests/native/).
#pragma once

#include <cstdint>
#include <vector>

namespace grpo_kernels {

enum class SubsetRule : int64_t { balanced, uniform, first, max_variance };

struct SubsetQuery {
  const double* values;  // n finite numbers
  int64_t n;
  int64_t k;  // 1 <= k <= n
  SubsetRule rule;
  bool bounded;  // whether the mean must lie strictly between low and high
  double low;
  double high;
  int64_t enumeration_limit;  // up to this many subsets the search is finished whatever it costs
  int64_t budget;  // elementary steps, some 2 to 10 ns each, for every other search
};

enum class Proof : int64_t {
  none,  // the budget ran out
  mean,  // no mean is closer to the middle by more than the rounding of a sum; ties are not decided
  whole,  // no subset is better by the rule; if none was found, none is within the bounds
};

struct Subset {
  std::vector<int64_t> indices;  // empty: none found
  Proof proof;
};

Subset find_subset(const SubsetQuery& query);

// Many groups at once on the calling thread: group g has lengths[g] values at values + g * stride.
// indices[g * k ...] is filled with -1 where none was found.
void find_subsets(
    SubsetQuery query,
    const double* values,
    const int64_t* lengths,
    int64_t stride,
    int64_t begin,
    int64_t end,
    int64_t* indices,
    int64_t* proofs);

}  // namespace grpo_kernels
