// examples/ as a stranger meets it: what the program writes, and that the folder configures as a project of its own.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>

#include "futransformer/engine.h"
#include "support/temp_folder.h"

namespace fut {
namespace {

const std::string kModel = FUT_SOURCE_DIR "/models/bard";

/// Exit code of a shell command whose output, both streams, is left in `out`.
int shell(const std::string& command, std::string* out) {
  const test::TempFolder folder;
  const int status = std::system((command + " >" + folder.file("out") + " 2>&1 </dev/null").c_str());
  *out = test::read_file(folder.file("out"));
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

std::string example() {
  return "'" + (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "generate_example").string() + "' ";
}

TEST(Example, WritesWhatTheEngineWrites) {
  Request request;
  request.prompt = "To be, or not";
  request.max_tokens = 64;
  request.sampling.temperature = 0;
  const std::string expected = Engine::load(kModel)->generate({request})[0].text;
  std::string written;
  EXPECT_EQ(shell(example() + "'" + kModel + "' 'To be, or not'", &written), 0) << written;
  EXPECT_EQ(written, expected + "\n");
  EXPECT_GT(expected.size(), 64u);
}

TEST(Example, ReportsWhatWentWrong) {
  std::string written;
  EXPECT_EQ(shell(example(), &written), 2);
  EXPECT_EQ(written.find("usage: "), 0u) << written;
  EXPECT_EQ(shell(example() + "/no/such/model x", &written), 1);
  EXPECT_NE(written.find("/no/such/model"), std::string::npos) << written;
}

TEST(Example, ConfiguresAsAProjectOfItsOwn) {
  const test::TempFolder folder;
  std::string log;
  ASSERT_EQ(shell("cmake -S '" FUT_SOURCE_DIR "/examples' -B '" + folder.path() + "' -G Ninja -DFUT_CUDA=OFF", &log), 0)
      << log;
  const std::string build = test::read_file(folder.file("build.ninja"));
  EXPECT_NE(build.find("generate_example"), std::string::npos);
  // Whoever only uses the library needs none of the packages of command line and tests, and gets none of our warnings.
  EXPECT_EQ(build.find("bench_op.cpp"), std::string::npos);
  EXPECT_EQ(build.find("_test.cpp"), std::string::npos);
  const size_t object = build.find("build CMakeFiles/generate_example.dir/generate.cpp.o");
  ASSERT_NE(object, std::string::npos);
  EXPECT_EQ(build.substr(object, build.find("\n\n", object) - object).find("-Wall"), std::string::npos);
}

}  // namespace
}  // namespace fut
