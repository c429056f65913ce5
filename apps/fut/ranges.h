// Numbers that users give, in flags and in prompt files.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

namespace fut::app {

struct IntegerRange {
  int64_t low, high;
};
struct NumberRange {
  double low, high;
};

inline constexpr int64_t kNoLimit = std::numeric_limits<int32_t>::max();
inline constexpr IntegerRange kMaxTokensRange{-1, kNoLimit}, kTopKRange{-1, kNoLimit};
inline constexpr IntegerRange kSeedRange{0, std::numeric_limits<int64_t>::max()};
inline constexpr NumberRange kTemperatureRange{0, std::numeric_limits<float>::max()}, kFractionRange{0, 1};

bool contains(IntegerRange range, int64_t value);
bool contains(NumberRange range, double value);  ///< NaN is in no range
std::string describe(IntegerRange range);        ///< "an integer from 1 to 16"
std::string describe(NumberRange range);

}  // namespace fut::app
