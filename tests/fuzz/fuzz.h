// Fuzzing, what every driver here shares: inputs are files by name, made from valid seeds by a generator that gives the
// same bytes on every machine. docs/FUZZING.md says how to run it and what counts as a finding.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace fut::fuzz {

/// splitmix64. The standard library's distributions differ between implementations, so there are none here.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
  }
  size_t below(size_t end) { return next() % end; }  ///< `end` is not 0
  bool chance(int percent) { return below(100) < static_cast<size_t>(percent); }
  template <class List>
  const auto& pick(const List& list) {  ///< not empty
    return list[below(std::size(list))];
  }

 private:
  uint64_t state_;
};

/// The files of one input, name to bytes. A parser may be given fewer than its seeds have.
using Input = std::map<std::string, std::string>;

/// A parser that did what it must not: neither returned nor threw fut::Error, or broke a promise of its header.
struct Finding : std::logic_error {
  using std::logic_error::logic_error;
};

inline void require(bool condition, const std::string& promise) {
  if (!condition) throw Finding(promise);
}

/// Finding if a refusal is not one line, is very long, or does not name `place`.
void check_message(const std::string& message, const std::string& place);

/// For parts of a parser that may refuse without the whole being refused. True if `part` ran through.
template <class Part>
bool may_refuse(const std::string& place, Part&& part) {
  try {
    part();
    return true;
  } catch (const Error& error) {
    check_message(error.what(), place);
    return false;
  }
}

/// One parser under fuzz.
class Target {
 public:
  virtual ~Target() = default;

  /// The files of its inputs. With only one, a seed is that file and may have any name; otherwise a folder.
  virtual std::vector<std::string> files() const = 0;
  virtual std::vector<Input> more_seeds() const { return {}; }

  // Of one input; a sanitizer makes code several times slower.
  virtual double most_seconds() const { return 2; }
  virtual size_t most_bytes() const { return size_t{64} << 20; }

  /// Changes `input`, which is one of the seeds.
  virtual void mutate(Input& input, Random& random, const std::vector<Input>& seeds) const = 0;

  /// Parses the input, which also lies in `folder`, and uses what came out. Throws what the parser throws, or Finding.
  virtual void run(const Input& input, const std::string& folder) const = 0;

  /// What every refusal must name.
  virtual std::string place(const std::string& folder) const { return folder; }
};

/// nullptr if there is none of that name.
std::unique_ptr<Target> make_target(const std::string& name);
std::vector<std::string> target_names();

// One function a driver.
std::unique_ptr<Target> safetensors_target();
std::unique_ptr<Target> index_target();
std::unique_ptr<Target> gguf_target();
std::unique_ptr<Target> config_target();
std::unique_ptr<Target> metadata_target();
std::unique_ptr<Target> tokenizer_json_target();
std::unique_ptr<Target> tokenizer_model_target();
std::unique_ptr<Target> template_target();
std::unique_ptr<Target> prompts_target();

/// A parser that does what its input names: everything that must be noticed (selftest_fuzz.cpp).
std::unique_ptr<Target> selftest_target();
std::vector<std::string> misdeeds();

}  // namespace fut::fuzz
