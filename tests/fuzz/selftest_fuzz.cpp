// Whether the program notices what it is there for: a parser with every fault that it looks for.
#include <cstdlib>
#include <cstring>
#include <limits>

#include "fuzz.h"

namespace fut::fuzz {
namespace {

volatile int g_sink = 0;

int recurse(int depth) {
  volatile char frame[1024] = {};
  return depth < g_sink ? frame[0] : recurse(depth + 1) + frame[1];
}

void misbehave(const std::string& what, const std::string& folder) {
  if (what == "refuses") fail(folder, ": not today");
  if (what == "other exception") throw std::out_of_range(folder);
  if (what == "broken promise") require(false, "always broken");
  if (what == "two lines") fail(folder, ": a\nb");
  if (what == "long message") fail(folder, std::string(10'000, 'x'));
  if (what == "nameless message") fail("something is wrong");
  if (what == "reads beyond") {
    const std::string text(64, 'x');
    g_sink = text.data()[std::strlen(text.c_str()) + 32];
  }
  if (what == "index beyond") g_sink = std::vector<int>(3)[static_cast<size_t>(g_sink) + 3];
  if (what == "overflow") g_sink = std::numeric_limits<int>::max() + (g_sink + 1);
  if (what == "recursion") g_sink = recurse(0);
  if (what == "hang") {
    while (g_sink != 1) g_sink = 0;
  }
  if (what == "memory") g_sink = std::string(size_t{200} << 20, 'x')[static_cast<size_t>(g_sink)];
  if (what == "leak") g_sink = *new int(1);
}

class SelftestTarget final : public Target {
 public:
  std::vector<std::string> files() const override { return {"what"}; }
  double most_seconds() const override { return 0.5; }
  void mutate(Input&, Random&, const std::vector<Input>&) const override {}
  void run(const Input& input, const std::string& folder) const override { misbehave(input.at("what"), folder); }
};

}  // namespace

std::vector<std::string> misdeeds() {
  return {"other exception", "broken promise", "two lines", "long message", "nameless message", "reads beyond",
          "index beyond",    "overflow",       "recursion", "hang",         "memory",           "leak"};
}

std::unique_ptr<Target> selftest_target() { return std::make_unique<SelftestTarget>(); }

}  // namespace fut::fuzz
