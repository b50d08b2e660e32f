// The search behind grpo_kernels.group_subset. eager.py is its definition.
//
// A subset's mean is its sum, left to right in index order in double, divided by k: the arithmetic
// of Python's sum() before 3.12. Every subset returned, and every comparison between two subsets,
// uses exactly that. Search by real-valued bounds only discards what is worse by more than the
// rounding that separates any two orders of summation (`Objective::rounding`).
#include "group_subset_search.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <random>

#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

namespace grpo_kernels {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kUnitRoundoff = 0x1p-53;
constexpr int64_t kMeetInTheMiddleSums = int64_t{1} << 21;  // 32 MiB a half
constexpr int64_t kFewSums = 1 << 11;  // meets in the middle within 0.1 ms
constexpr int64_t kMeetInTheMiddleTies = int64_t{1} << 20;
constexpr int64_t kStepsPerNode = 8;
constexpr int64_t kReachWords = int64_t{1} << 24;  // 128 MiB
constexpr int64_t kBoundTableEntries = int64_t{1} << 22;
constexpr int64_t kDeepest = 10'000;  // levels of recursion
constexpr int64_t kLongestBounded = 1 << 13;  // SuffixBounds takes n^2 moves
constexpr int64_t kLatticeLevels = 1 << 14;
constexpr int64_t kWindow = 24;  // elements that the anytime search re-decides at a time

// Left to right, like Python's sum(): from 0.
double sum_in_order(const double* values, const std::vector<int64_t>& indices) {
  double sum = 0;
  for (const int64_t index : indices) sum += values[index];
  return sum;
}

// n choose k, or `limit` + 1 when it is more than `limit`.
int64_t binomial_up_to(int64_t n, int64_t k, int64_t limit) {
  k = std::min(k, n - k);
  unsigned __int128 result = 1;
  for (int64_t i = 1; i <= k; ++i) {
    result = result * static_cast<unsigned __int128>(n - k + i) / static_cast<unsigned __int128>(i);
    if (result > static_cast<unsigned __int128>(limit)) return limit + 1;
  }
  return static_cast<int64_t>(result);
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

double lowest_possible_deviation(const Objective& objective, double unit) {
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

struct HalfSum {
  double sum;
  uint64_t members;
};

// A value that may be taken up to `copies` times; how often is counted in members from `shift` on.
struct Item {
  double value;
  int64_t copies;
  int shift;
};

// All sums of up to `most` of the items, by how many were taken, each count's in ascending order.
class HalfSums {
 public:
  HalfSums(const std::vector<Item>& items, int64_t most) : lists_{{{0.0, 0}}, {0, 1}} {
    Lists merged, before;
    int64_t total = 0;
    for (const Item& item : items) {
      total += item.copies;
      for (int64_t copies = 1; copies <= std::min(item.copies, most); ++copies) {
        const Lists& without = copies == 1 ? lists_ : before;
        merge(without, item, copies, std::min(total, most), merged);
        // lists_ without this item is needed for every number of copies.
        if (copies == 1 && item.copies > 1) before = lists_;
        std::swap(lists_, merged);
      }
    }
  }

  int64_t counts() const {
    return lists_.counts();
  }
  const HalfSum* begin(int64_t count) const {
    return lists_.sums.data() + lists_.offsets[count];
  }
  const HalfSum* end(int64_t count) const {
    return lists_.sums.data() + lists_.offsets[count + 1];
  }

 private:
  struct Lists {
    std::vector<HalfSum> sums;
    std::vector<int64_t> offsets;

    int64_t counts() const {
      return static_cast<int64_t>(offsets.size()) - 1;
    }
    int64_t size(int64_t count) const {
      return count >= 0 && count < counts() ? offsets[count + 1] - offsets[count] : 0;
    }
    const HalfSum* at(int64_t count) const {
      return sums.data() + (count >= 0 && count < counts() ? offsets[count] : 0);
    }
  };

  // Adding a constant keeps the order, so each count is a merge of two sorted runs.
  void merge(
      const Lists& without, const Item& item, int64_t copies, int64_t most, Lists& to_lists) {
    to_lists.offsets.assign(most + 2, 0);
    for (int64_t c = 0; c <= most; ++c)
      to_lists.offsets[c + 1] =
          to_lists.offsets[c] + lists_.size(c) + without.size(c - copies);
    to_lists.sums.resize(to_lists.offsets[most + 1]);
    const double value = item.value * static_cast<double>(copies);
    const uint64_t members = static_cast<uint64_t>(copies) << item.shift;
    HalfSum* to = to_lists.sums.data();
    for (int64_t c = 0; c <= most; ++c) {
      const HalfSum* a = lists_.at(c);
      const HalfSum* const a_end = a + lists_.size(c);
      const HalfSum* b = without.at(c - copies);
      const HalfSum* const b_end = b + without.size(c - copies);
      while (a != a_end && b != b_end) {
        const HalfSum with{b->sum + value, b->members | members};
        const bool take_a = a->sum <= with.sum;
        *to++ = take_a ? *a : with;
        a += take_a;
        b += !take_a;
      }
      to = std::copy(a, a_end, to);
      for (; b != b_end; ++b) *to++ = {b->sum + value, b->members | members};
    }
  }

  Lists lists_;
};

// Number of sums that HalfSums would hold, or `limit` + 1 when more than `limit`.
int64_t number_of_sums(const std::vector<Item>& items, int64_t most, int64_t limit) {
  std::vector<int64_t> by_count{1};
  for (const Item& item : items) {
    const int64_t had = static_cast<int64_t>(by_count.size());
    const int64_t has = std::min(had + item.copies, most + 1);
    std::vector<int64_t> next(has, 0);
    int64_t total = 0;
    for (int64_t c = 0; c < has; ++c) {
      for (int64_t copies = 0; copies <= std::min(item.copies, c); ++copies)
        if (c - copies < had) next[c] += by_count[c - copies];
      total += next[c];
    }
    if (total > limit) return limit + 1;
    by_count = std::move(next);
  }
  return std::accumulate(by_count.begin(), by_count.end(), int64_t{0});
}

// The pairs of a member of `first` and one of `second`, k elements in all, by their sum.
class Pairs {
 public:
  Pairs(const HalfSums& first, const HalfSums& second, int64_t k)
      : first_(first), second_(second), k_(k) {}

  struct Closest {
    double distance = kInfinity;
    uint64_t first = 0, second = 0;
  };

  Closest closest_to(double middle) const {
    Closest best;
    for_each_count([&](int64_t c) {
      const HalfSum* a = first_.begin(c);
      const HalfSum* const a_end = first_.end(c);
      const HalfSum* const b_begin = second_.begin(k_ - c);
      const HalfSum* b = second_.end(k_ - c);
      while (a != a_end && b != b_begin) {
        const double difference = a->sum + (b - 1)->sum - middle;
        if (std::fabs(difference) < best.distance)
          best = {std::fabs(difference), a->members, (b - 1)->members};
        const bool too_large = difference > 0;
        b -= too_large;
        a += !too_large;
      }
      return true;
    });
    return best;
  }

  // visit(members of first, members of second) for every pair within `distance` of `middle`, until
  // it returns false.
  template <typename Visit>
  bool visit_within(double middle, double distance, Visit visit) const {
    return for_each_count([&](int64_t c) {
      const HalfSum* const b_begin = second_.begin(k_ - c);
      const HalfSum* b = second_.end(k_ - c);
      for (const HalfSum* a = first_.begin(c); a != first_.end(c); ++a) {
        while (b != b_begin && a->sum + (b - 1)->sum - middle > distance) --b;
        for (const HalfSum* near = b; near != b_begin; --near) {
          if (a->sum + (near - 1)->sum - middle < -distance) break;
          if (!visit(a->members, (near - 1)->members)) return false;
        }
      }
      return true;
    });
  }

 private:
  template <typename Body>
  bool for_each_count(Body body) const {
    const int64_t fewest = std::max<int64_t>(0, k_ - (second_.counts() - 1));
    for (int64_t c = fewest; c <= std::min(k_, first_.counts() - 1); ++c)
      if (!body(c)) return false;
    return true;
  }

  const HalfSums& first_;
  const HalfSums& second_;
  int64_t k_;
};

// `balanced` for one group: the cheapest search that can prove its answer.
class BalancedSearch {
 public:
  BalancedSearch(const SubsetQuery& query)
      : query_(query), n_(query.n), k_(query.k), objective_(query), steps_(query.budget) {}

  Subset run() {
    if (out_of_reach()) return {{}, Proof::whole};
    std::vector<double> distinct(query_.values, query_.values + n_);
    std::sort(distinct.begin(), distinct.end());
    const double largest_magnitude =
        std::max(std::fabs(distinct.front()), std::fabs(distinct.back()));
    distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
    const ExactGrid grid(query_);
    const bool exact = grid.unit != 0;
    objective_.lowest_deviation = lowest_possible_deviation(objective_, grid.unit);

    Proof proof = Proof::none;
    if (objective_.has_middle) {
      proof = exact ? by_classes(distinct, true, kFewSums) : by_halves(kFewSums, kFewSums);
      if (proof == Proof::whole) return {best_indices_, proof};
      const Lattice lattice(query_, distinct, largest_magnitude);
      const int64_t words = std::min(kReachWords, steps_);
      if (lattice.found && Reach::words(n_, k_, lattice.top, true) <= words &&
          by_levels(lattice, distinct, grid))
        return {best_indices_, Proof::whole};
      const int64_t sums = std::min(kMeetInTheMiddleSums, steps_ / 2);
      proof = exact ? by_classes(distinct, true, sums) : by_halves(sums, kMeetInTheMiddleTies);
      if (proof == Proof::whole) return {best_indices_, proof};
      if (!exact) proof = by_classes(distinct, false, sums);
      if (proof == Proof::whole) return {best_indices_, proof};
    }
    const bool enumerable =
        binomial_up_to(n_, k_, query_.enumeration_limit) <= query_.enumeration_limit;
    if ((enumerable || !objective_.has_middle) && in_order(enumerable))
      return {best_indices_, Proof::whole};
    if (proof == Proof::none) anytime();
    if (!best_indices_.empty() && best_.deviation == objective_.lowest_deviation)
      proof = Proof::mean;
    return {best_indices_, proof};
  }

 private:
  void offer(const Score& score, const std::vector<int64_t>& indices) {
    if (score.better_than(best_) ||
        (score == best_ && !best_indices_.empty() && indices < best_indices_)) {
      best_ = score;
      best_indices_ = indices;
    }
  }

  bool offer(const std::vector<int64_t>& indices) {
    const double sum = sum_in_order(query_.values, indices);
    if (!objective_.accepts(sum)) return false;
    double lowest = kInfinity, highest = -kInfinity;
    for (const int64_t index : indices) {
      lowest = std::min(lowest, query_.values[index]);
      highest = std::max(highest, query_.values[index]);
    }
    offer({objective_.deviation(sum), highest - lowest}, indices);
    return true;
  }

  // Even the k largest are too small, or the k smallest too large.
  bool out_of_reach() const {
    std::vector<double> values(query_.values, query_.values + n_);
    std::nth_element(values.begin(), values.begin() + (k_ - 1), values.end());
    const double smallest = std::accumulate(values.begin(), values.begin() + k_, 0.0);
    std::nth_element(values.begin(), values.begin() + (n_ - k_), values.end());
    const double largest = std::accumulate(values.begin() + (n_ - k_), values.end(), 0.0);
    return (largest + objective_.rounding) / objective_.k <= objective_.low ||
        (smallest - objective_.rounding) / objective_.k >= objective_.high;
  }

  // Few levels: which sums can be reached is a table. True if the answer is proved.
  bool by_levels(
      const Lattice& lattice, const std::vector<double>& distinct, const ExactGrid& grid) {
    const Candidates all(query_, lattice, -kInfinity, kInfinity);
    const SuffixBounds bounds(all, k_);
    const Reach reach(all, k_, lattice.top, false);
    // With exact sums on the lattice the smallest deviation is read off the table, otherwise only
    // an upper bound of it.
    const bool exact = grid.unit != 0 && std::fmod(lattice.step, grid.unit) == 0 &&
        on_lattice(lattice);
    double upper = kInfinity;
    for (int64_t level_sum = 0; level_sum <= k_ * lattice.top; ++level_sum) {
      if (!reach.has(0, k_, 0, level_sum)) continue;
      const double sum =
          objective_.k * lattice.base + lattice.step * static_cast<double>(level_sum);
      if (exact) {
        if (objective_.accepts(sum)) upper = std::min(upper, objective_.deviation(sum));
      } else {
        const double error = objective_.k * lattice.residual + 2 * objective_.rounding +
            objective_.deviation_rounding(std::fabs(sum));
        upper = std::min(upper, objective_.deviation(sum) + 2 * error / objective_.k);
      }
    }
    if (exact) {
      if (upper == kInfinity) return true;
      objective_.lowest_deviation = upper;
    } else {
      upper = std::min(upper, objective_.largest_deviation());
    }

    OrderedSearch first(objective_, all, &bounds, lattice, &reach, k_, steps_ / kStepsPerNode / 8);
    first.stopped_at_first = true;
    spend(first, upper);
    if (!first.best_indices.empty()) offer(first.best, first.best_indices);
    if (!first.finished) return false;
    // Nothing found within `upper` while sums round: the bound was of a sum that isn't accepted.
    if (first.best_indices.empty())
      return !exact && upper >= objective_.largest_deviation();
    if (first.best.deviation != objective_.lowest_deviation) return true;
    if (first.best.spread == objective_.full_spread) return true;
    const bool proved = widest(lattice, distinct, first.best.spread);
    offer(first.best, first.best_indices);
    return proved;
  }

  void spend(OrderedSearch& search, double bound) {
    steps_ -= kStepsPerNode * search.run(bound);
  }

  bool on_lattice(const Lattice& lattice) const {
    for (int64_t i = 0; i < n_; ++i)
      if (lattice.base + lattice.step * lattice.levels[i] != query_.values[i]) return false;
    return true;
  }

  // Among subsets of the lowest deviation, the widest and then the first: pairs of a lowest and a
  // highest value from the widest on. A subset with spread `at_least` is known.
  bool widest(const Lattice& lattice, const std::vector<double>& distinct, double at_least) {
    struct Ends {
      double spread, lowest, highest;
    };
    std::vector<Ends> pairs;
    for (size_t a = 0; a < distinct.size(); ++a)
      for (size_t b = a; b < distinct.size(); ++b)
        if (distinct[b] - distinct[a] >= at_least)
          pairs.push_back({distinct[b] - distinct[a], distinct[a], distinct[b]});
    std::stable_sort(pairs.begin(), pairs.end(), [](const Ends& a, const Ends& b) {
      return a.spread > b.spread;
    });
    best_ = kNoScore;
    best_indices_.clear();
    for (size_t i = 0; i < pairs.size(); ++i) {
      if (!best_indices_.empty() && pairs[i].spread < best_.spread) return true;
      const Candidates within(query_, lattice, pairs[i].lowest, pairs[i].highest);
      if (within.size() < k_) continue;
      const SuffixBounds bounds(within, k_);
      const Reach reach(within, k_, lattice.top, true);
      const int64_t steps = steps_ / kStepsPerNode / 8;
      OrderedSearch search(objective_, within, &bounds, lattice, &reach, k_, steps);
      search.stopped_at_first = true;
      spend(search, objective_.lowest_deviation);
      if (!search.best_indices.empty()) offer(search.best, search.best_indices);
      if (!search.finished) return false;
    }
    return true;
  }

  // All sums of either half of the candidates, and the pairs of them next to the middle.
  Proof by_halves(int64_t most_sums, int64_t most_ties) {
    const int64_t half = n_ / 2;
    if (n_ - half > 63) return Proof::none;
    std::vector<Item> first, second;
    for (int64_t i = 0; i < n_; ++i)
      (i < half ? first : second)
          .push_back({query_.values[i], 1, static_cast<int>(i < half ? i : i - half)});
    if (number_of_sums(second, k_, most_sums) > most_sums) return Proof::none;
    std::vector<int64_t> indices(k_);
    return by_pairs(first, second, most_ties, true, [&](uint64_t a, uint64_t b) {
      int64_t* to = indices.data();
      for (; a; a &= a - 1) *to++ = std::countr_zero(a);
      for (; b; b &= b - 1) *to++ = half + std::countr_zero(b);
      offer(indices);
    });
  }

  // The same over how often each distinct value is taken. Of equal candidates the first are in the
  // first list, so for exact sums one list stands for all of the same counts. Where sums round, the
  // order of the candidates moves them a little, and what is proved is the mean.
  Proof by_classes(const std::vector<double>& distinct, bool exact, int64_t most_sums) {
    std::vector<std::vector<int64_t>> members(distinct.size());
    for (int64_t i = 0; i < n_; ++i) {
      const auto at = std::lower_bound(distinct.begin(), distinct.end(), query_.values[i]);
      members[at - distinct.begin()].push_back(i);
    }
    std::vector<size_t> order(distinct.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return members[a].size() > members[b].size();
    });
    std::vector<Item> halves[2];
    std::vector<size_t> classes[2];
    int used_bits[2] = {0, 0};
    for (size_t place = 0; place < order.size(); ++place) {
      const int half = place % 4 == 1 || place % 4 == 2;
      const auto copies = std::min<int64_t>(static_cast<int64_t>(members[order[place]].size()), k_);
      halves[half].push_back({distinct[order[place]], copies, used_bits[half]});
      classes[half].push_back(order[place]);
      used_bits[half] += std::bit_width(static_cast<uint64_t>(copies));
      if (used_bits[half] > 63) return Proof::none;
    }
    for (const auto& half : halves)
      if (number_of_sums(half, k_, most_sums) > most_sums) return Proof::none;
    std::vector<int64_t> indices;
    const auto take = [&](int half, uint64_t counts) {
      for (size_t i = 0; i < classes[half].size(); ++i) {
        const Item& item = halves[half][i];
        const uint64_t mask =
            (uint64_t{1} << std::bit_width(static_cast<uint64_t>(item.copies))) - 1;
        const auto count = static_cast<int64_t>(counts >> item.shift & mask);
        const auto& from = members[classes[half][i]];
        indices.insert(indices.end(), from.begin(), from.begin() + count);
      }
    };
    return by_pairs(
        halves[0], halves[1], kMeetInTheMiddleTies, exact, [&](uint64_t a, uint64_t b) {
          indices.clear();
          take(0, a);
          take(1, b);
          std::sort(indices.begin(), indices.end());
          offer(indices);
        });
  }

  // Offers every pair that the rounding of sums leaves in question. `complete`: what is offered for
  // a pair is the best of all that have its sum.
  template <typename Offer>
  Proof by_pairs(
      const std::vector<Item>& first_items,
      const std::vector<Item>& second_items,
      int64_t most_ties,
      bool complete,
      Offer offer_pair) {
    const HalfSums first(first_items, k_);
    const HalfSums second(second_items, k_);
    const Pairs pairs(first, second, k_);
    const double middle = objective_.k * objective_.target;
    const auto closest = pairs.closest_to(middle);
    const double error = 2 * objective_.rounding +
        objective_.deviation_rounding(
            closest.distance + objective_.k * objective_.largest_deviation());
    if (!std::isfinite(error)) return Proof::none;
    const double farthest = objective_.k * objective_.largest_deviation() + 2 * error;
    if (closest.distance > farthest) return Proof::whole;
    double distance = closest.distance + 2 * error;
    while (true) {
      int64_t ties = 0;
      const bool all = pairs.visit_within(middle, distance, [&](uint64_t a, uint64_t b) {
        if (++ties > most_ties) return false;
        offer_pair(a, b);
        return true;
      });
      if (!all) {
        const bool close = objective_.k * best_.deviation <= closest.distance + 4 * error;
        return !best_indices_.empty() && close ? Proof::mean : Proof::none;
      }
      if (best_indices_.empty()) {
        if (distance >= farthest) return complete ? Proof::whole : Proof::none;
        distance = farthest;
      } else {
        if (objective_.k * best_.deviation + error <= distance)
          return complete ? Proof::whole : Proof::mean;
        distance = objective_.k * best_.deviation + 2 * error;
      }
    }
  }

  // Every subset in order, with what can be ruled out left out. True if finished.
  bool in_order(bool whatever_it_costs) {
    const bool small = (n_ + 1) * (k_ + 1) <= kBoundTableEntries && n_ <= kLongestBounded;
    if ((!small && !whatever_it_costs) || k_ > kDeepest) return false;
    const Lattice none;
    const Candidates all(query_, none, -kInfinity, kInfinity);
    std::optional<SuffixBounds> bounds;
    if (small) bounds.emplace(all, k_);
    const int64_t steps = whatever_it_costs ? std::numeric_limits<int64_t>::max() / kStepsPerNode
                                            : steps_ / kStepsPerNode / 2;
    OrderedSearch search(objective_, all, bounds ? &*bounds : nullptr, none, nullptr, k_, steps);
    spend(search, objective_.largest_deviation());
    if (search.finished) {
      best_ = search.best;
      best_indices_ = search.best_indices;
      return true;
    }
    if (!search.best_indices.empty()) offer(search.best, search.best_indices);
    return false;
  }

  // A good subset without a proof: exchange neighbours in sorted order until the sum crosses the
  // middle, then re-decide some elements at a time exactly, the rest fixed.
  void anytime() {
    std::vector<int64_t> order(n_);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return query_.values[a] < query_.values[b];
    });
    const auto value = [&](int64_t place) { return query_.values[order[place]]; };
    const double middle = objective_.has_middle ? objective_.k * objective_.target : 0;
    std::vector<char> selected;  // by place in `order`
    std::vector<int64_t> indices;
    const auto offer_selected = [&] {
      indices.clear();
      for (int64_t i = 0; i < n_;) {
        int64_t end = i, count = 0;
        for (; end < n_ && value(end) == value(i); ++end) count += selected[end];
        for (int64_t j = 0; j < count; ++j) indices.push_back(order[i + j]);
        i = end;
      }
      std::sort(indices.begin(), indices.end());
      offer(indices);
    };
    // Leaves `selected` at the crossing, with `pinned` places at both ends always selected.
    const auto cross = [&](int64_t pinned) {
      const int64_t count = k_ - 2 * pinned, last_place = n_ - 1 - pinned;
      selected.assign(n_, 0);
      double sum = 0;
      const auto select = [&](int64_t place) {
        selected[place] = 1;
        sum += value(place);
      };
      for (int64_t i = 0; i < pinned; ++i) select(n_ - 1 - i);
      for (int64_t i = 0; i < k_ - pinned; ++i) select(i);
      if (sum > middle) return false;
      offer_selected();
      for (int64_t mover = count - 1; mover >= 0; --mover) {
        const int64_t end = last_place - (count - 1 - mover);
        for (int64_t place = pinned + mover; place < end; ++place) {
          if (sum >= middle) break;
          selected[place] = 0;
          selected[place + 1] = 1;
          sum += value(place + 1) - value(place);
        }
      }
      offer_selected();
      return sum >= middle;
    };
    // With both ends in it the subset is as wide as any.
    const int64_t pinned = k_ > 2 && cross(1) ? 1 : 0;
    if (pinned == 0) cross(0);
    if (!objective_.has_middle) return;

    std::mt19937_64 random(0);
    std::vector<int64_t> in, out, places;
    int64_t without_progress = 0;
    double distance = kInfinity;
    while (steps_ > 0 && without_progress < 256 &&
           (best_indices_.empty() || !objective_.cannot_improve(best_))) {
      in.clear();
      out.clear();
      for (int64_t i = pinned; i < n_ - pinned; ++i) (selected[i] ? in : out).push_back(i);
      places.clear();
      const auto take = [&](std::vector<int64_t>& from) {
        const auto size = static_cast<int64_t>(from.size());
        for (int64_t i = 0; i < std::min(kWindow / 2, size); ++i) {
          const auto other = static_cast<int64_t>(random() % static_cast<uint64_t>(size - i));
          std::swap(from[i], from[i + other]);
          places.push_back(from[i]);
        }
      };
      take(in);
      const auto half = static_cast<int64_t>(places.size());
      take(out);
      std::vector<Item> items[2];
      for (int64_t i = 0; i < static_cast<int64_t>(places.size()); ++i) {
        const int64_t part = i >= half;
        items[part].push_back({value(places[i]), 1, static_cast<int>(i - part * half)});
        selected[places[i]] = 0;
      }
      double fixed = 0;
      for (int64_t i = 0; i < n_; ++i)
        if (selected[i]) fixed += value(i);
      const auto closest = Pairs(HalfSums(items[0], half), HalfSums(items[1], half), half)
                               .closest_to(middle - fixed);
      steps_ -= (4 << (kWindow / 2)) + n_;
      const bool progress = closest.distance < distance;
      without_progress = progress ? 0 : without_progress + 1;
      for (int64_t i = 0; i < static_cast<int64_t>(places.size()); ++i) {
        if (progress)
          selected[places[i]] =
              i < half ? closest.first >> i & 1 : closest.second >> (i - half) & 1;
        else
          selected[places[i]] = i < half;
      }
      if (!progress) continue;
      distance = closest.distance;
      offer_selected();
    }
  }

  const SubsetQuery& query_;
  int64_t n_, k_;
  Objective objective_;
  int64_t steps_;
  Score best_ = kNoScore;
  std::vector<int64_t> best_indices_;
};

std::vector<int64_t> sorted_order(const SubsetQuery& query) {
  std::vector<int64_t> order(query.n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return query.values[a] < query.values[b];
  });
  return order;
}

// Evenly spaced places of the sorted values, rounded half to even like Python's round().
std::vector<int64_t> uniform_indices(const SubsetQuery& query) {
  const std::vector<int64_t> order = sorted_order(query);
  if (query.k == 1) return {order[query.n / 2]};
  std::vector<int64_t> indices(query.k);
  for (int64_t place = 0; place < query.k; ++place) {
    const double exact =
        static_cast<double>(place * (query.n - 1)) / static_cast<double>(query.k - 1);
    indices[place] = order[static_cast<int64_t>(std::nearbyint(exact))];
  }
  return indices;
}

// The i largest and k - i smallest for the i of the largest variance, the smallest such i.
std::vector<int64_t> max_variance_indices(const SubsetQuery& query) {
  const std::vector<int64_t> order = sorted_order(query);
  const double smallest = query.values[order.front()], largest = query.values[order.back()];
  // In units of half the range about its middle, sums of squares neither cancel nor overflow.
  const double middle = 0.5 * smallest + 0.5 * largest;
  const double half_range = 0.5 * largest - 0.5 * smallest;
  const double scale = half_range > 0 ? half_range : 1.0;
  const auto centred = [&](int64_t place) { return (query.values[order[place]] - middle) / scale; };
  const double k = static_cast<double>(query.k);
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < query.k; ++i) {
    const double x = centred(i);
    sum += x;
    squares += x * x;
  }
  int64_t best_count = 0;
  double best_variance = squares - sum * sum / k;
  for (int64_t count = 1; count <= query.k; ++count) {
    const double removed = centred(query.k - count), added = centred(query.n - count);
    sum += added - removed;
    squares += added * added - removed * removed;
    const double variance = squares - sum * sum / k;
    if (variance > best_variance * (1 + 1e-12)) {
      best_variance = variance;
      best_count = count;
    }
  }
  std::vector<int64_t> indices(order.begin(), order.begin() + (query.k - best_count));
  indices.insert(indices.end(), order.end() - best_count, order.end());
  std::sort(indices.begin(), indices.end());
  return indices;
}

}  // namespace

Subset find_subset(const SubsetQuery& query) {
  std::vector<int64_t> indices;
  if (query.n == query.k || query.rule == SubsetRule::first) {
    indices.resize(query.k);
    std::iota(indices.begin(), indices.end(), 0);
  } else if (query.rule == SubsetRule::uniform) {
    indices = uniform_indices(query);
  } else if (query.rule == SubsetRule::max_variance) {
    indices = max_variance_indices(query);
  } else {
    return BalancedSearch(query).run();
  }
  if (query.bounded) {
    const double mean = sum_in_order(query.values, indices) / static_cast<double>(query.k);
    if (!(query.low < mean && mean < query.high)) indices.clear();
  }
  return {indices, Proof::whole};
}

void find_subsets(
    SubsetQuery query,
    const double* values,
    const int64_t* lengths,
    int64_t stride,
    int64_t begin,
    int64_t end,
    int64_t* indices,
    int64_t* proofs) {
  for (int64_t group = begin; group < end; ++group) {
    query.values = values + group * stride;
    query.n = lengths[group];
    const Subset subset = find_subset(query);
    int64_t* to = indices + group * query.k;
    std::fill(to, to + query.k, -1);
    std::copy(subset.indices.begin(), subset.indices.end(), to);
    proofs[group] = static_cast<int64_t>(subset.proof);
  }
}

}  // namespace grpo_kernels
