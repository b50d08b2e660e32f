// Branch and bound over index lists in lexicographic order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "group_subset_levels.h"

namespace grpo_kernels::subset {

// The sums of the r smallest and the r largest of every suffix, for every r.
class SuffixBounds {
 public:
  SuffixBounds(const Candidates& candidates, int64_t k)
      : k_(k), smallest_((candidates.size() + 1) * (k + 1)), largest_(smallest_.size()) {
    const int64_t n = candidates.size();
    std::vector<double> ordered;
    ordered.reserve(n);
    for (int64_t i = n - 1; i >= 0; --i) {
      const double value = candidates.values[i];
      ordered.insert(std::upper_bound(ordered.begin(), ordered.end(), value), value);
      double low = 0, high = 0;
      const int64_t size = n - i;
      for (int64_t r = 1; r <= std::min(k, size); ++r) {
        low += ordered[r - 1];
        high += ordered[size - r];
        smallest_[i * (k + 1) + r] = low;
        largest_[i * (k + 1) + r] = high;
      }
    }
  }

  double smallest(int64_t i, int64_t r) const {
    return smallest_[i * (k_ + 1) + r];
  }
  double largest(int64_t i, int64_t r) const {
    return largest_[i * (k_ + 1) + r];
  }

 private:
  int64_t k_;
  std::vector<double> smallest_, largest_;
};

// Depth first over index lists in lexicographic order. A later list replaces the best so far only
// if its score is strictly better, so of equal ones the first in order stays.
class OrderedSearch {
 public:
  bool stopped_at_first = false;  // stop at the first list with a deviation of at most `bound`
  Score best = kNoScore;
  std::vector<int64_t> best_indices;
  bool finished = false;  // every list was visited or ruled out

  OrderedSearch(
      const Objective& objective,
      const Candidates& candidates,
      const SuffixBounds* bounds,
      const Lattice& lattice,
      const Reach* reach,
      int64_t k,
      int64_t steps)
      : objective_(objective),
        candidates_(candidates),
        bounds_(bounds),
        lattice_(lattice),
        reach_(reach),
        n_(candidates.size()),
        k_(k),
        steps_(steps),
        chosen_(k) {
    if (reach_) {
      lattice_slack_ = objective.rounding +
          16 * kUnitRoundoff * static_cast<double>(k) *
              (std::fabs(lattice.base) + lattice.step * static_cast<double>(lattice.top));
    }
    lowest_value_ = *std::min_element(candidates.values.begin(), candidates.values.end());
    highest_value_ = *std::max_element(candidates.values.begin(), candidates.values.end());
  }

  // Returns the nodes visited.
  int64_t run(double bound) {
    const int64_t had = steps_;
    objective_.window(bound, &smallest_, &largest_);
    bound_ = bound;
    const int need = reach_ && reach_->with_ends() ? 3 : 0;
    if (k_ > n_ || !possible(0, k_, 0, need)) {
      finished = true;
      return 0;
    }
    finished = !descend(0, 0, 0.0, kInfinity, -kInfinity, need) || complete_;
    return had - steps_;
  }

 private:
  // Whether r candidates from i on may complete `sum` to one in the window.
  bool possible(int64_t i, int64_t r, double sum, int need) const {
    if (r == 0) return need == 0;
    if (bounds_) {
      if (sum + bounds_->smallest(i, r) > largest_ + objective_.rounding) return false;
      if (sum + bounds_->largest(i, r) < smallest_ - objective_.rounding) return false;
    }
    if (!reach_) return true;
    const double count = static_cast<double>(r);
    const double rest = sum + count * lattice_.base;
    const double residual = count * lattice_.residual + lattice_slack_;
    const double first = (smallest_ - rest - residual) / lattice_.step;
    const double last = (largest_ - rest + residual) / lattice_.step;
    return reach_->any(
        i,
        r,
        need,
        std::ceil(first - 1e-9 * (1 + std::fabs(first))),
        std::floor(last + 1e-9 * (1 + std::fabs(last))));
  }

  // True: stop the search.
  bool descend(int64_t depth, int64_t start, double sum, double lowest, double highest, int need) {
    const int64_t after = k_ - depth - 1;
    for (int64_t i = start; i < n_ - after; ++i) {
      // An equal value at an earlier place had every completion that this one has.
      if (candidates_.previous_equal[i] >= start) continue;
      if (--steps_ < 0) return true;
      const double value = candidates_.values[i];
      const double next = sum + value;
      int still = need;
      if (need) {
        if (value == lowest_value_) still &= ~1;
        if (value == highest_value_) still &= ~2;
      }
      chosen_[depth] = candidates_.indices[i];
      if (after == 0) {
        if (still || next < smallest_ || next > largest_) continue;
        if (leaf(next, std::min(lowest, value), std::max(highest, value))) return true;
      } else {
        if (!possible(i + 1, after, next, still)) continue;
        if (descend(
                depth + 1, i + 1, next, std::min(lowest, value), std::max(highest, value), still))
          return true;
      }
    }
    return false;
  }

  bool leaf(double sum, double lowest, double highest) {
    if (!objective_.accepts(sum)) return false;
    const Score score{objective_.deviation(sum), highest - lowest};
    if (score.deviation > bound_ || !score.better_than(best)) return false;
    best = score;
    best_indices = chosen_;
    bound_ = score.deviation;
    objective_.window(bound_, &smallest_, &largest_);
    complete_ = stopped_at_first ? score.deviation == objective_.lowest_deviation
                                 : objective_.cannot_improve(score);
    return complete_;
  }

  const Objective& objective_;
  const Candidates& candidates_;
  const SuffixBounds* bounds_;  // null: nothing is ruled out by them
  const Lattice& lattice_;
  const Reach* reach_;
  int64_t n_, k_;
  int64_t steps_;
  double lattice_slack_ = 0;
  double lowest_value_, highest_value_;
  double smallest_ = -kInfinity, largest_ = kInfinity;
  double bound_ = kInfinity;
  bool complete_ = false;
  std::vector<int64_t> chosen_;
};

}  // namespace grpo_kernels::subset
