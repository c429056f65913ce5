#include "io/safetensors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <chrono>
#include <csignal>
#include <random>

#include "io/json.h"
#include "support/model_files.h"
#include "support/temp_folder.h"

namespace fut {
namespace {

using test::bytes_of;
using test::counting_bytes;
using test::expect_refused;
using test::safetensors_bytes;
using test::TempFolder;

void expect_file_refused(std::string_view bytes, std::vector<std::string> words) {
  const TempFolder folder;
  const std::string path = folder.write("model.safetensors", bytes);
  words.push_back(path);
  expect_refused([&] { SafetensorsFile file(path); }, words);
}

std::vector<uint8_t> data_of(const StoredTensor& tensor) { return {tensor.data, tensor.data + tensor.size_bytes}; }

int64_t peak_memory_kib() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

TEST(Json, RefusesWhatNlohmannLetsPass_B03) {
  EXPECT_EQ(parse_json(R"({"a":{"a":[{"a":1},{"a":2}]}})", "f").at("a").at("a").size(), 2u);
  expect_refused([] { parse_json(R"({"a":1,"b":2,"a":3})", "f.json"); }, {"f.json", "duplicate", "\"a\""});
  expect_refused([] { parse_json(R"({"a":1,"\u0061":3})", "f.json"); }, {"duplicate"});
  expect_refused([] { parse_json("{} x", "f.json"); }, {"f.json", "byte 4 of 4"});
  using namespace std::string_view_literals;
  for (const auto after_nul : {"{}\0"sv, "{}\0\0"sv, "{}\0 not JSON"sv}) {
    expect_refused([&] { parse_json(after_nul, "f.json"); }, {"f.json", "byte 3 of ", "NUL"});
  }
  expect_refused([] { parse_json("\"\xff\"", "f.json"); }, {"invalid JSON"});
  expect_refused([] { parse_json("[1e999]", "f.json"); }, {"number"});
  expect_refused([] { parse_json("", "f.json"); }, {"ends too early"});
  const auto nested = [](size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_TRUE(parse_json(nested(64), "f").is_array());
  expect_refused([&] { parse_json(nested(65), "f.json"); }, {"nested deeper than 64"});
  expect_refused([&] { parse_json(std::string(1'000'000, '['), "f.json"); }, {"nested"});
}

/// A header of 100 MB may name two million tensors; looking through all of them at each took hours.
TEST(Json, ObjectsInAnObjectTakeLinearTime_B01) {
  std::string text = "{";
  for (int i = 0; i < 100'000; ++i) text += cat(i ? "," : "", "\"t", i, "\":{}");
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(parse_json(text + "}", "f").size(), 100'000u);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

TEST(Json, CapsTheFile) {
  const TempFolder folder;
  const std::string path = folder.write("a.json", "[1, 2]");
  EXPECT_EQ(parse_json_file(path, 6).size(), 2u);
  expect_refused([&] { parse_json_file(path, 5); }, {path, "6 bytes", "at most 5"});
}

TEST(MappedFile, RefusesWhatIsNoFile) {
  const TempFolder folder;
  expect_refused([&] { MappedFile file(folder.path()); }, {folder.path(), "directory"});
  expect_refused([&] { MappedFile file(folder.file("none")); }, {folder.file("none"), "No such file"});
  expect_refused([] { MappedFile file("/dev/zero"); }, {"/dev/zero", "device"});
  ASSERT_EQ(mkfifo(folder.file("fifo").c_str(), 0600), 0);
  expect_refused([&] { MappedFile file(folder.file("fifo")); }, {folder.file("fifo"), "FIFO"});
  EXPECT_EQ(MappedFile(folder.write("empty", "")).size(), 0u);
  EXPECT_EQ(MappedFile(folder.write("three", "abc")).text(), "abc");
}

TEST(Safetensors, RefusesAbsurdHeaderLengths_B01) {
  const int64_t before = peak_memory_kib();
  expect_file_refused("", {"0 bytes"});
  expect_file_refused(std::string(7, '\0'), {"7 bytes"});
  expect_file_refused(bytes_of(~uint64_t{0}), {"header of 18446744073709551615 bytes"});
  expect_file_refused(bytes_of(uint64_t{132'095'296}) + "{}", {"header of 132095296 bytes"});
  expect_file_refused(bytes_of(~uint64_t{7}) + "{}", {"header of"});
  expect_file_refused(bytes_of(uint64_t{100'000'000}) + "{}", {"truncated", "100000008", "10"});
  expect_file_refused(safetensors_bytes("[]", ""), {", expected"});
  expect_file_refused(safetensors_bytes(R"({"a":)", ""), {"JSON ends too early"});
  EXPECT_LT(peak_memory_kib() - before, 50 * 1024);
}

TEST(Safetensors, RefusesSizesThatDisagree_B02) {
  const std::string whole =
      test::SafetensorsBuilder().add("a", "F32", "[2]", "01234567").add("b", "U8", "[3]", "abc").bytes();
  const auto size = std::to_string(whole.size());
  expect_file_refused(whole.substr(0, whole.size() - 4), {"truncated", size, std::to_string(whole.size() - 4)});
  expect_file_refused(whole.substr(0, 40), {"truncated", "40"});
  expect_file_refused(whole + "x", {"1 bytes after the last tensor", size, std::to_string(whole.size() + 1)});
}

struct Refusal {
  const char* header;
  size_t data_bytes;
  std::vector<std::string> words;
};

TEST(Safetensors, RefusesBadEntries_B03) {
  const Refusal refusals[] = {
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
       8,
       {"duplicate", "\"a\""}},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
       4,
       {"overlap", "tensor b"}},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}})",
       12,
       {"tensor b", "bytes of no tensor"}},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8, {"bytes of no tensor"}},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"z":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}})",
       8,
       {"tensor z", "overlap"}},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4, {"reversed"}},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4, {"F32", "[2]", "8 bytes", "4"}},
      {R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]}})", 4, {"overflows"}},
      {R"({"a":{"dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,4]}})", 4, {"9223372036854775808"}},
      {R"({"a":{"dtype":"F32","shape":[18446744073709551617],"data_offsets":[0,4]}})", 4, {"expected an integer"}},
      {R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,0]}})", 0, {"-1"}},
      {R"({"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})", 1, {"1.0"}},
      {R"({"a":{"dtype":"U8","shape":["1"],"data_offsets":[0,1]}})", 1, {"expected an integer"}},
      {R"({"a":{"dtype":"U8","shape":1,"data_offsets":[0,1]}})", 1, {"shape is 1, expected"}},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})", 1, {"data_offsets is [0,1,2], expected"}},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[-1,0]}})", 1, {"data_offsets"}},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551615]}})", 1, {"data_offsets"}},
      {R"({"a":{"dtype":"U8","shape":[9223372036854775807],"data_offsets":[0,9223372036854775807]}})",
       1,
       {"truncated"}},
      {R"({"a":{"dtype":7,"shape":[1],"data_offsets":[0,1]}})", 1, {"dtype is 7, expected"}},
      {R"({"a":"b"})", 0, {"tensor a: is \"b\", expected"}},
      {R"(["a"])", 0, {"header is [\"a\"], expected"}},
      {R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1, {"no \"dtype\""}},
      {R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", 1, {"no \"shape\""}},
      {R"({"a":{"dtype":"U8","shape":[1]}})", 1, {"no \"data_offsets\""}},
      {R"({"a":[]})", 0, {"tensor a", "expected an object"}},
      {R"({"a\nb":[]})", 0, {"a\\x0ab"}},
      {R"({"__metadata__":{"format":1}})", 0, {"__metadata__", "format"}},
      {R"({"__metadata__":[]})", 0, {"__metadata__"}},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.header);
    expect_file_refused(safetensors_bytes(refusal.header, counting_bytes(refusal.data_bytes)), refusal.words);
  }
}

TEST(Safetensors, AcceptsOddButLegalFiles_B03_B06) {
  const TempFolder folder;
  EXPECT_TRUE(SafetensorsFile(folder.write("a", safetensors_bytes("{}", ""))).tensors().empty());
  const SafetensorsFile only_metadata(
      folder.write("b", safetensors_bytes(cat(R"({"__metadata__":{"format":"pt"}})", std::string(64, ' ')), "")));
  EXPECT_EQ(only_metadata.metadata().at("format"), "pt");

  const char* const backwards = R"({"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},)"
                                R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  const SafetensorsFile unsorted(folder.write("c", safetensors_bytes(backwards, counting_bytes(8))));
  ASSERT_EQ(unsorted.tensors().size(), 2u);
  EXPECT_EQ(unsorted.tensors()[0].info.name, "a");
  EXPECT_EQ(data_of(unsorted.tensors()[0]), (std::vector<uint8_t>{0, 1, 2, 3}));
  EXPECT_EQ(data_of(unsorted.tensors()[1]), (std::vector<uint8_t>{4, 5, 6, 7}));

  const SafetensorsFile odd(folder.write("d", test::SafetensorsBuilder()
                                                  .add("marker", "U8", "[0]", "")
                                                  .add("scalar", "F32", "[]", "1234")
                                                  .add("caf\\u00e9 \xc3\xa9", "F4", "[3, 5]", "12345678")
                                                  .bytes()));
  ASSERT_EQ(odd.tensors().size(), 3u);
  EXPECT_EQ(odd.tensors()[0].size_bytes, 0);
  EXPECT_TRUE(odd.tensors()[1].info.shape.empty());
  EXPECT_EQ(odd.tensors()[2].info.name, "caf\xc3\xa9 \xc3\xa9");
  EXPECT_EQ(odd.tensors()[2].info.type, "F4");  // not known here: kept by name
}

TEST(SafetensorsWriter, WritesWhatTheReaderReads) {
  const TempFolder folder;
  const std::string path = folder.file("model.safetensors");
  SafetensorsWriter writer(path);
  writer.declare("codes", "U8", {3});
  writer.declare("scales", "F16", {1, 2});
  writer.declare("marker", "U8", {0});
  writer.declare("shape", "I64", {2});
  const std::vector<int64_t> shape = {7, 9};
  writer.write("shape", shape.data(), 16);
  writer.write("codes", "abc", 3);
  EXPECT_FALSE(std::filesystem::exists(path));
  writer.write("scales", "ABCD", 4);
  writer.write("marker", nullptr, 0);
  writer.finish();
  EXPECT_FALSE(std::filesystem::exists(path + ".partial"));

  const SafetensorsFile file(path);
  ASSERT_EQ(file.tensors().size(), 4u);
  EXPECT_EQ(file.metadata().at("format"), "pt");
  const StoredTensor& first = file.tensors()[0];
  EXPECT_EQ(first.info.name, "shape");
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first.data) % 8, 0u);
  for (const StoredTensor& tensor : file.tensors()) {
    const std::string data(tensor.data, tensor.data + tensor.size_bytes);
    if (tensor.info.name == "codes") {
      EXPECT_EQ(data, "abc");
    }
    if (tensor.info.name == "scales") {
      EXPECT_EQ(data, "ABCD");
      EXPECT_EQ(tensor.info.shape, (std::vector<int64_t>{1, 2}));
    }
  }
}

TEST(SafetensorsWriter, RefusesMisuseAndLeavesNothingBehind) {
  const TempFolder folder;
  const std::string path = folder.file("model.safetensors");
  {
    SafetensorsWriter writer(path);
    writer.declare("a", "F32", {1});
    writer.declare("b", "F32", {1});
    expect_refused([&] { writer.declare("a", "F32", {1}); }, {path, "tensor a", "twice"});
    expect_refused([&] { writer.declare("c", "F12", {1}); }, {"F12"});
    expect_refused([&] { writer.declare("c", "F32", {-1}); }, {"-1"});
    expect_refused([&] { writer.declare("c", "F32", {int64_t{1} << 62}); }, {"overflows"});
    expect_refused([&] { writer.write("c", "1234", 4); }, {"tensor c", "not declared"});
    expect_refused([&] { writer.write("a", "123", 3); }, {"tensor a", "3 bytes", "4"});
    writer.write("a", "1234", 4);
    expect_refused([&] { writer.write("a", "1234", 4); }, {"written twice"});
    expect_refused([&] { writer.declare("c", "F32", {1}); }, {"after the first"});
    expect_refused([&] { writer.finish(); }, {"tensor b", "never written"});
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  SafetensorsWriter nowhere(folder.file("no/model.safetensors"));
  expect_refused([&] { nowhere.finish(); }, {folder.file("no/model.safetensors"), "No such file"});
}

TEST(SafetensorsWriter, NamesTheFileThatCannotGrow_J04) {
  const TempFolder folder;
  const std::string path = folder.file("model.safetensors");
  const std::string data(1 << 20, 'x');
  // A size limit stands for a full disk: the write that crosses it is short, the next fails.
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 100'000;
  SafetensorsWriter writer(path);
  writer.declare("a", "U8", {1 << 20});
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  expect_refused([&] { writer.write("a", data.data(), 1 << 20); }, {path, "cannot write", "File too large"});
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, handler);
}

/// Opens what may be broken and touches every byte of every tensor.
bool survives(const std::string& path) {
  try {
    const SafetensorsFile file(path);
    unsigned sum = 0;
    for (const StoredTensor& tensor : file.tensors()) {
      for (int64_t i = 0; i < tensor.size_bytes; ++i) sum += tensor.data[i];
    }
    return sum != ~0u;
  } catch (const Error&) {
    return false;
  }
}

TEST(Safetensors, SurvivesTruncationAndFlippedBytes) {
  const TempFolder folder;
  const std::string whole = test::SafetensorsBuilder()
                                .add("__metadata__x", "F32", "[2,3]", counting_bytes(24))
                                .add("b", "BF16", "[4]", counting_bytes(8))
                                .add("c", "U8", "[0,7]", "")
                                .add("d", "I64", "[]", counting_bytes(8))
                                .bytes();
  ASSERT_TRUE(survives(folder.write("f", whole)));
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_FALSE(survives(folder.write("f", whole.substr(0, length)))) << length;
  }
  std::mt19937 random(1);
  int accepted = 0;
  for (int trial = 0; trial < 4000; ++trial) {
    std::string flipped = whole;
    for (int flips = 1 + static_cast<int>(random() % 3); flips > 0; --flips) {
      flipped[random() % flipped.size()] ^= static_cast<char>(1 + random() % 255);
    }
    accepted += survives(folder.write("f", flipped));
  }
  EXPECT_GT(accepted, 100);   // flips in the data change numbers only
  EXPECT_LT(accepted, 3000);  // flips in the header are mostly noticed
}

}  // namespace
}  // namespace fut
