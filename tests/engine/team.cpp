// Teams of changing size: each thread takes part once, nobody passes a barrier early, and results are seen by all.
#include "team.h"

#include <cstdio>

int main() {
  for (int teams = 0; teams < 20; teams++) {
    Team team;
    for (int64_t round = 0; round < 200; round++) {
      const int64_t wanted = 1 + (round * 7 + teams) % 4;
      std::vector<int64_t> parts(wanted, 0), sums(wanted, 0);
      team.run(wanted, [&](int64_t thread) {
        for (int64_t step = 1; step <= 5; step++) {
          parts[thread] += step * (thread + 1);
          team.wait();
          sums[thread] = 0;
          for (const int64_t part : parts) sums[thread] += part;
          team.wait();
        }
      });
      for (const int64_t sum : sums)
        if (team.threads() != wanted || sum != 15 * wanted * (wanted + 1) / 2) return 1;
    }
  }
  std::puts("right");
}
