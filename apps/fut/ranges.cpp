#include "ranges.h"

#include "base/error.h"

namespace fut::app {

bool contains(IntegerRange range, int64_t value) { return value >= range.low && value <= range.high; }
bool contains(NumberRange range, double value) { return value >= range.low && value <= range.high; }

std::string describe(IntegerRange range) {
  if (range.high >= kNoLimit) return cat("an integer of at least ", range.low, " (and at most ", range.high, ")");
  return cat("an integer from ", range.low, " to ", range.high);
}

std::string describe(NumberRange range) {
  if (range.high >= kTemperatureRange.high) return cat("a finite number of at least ", range.low);
  return cat("a number from ", range.low, " to ", range.high);
}

}  // namespace fut::app
