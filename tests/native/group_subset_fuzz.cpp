// Compares csrc/group_subset_search.cpp with enumeration on random groups, and runs it on large
// ones, where enumeration is out of reach. Meant to be built with -fsanitize=address,undefined.
// Usage: group_subset_fuzz [seconds] [seed]
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "group_subset_search.h"

using namespace grpo_kernels;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
std::mt19937_64 engine;

int64_t integer(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(engine);
}
double uniform() {
  return std::uniform_real_distribution<double>(0, 1)(engine);
}

double value(int64_t kind) {
  const double extremes[] = {1e308, -1e308, 1.7e308, 5e-324, -0.0, 0.0, 1.0};
  switch (kind) {
    case 0: return uniform();
    case 1: return static_cast<double>(integer(0, 1));
    case 2: return static_cast<double>(integer(0, 15)) / 15;
    case 3: return static_cast<float>(uniform());
    case 4: return extremes[integer(0, 6)];
    case 5: return uniform() * std::pow(10, static_cast<double>(integer(-20, 20)));
    case 6: return static_cast<float>(integer(0, 10)) / 10.0f;
    default: return static_cast<double>(integer(-3, 3)) * 0.1;
  }
}

std::vector<int64_t> enumerate(const SubsetQuery& query) {
  const double target = 0.5 * (query.low + query.high);
  std::vector<int64_t> at(query.k), best;
  std::iota(at.begin(), at.end(), 0);
  double best_deviation = 0, best_spread = 0;
  while (true) {
    double sum = 0, low = kInfinity, high = -kInfinity;
    for (const int64_t i : at) {
      sum += query.values[i];
      low = std::min(low, query.values[i]);
      high = std::max(high, query.values[i]);
    }
    const double mean = sum / static_cast<double>(query.k);
    if (query.low < mean && mean < query.high) {
      const double deviation = std::fabs(mean - target), spread = high - low;
      if (best.empty() || deviation < best_deviation ||
          (deviation == best_deviation && spread > best_spread)) {
        best = at;
        best_deviation = deviation;
        best_spread = spread;
      }
    }
    int64_t place = query.k - 1;
    while (place >= 0 && at[place] == query.n - query.k + place) --place;
    if (place < 0) return best;
    ++at[place];
    for (int64_t next = place + 1; next < query.k; ++next) at[next] = at[next - 1] + 1;
  }
}

SubsetQuery random_query(std::vector<double>& values, int64_t most, int64_t budget) {
  const int64_t n = integer(1, most), k = integer(1, n), kind = integer(0, 7);
  values.resize(n);
  for (double& v : values) v = value(kind);
  SubsetQuery query{values.data(), n, k, SubsetRule::balanced, true, 0.1, 0.9, 0, budget};
  const auto any = [&] { return values[integer(0, n - 1)]; };
  switch (integer(0, 4)) {
    case 0: query.low = any(), query.high = any(); break;
    case 1: query.low = any(), query.high = kInfinity; break;
    case 2: query.low = -kInfinity, query.high = any(); break;
    case 3: query.low = any() - uniform() * 1e-3, query.high = query.low + uniform() * 2e-3; break;
  }
  if (!(query.low < query.high)) query.low = -1, query.high = 1;
  return query;
}

void check(bool ok, const char* what, const SubsetQuery& query) {
  if (ok) return;
  std::printf("%s: k=%ld low=%.17g high=%.17g values:", what, long(query.k), query.low, query.high);
  for (int64_t i = 0; i < query.n; ++i) std::printf(" %.17g", query.values[i]);
  std::printf("\n");
  std::exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
  engine.seed(argc > 2 ? std::atoi(argv[2]) : 0);
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  std::vector<double> values;
  int64_t small = 0, large = 0, unproved = 0;
  for (; elapsed() < 0.6 * seconds; ++small) {
    SubsetQuery query = random_query(values, 12, 1'000'000);
    const auto expected = enumerate(query);
    const Subset found = find_subset(query);
    unproved += found.proof != Proof::whole;
    check(found.proof != Proof::whole || found.indices == expected, "proved, but not", query);
    check(found.proof != Proof::mean || !expected.empty() || found.indices.empty(), "mean", query);
    query.enumeration_limit = 1'000'000;
    const Subset all = find_subset(query);
    check(all.proof == Proof::whole && all.indices == expected, "enumerable, but not", query);
  }
  for (; elapsed() < seconds; ++large) {
    SubsetQuery query = random_query(values, 120, 300'000);
    query.rule = static_cast<SubsetRule>(integer(0, 3));
    const Subset found = find_subset(query);
    if (found.indices.empty()) continue;
    double sum = 0;
    for (const int64_t i : found.indices) sum += query.values[i];
    const double mean = sum / static_cast<double>(query.k);
    check(query.low < mean && mean < query.high, "outside the bounds", query);
    check(static_cast<int64_t>(found.indices.size()) == query.k, "not k", query);
  }
  std::printf(
      "%ld small (%ld unproved without enumeration), %ld large: as enumerated\n",
      long(small),
      long(unproved),
      long(large));
}
