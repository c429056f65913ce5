// Where an input lies while it is parsed: a folder of links to files that exist in memory alone.
#pragma once

#include <map>
#include <string>

#include "fuzz.h"

namespace fut::fuzz {

/// Empties `folder` and uses it. The links lead to this process's files, so that every child makes its own.
class Scratch {
 public:
  explicit Scratch(const std::string& folder);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  const std::string& path() const { return path_; }

  /// The folder holds exactly the files of `input` afterwards.
  void put(const Input& input);

 private:
  std::string path_;
  std::map<std::string, int> open_;  // descriptors of all files that there ever were
  std::map<std::string, bool> linked_;
};

}  // namespace fut::fuzz
