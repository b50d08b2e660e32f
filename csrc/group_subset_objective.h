// What `balanced` minimises, and how exact sums are.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "group_subset_search.h"

// Here and in what includes this, a product and a sum round one after the other.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

namespace grpo_kernels::subset {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr double kUnitRoundoff = 0x1p-53;

// Left to right, like Python's sum(): from 0.
inline double sum_in_order(const double* values, const std::vector<int64_t>& indices) {
  double sum = 0;
  for (const int64_t index : indices) sum += values[index];
  return sum;
}

struct Score {
  double deviation;
  double spread;

  bool operator==(const Score&) const = default;
  bool better_than(const Score& other) const {
    return deviation < other.deviation || (deviation == other.deviation && spread > other.spread);
  }
};

constexpr Score kNoScore{kInfinity, -1};

// What `balanced` minimises, and how far computed sums may be from the sums that count.
struct Objective {
  double low, high, target;
  double k;
  bool has_middle;  // an interval without an end has no middle: then all deviations are equal
  bool spread_counts;  // false for (-inf, inf), where the first subset in order wins
  double rounding;  // |sum in order - sum in any other order| is less than this
  double lowest_deviation = 0;  // no subset is closer to the middle than this
  double full_spread = 0;

  Objective(const SubsetQuery& query)
      : low(query.low),
        high(query.high),
        target(0.5 * (query.low + query.high)),
        k(static_cast<double>(query.k)),
        has_middle(std::isfinite(target)),
        spread_counts(!std::isnan(target)) {
    std::vector<double> magnitudes(query.n);
    for (int64_t i = 0; i < query.n; ++i) magnitudes[i] = std::fabs(query.values[i]);
    std::nth_element(
        magnitudes.begin(), magnitudes.begin() + (query.k - 1), magnitudes.end(), std::greater<>());
    double total = 0;
    for (int64_t i = 0; i < query.k; ++i) total += magnitudes[i];
    // Two orders, k additions each, every one off by at most half an ulp of `total`; doubled for
    // the rounding of this bound itself and of the bounds it is added to.
    rounding = 4 * (k + 4) * kUnitRoundoff * total + 64 * std::numeric_limits<double>::denorm_min();
    const auto [smallest, largest] = std::minmax_element(query.values, query.values + query.n);
    full_spread = *largest - *smallest;
  }

  bool accepts(double sum) const {
    const double mean = sum / k;
    return low < mean && mean < high;
  }

  double deviation(double sum) const {
    return has_middle ? std::fabs(sum / k - target) : 0;
  }

  // How far |sum - k target| may be from k deviation(sum).
  double deviation_rounding(double reach) const {
    return 8 * kUnitRoundoff * (k * std::fabs(target) + reach) +
        64 * k * std::numeric_limits<double>::denorm_min();
  }

  // An interval that holds every accepted sum with deviation <= bound, and little else.
  void window(double bound, double* smallest, double* largest) const {
    if (!has_middle) {
      const double least = 64 * k * std::numeric_limits<double>::denorm_min();
      *smallest = k * low - 8 * kUnitRoundoff * std::fabs(k * low) - least;
      *largest = k * high + 8 * kUnitRoundoff * std::fabs(k * high) + least;
      if (std::isnan(*smallest)) *smallest = -kInfinity;
      if (std::isnan(*largest)) *largest = kInfinity;
      return;
    }
    const double reach = k * bound;
    const double slack = deviation_rounding(reach);
    *smallest = k * target - reach - slack;
    *largest = k * target + reach + slack;
    if (std::isnan(*smallest)) *smallest = -kInfinity;
    if (std::isnan(*largest)) *largest = kInfinity;
  }

  // Deviations of accepted sums are at most this.
  double largest_deviation() const {
    if (!has_middle) return kInfinity;
    return (0.5 * high - 0.5 * low) * (1 + 8 * kUnitRoundoff) +
        8 * kUnitRoundoff * (std::fabs(low) + std::fabs(high));
  }

  bool cannot_improve(const Score& score) const {
    return score.deviation == lowest_deviation && (!spread_counts || score.spread == full_spread);
  }
};

// Values of which every sum is exact: multiples of `unit`, k of them fewer than 2^52 of it.
struct ExactGrid {
  double unit = 0;  // 0: sums round

  ExactGrid(const SubsetQuery& query) {
    int lowest_bit = std::numeric_limits<int>::max();
    double largest = 0;
    for (int64_t i = 0; i < query.n; ++i) {
      const double value = std::fabs(query.values[i]);
      if (value == 0) continue;
      largest = std::max(largest, value);
      int exponent;
      const auto mantissa = static_cast<int64_t>(std::ldexp(std::frexp(value, &exponent), 53));
      lowest_bit = std::min(
          lowest_bit, exponent - 53 + std::countr_zero(static_cast<uint64_t>(mantissa)));
    }
    if (largest == 0) {
      unit = 1;
      return;
    }
    int exponent;
    std::frexp(largest, &exponent);
    const int count_bits = std::bit_width(static_cast<uint64_t>(query.k));
    if (exponent - lowest_bit + count_bits <= 52 && lowest_bit > -1000 && exponent < 900)
      unit = std::ldexp(1.0, lowest_bit);
  }
};

// No sum of values has a smaller deviation, whatever the values are.
inline double lowest_possible_deviation(const Objective& objective, double unit) {
  if (!objective.has_middle) return 0;
  const double middle = objective.k * objective.target;
  double lowest = kInfinity;
  if (unit != 0) {
    const double steps = std::floor(middle / unit);
    if (std::fabs(steps) > 0x1p53) return 0;
    for (int offset = -2; offset <= 2; ++offset)
      lowest = std::min(lowest, objective.deviation((steps + offset) * unit));
    return lowest;
  }
  double above = middle, below = middle;
  lowest = objective.deviation(middle);
  for (int step = 0; step < 4; ++step) {
    above = std::nextafter(above, kInfinity);
    below = std::nextafter(below, -kInfinity);
    lowest = std::min({lowest, objective.deviation(above), objective.deviation(below)});
  }
  return lowest;
}

}  // namespace grpo_kernels::subset
