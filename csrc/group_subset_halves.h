// Meeting in the middle: all sums of two halves, and the pairs of them next to a given sum.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "group_subset_objective.h"

namespace grpo_kernels::subset {

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

}  // namespace grpo_kernels::subset
