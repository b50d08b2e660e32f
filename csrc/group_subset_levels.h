// Values on few evenly spaced levels, where a table tells which sums can be reached.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "group_subset_objective.h"

namespace grpo_kernels::subset {

inline constexpr int64_t kLatticeLevels = 1 << 14;

// Values within `residual` of base + step * level, with few levels.
struct Lattice {
  bool found = false;
  double base = 0, step = 0;
  double residual = 0;  // |value - (base + step * level)| is at most this
  std::vector<int32_t> levels;
  int64_t top = 0;  // largest level

  Lattice() = default;

  Lattice(const SubsetQuery& query, const std::vector<double>& distinct, double largest_magnitude) {
    base = distinct.front();
    const double range = distinct.back() - base;
    if (!std::isfinite(range)) return;
    levels.assign(query.n, 0);
    if (range == 0) {
      found = true;
      step = 1;
      return;
    }
    // Euclid's algorithm on the gaps, with a remainder that is small against the range taken as 0.
    const double smallest_step = range / kLatticeLevels;
    const double tolerance = range * 1e-6;
    double divisor = 0;
    for (size_t i = 1; i < distinct.size(); ++i) {
      double a = distinct[i] - distinct[i - 1], b = divisor;
      if (b == 0) {
        divisor = a;
      } else {
        while (b > tolerance) {
          const double remainder = std::fabs(a - b * std::nearbyint(a / b));
          a = b;
          b = remainder;
        }
        divisor = a;
      }
      if (divisor < smallest_step) return;
    }
    top = static_cast<int64_t>(std::nearbyint(range / divisor));
    step = range / static_cast<double>(top);
    for (int64_t i = 0; i < query.n; ++i) {
      const double level = std::nearbyint((query.values[i] - base) / step);
      levels[i] = static_cast<int32_t>(level);
      residual = std::max(residual, std::fabs((query.values[i] - base) - step * level));
    }
    residual += 8 * kUnitRoundoff * (largest_magnitude + range);
    found = static_cast<double>(query.k) * residual < step / 8;
  }
};

// Candidates that the search may use, in index order, and what pruning needs to know of them.
struct Candidates {
  std::vector<double> values;
  std::vector<int64_t> indices;
  std::vector<int32_t> levels;
  std::vector<int32_t> previous_equal;  // position of the last equal value before, or -1

  int64_t size() const {
    return static_cast<int64_t>(values.size());
  }

  // Those with lowest <= value <= highest.
  Candidates(const SubsetQuery& query, const Lattice& lattice, double lowest, double highest) {
    for (int64_t i = 0; i < query.n; ++i) {
      if (query.values[i] < lowest || query.values[i] > highest) continue;
      values.push_back(query.values[i]);
      indices.push_back(i);
      if (lattice.found) levels.push_back(lattice.levels[i]);
    }
    std::vector<int32_t> order(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return values[a] < values[b];
    });
    previous_equal.assign(values.size(), -1);
    for (size_t i = 1; i < order.size(); ++i)
      if (values[order[i]] == values[order[i - 1]]) previous_equal[order[i]] = order[i - 1];
  }
};

// For every suffix of the candidates and every count: which sums of levels can be reached.
// With ends, also whether by a choice that has a lowest and a highest value (bits 1 and 2 of need).
class Reach {
 public:
  static int64_t words(int64_t n, int64_t k, int64_t top, bool with_ends) {
    return (n + 1) * (k + 1) * (k * top / 64 + 1) * (with_ends ? 4 : 1);
  }

  Reach(const Candidates& candidates, int64_t k, int64_t top, bool with_ends)
      : k_(k),
        needs_(with_ends ? 4 : 1),
        stride_(k * top / 64 + 1),
        bits_(words(candidates.size(), k, top, with_ends), 0) {
    const int64_t n = candidates.size();
    double lowest = 0, highest = 0;
    if (with_ends) {
      const auto [a, b] = std::minmax_element(candidates.values.begin(), candidates.values.end());
      lowest = *a;
      highest = *b;
    }
    row(n, 0, 0)[0] = 1;
    for (int64_t i = n - 1; i >= 0; --i) {
      const int64_t level = candidates.levels[i];
      int meets = 0;
      if (with_ends) {
        meets |= candidates.values[i] == lowest ? 1 : 0;
        meets |= candidates.values[i] == highest ? 2 : 0;
      }
      const int64_t fewest = std::max<int64_t>(0, k - i);
      for (int64_t r = fewest; r <= std::min(k, n - i); ++r) {
        const int64_t used = r * top / 64 + 1;
        for (int need = 0; need < needs_; ++need) {
          uint64_t* to = row(i, r, need);
          const uint64_t* skip = row(i + 1, r, need);
          for (int64_t w = 0; w < used; ++w) to[w] = skip[w];
          if (r > 0) or_shifted(to, row(i + 1, r - 1, need & ~meets), level, used);
        }
      }
    }
  }

  // Whether r of the candidates from position i on can have a sum of levels in [first, last].
  bool any(int64_t i, int64_t r, int need, double first, double last) const {
    const double limit = static_cast<double>(stride_ * 64 - 1);
    if (!(first <= last) || first > limit || last < 0) return false;
    const auto from = static_cast<int64_t>(std::max(first, 0.0));
    const auto to = static_cast<int64_t>(std::min(last, limit));
    const uint64_t* bits = row(i, r, need);
    const uint64_t head = ~uint64_t{0} << (from % 64);
    const uint64_t tail = ~uint64_t{0} >> (63 - to % 64);
    if (from / 64 == to / 64) return bits[from / 64] & head & tail;
    if (bits[from / 64] & head) return true;
    for (int64_t w = from / 64 + 1; w < to / 64; ++w)
      if (bits[w]) return true;
    return bits[to / 64] & tail;
  }

  bool has(int64_t i, int64_t r, int need, int64_t sum) const {
    return row(i, r, need)[sum / 64] >> (sum % 64) & 1;
  }

  bool with_ends() const {
    return needs_ == 4;
  }

 private:
  static void or_shifted(uint64_t* to, const uint64_t* from, int64_t shift, int64_t words) {
    const int64_t whole = shift / 64;
    const int part = static_cast<int>(shift % 64);
    if (whole >= words) return;
    if (part == 0) {
      for (int64_t w = whole; w < words; ++w) to[w] |= from[w - whole];
      return;
    }
    to[whole] |= from[0] << part;
    for (int64_t w = whole + 1; w < words; ++w)
      to[w] |= from[w - whole] << part | from[w - whole - 1] >> (64 - part);
  }

  uint64_t* row(int64_t i, int64_t r, int need) {
    return bits_.data() + ((i * (k_ + 1) + r) * needs_ + need) * stride_;
  }
  const uint64_t* row(int64_t i, int64_t r, int need) const {
    return bits_.data() + ((i * (k_ + 1) + r) * needs_ + need) * stride_;
  }

  int64_t k_;
  int needs_;
  int64_t stride_;
  std::vector<uint64_t> bits_;
};

}  // namespace grpo_kernels::subset
