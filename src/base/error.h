// The one way this library reports trouble: it throws fut::Error with one line that names what was wrong.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace fut {

/// What went wrong, with the values and the file or tensor concerned, in one line.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// An option that this model or this library cannot take: whoever set it can set it otherwise.
class OptionError : public Error {
 public:
  using Error::Error;
};

/// Streams its arguments into one string: cat("K = ", 96, " is no multiple of ", 64).
template <class... Parts>
std::string cat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(cat(parts...));
}

template <class... Parts>
void require_option(bool condition, const Parts&... parts) {
  if (!condition) [[unlikely]]
    throw OptionError(cat(parts...));
}

}  // namespace fut

/// Always on, in release builds too: FUT_CHECK(rows > 0, "tensor ", name, ": no rows").
#define FUT_CHECK(condition, ...)  \
  do {                             \
    if (!(condition)) [[unlikely]] \
      ::fut::fail(__VA_ARGS__);    \
  } while (0)
