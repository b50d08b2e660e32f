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

#include "group_subset_halves.h"
#include "group_subset_levels.h"
#include "group_subset_objective.h"
#include "group_subset_ordered.h"

namespace grpo_kernels {
namespace {

using namespace subset;

constexpr int64_t kMeetInTheMiddleSums = int64_t{1} << 21;  // 32 MiB a half
constexpr int64_t kFewSums = 1 << 11;  // meets in the middle within 0.1 ms
constexpr int64_t kMeetInTheMiddleTies = int64_t{1} << 20;
constexpr int64_t kStepsPerNode = 8;
constexpr int64_t kReachWords = int64_t{1} << 24;  // 128 MiB
constexpr int64_t kBoundTableEntries = int64_t{1} << 22;
constexpr int64_t kDeepest = 10'000;  // levels of recursion
constexpr int64_t kLongestBounded = 1 << 13;  // SuffixBounds takes n^2 moves
constexpr int64_t kWindow = 24;  // elements that the anytime search re-decides at a time

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
