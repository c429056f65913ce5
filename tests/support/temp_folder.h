// A folder that lives as long as its object, and the check that something is refused with the right words.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace fut::test {

class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "fut_test_XXXXXX").string();
    if (!mkdtemp(pattern.data())) fail("cannot make a folder like ", pattern);
    path_ = pattern;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string file(std::string_view name) const { return path_ + "/" + std::string(name); }

  std::string write(std::string_view name, std::string_view bytes) const {
    std::filesystem::remove(file(name));  // ext4 would flush a file truncated in place: thousands of them take seconds
    std::ofstream out(file(name), std::ios::binary);
    out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    if (!out.flush()) fail("cannot write ", file(name));
    return file(name);
  }

 private:
  std::string path_;
};

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

/// `action` must throw fut::Error with a message of one line that holds every one of `words`.
template <class Action>
void expect_refused(Action&& action, const std::vector<std::string>& words) {
  try {
    action();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    for (const std::string& word : words) {
      EXPECT_NE(message.find(word), std::string::npos) << "\"" << message << "\" lacks \"" << word << "\"";
    }
    return;
  }
  ADD_FAILURE() << "accepted, expected a refusal with \"" << (words.empty() ? "" : words[0]) << "\"";
}

}  // namespace fut::test
