#include <gtest/gtest.h>
#include <sys/stat.h>

#include <limits>
#include <random>

#include "io/checkpoint.h"
#include "io/json.h"
#include "support/model_files.h"
#include "support/temp_folder.h"

namespace fut {
namespace {

namespace fs = std::filesystem;
using test::bytes_of;
using test::expect_refused;
using test::SafetensorsBuilder;
using test::TempFolder;

using Floats = std::vector<float>;

constexpr char kConfig[] = R"({"model_type":"llama"})";

/// A folder with config.json, to which a test adds the rest.
class HfFolderTest : public testing::Test {
 protected:
  HfFolderTest() { folder_.write("config.json", kConfig); }

  std::unique_ptr<Checkpoint> open() const { return Checkpoint::open(folder_.path()); }

  void write_model(const SafetensorsBuilder& tensors) const { folder_.write("model.safetensors", tensors.bytes()); }

  void write_index(std::string_view weight_map) const {
    folder_.write("model.safetensors.index.json", cat(R"({"metadata":{},"weight_map":)", weight_map, "}"));
  }

  /// Tensor "a" = 1 in the first file, "b" = 2 in the second.
  void write_shards(std::string_view first, std::string_view second) const {
    folder_.write(first, one("a", 1).bytes());
    folder_.write(second, one("b", 2).bytes());
    write_index(cat(R"({"a":")", first, R"(","b":")", second, "\"}"));
  }

  static SafetensorsBuilder one(std::string_view name, float value) {
    return SafetensorsBuilder().add(name, "F32", "[1]", bytes_of(value));
  }

  void expect_open_refused(const std::vector<std::string>& words) const {
    expect_refused([&] { open(); }, words);
  }

  TempFolder folder_;
};

TEST_F(HfFolderTest, OpensOneFile) {
  folder_.write("generation_config.json", R"({"eos_token_id":[1,2]})");
  write_model(one("a", 1.5f));
  const auto model = open();
  EXPECT_EQ(model->path(), folder_.path());
  EXPECT_EQ(model->config_json(), kConfig);
  EXPECT_EQ(model->generation_config_json(), R"({"eos_token_id":[1,2]})");
  EXPECT_EQ(model->tensors().size(), 1u);
  EXPECT_EQ(model->find("b"), nullptr);
  ASSERT_NE(model->find("a"), nullptr);
  EXPECT_EQ(model->find("a")->type, "F32");
  EXPECT_EQ(model->find("a")->shape, (std::vector<int64_t>{1}));
  EXPECT_EQ(model->read_f32("a"), Floats{1.5f});
  int64_t size = 0;
  const uint8_t* const raw = model->raw("a", &size);
  EXPECT_EQ(std::string(raw, raw + size), bytes_of(1.5f));
  expect_refused([&] { model->read_f32("b"); }, {folder_.path(), "tensor b not found"});
  EXPECT_EQ(model->chat_template(), "");
  expect_refused([&] { model->tokenizer(); }, {"tokenizer.json"});
}

TEST_F(HfFolderTest, NamesTheFileThatIsMissingOrBroken) {
  expect_open_refused({folder_.path(), "model.safetensors", "model.safetensors.index.json"});
  expect_refused([&] { Checkpoint::open(folder_.file("none")); }, {folder_.file("none"), "No such file"});
  write_model(one("a", 1));
  expect_refused([&] { Checkpoint::open(folder_.file("model.safetensors")); }, {"config.json"});
  folder_.write("generation_config.json", "[]");
  expect_open_refused({folder_.file("generation_config.json"), "expected a JSON object"});
  fs::remove(folder_.file("generation_config.json"));
  folder_.write("config.json", "{");
  expect_open_refused({folder_.file("config.json"), "JSON ends too early"});
  folder_.write("config.json", "3");
  expect_open_refused({folder_.file("config.json"), "expected a JSON object"});
  fs::remove(folder_.file("config.json"));
  expect_open_refused({folder_.file("config.json"), "No such file"});
}

TEST_F(HfFolderTest, OpensShardsOfAnyName_B07) {
  for (const auto& [first, second] : {std::pair{"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"},
                                      std::pair{"model.safetensors-00001-of-00002.safetensors", "..odd name"}}) {
    write_shards(first, second);
    const auto model = open();
    EXPECT_EQ(model->read_f32("a"), Floats{1});
    EXPECT_EQ(model->read_f32("b"), Floats{2});
    EXPECT_EQ(model->find("b")->file, folder_.file(second));
  }
}

TEST_F(HfFolderTest, ListsEveryMissingShard_B07) {
  folder_.write("s1", one("a", 1).bytes());
  write_index(R"({"a":"s1","b":"s2","c":"s3","d":"s3"})");
  expect_open_refused({folder_.path(), "2 of the 3 files", "incomplete download", "s2, s3"});
}

TEST_F(HfFolderTest, RefusesAnIndexThatDisagreesWithItsShards_B07) {
  write_shards("s1", "s2");
  write_index(R"({"a":"s2","b":"s2"})");
  expect_open_refused({"index.json", "tensor a", "s2"});
  write_index(R"({"a":"s1","b":"s2","c":"s2"})");
  expect_open_refused({"tensor c", "s2"});
  write_index(R"({"a":"s1","b":"s2"})");
  folder_.write("s2", one("a", 2).add("b", "U8", "[0]", "").bytes());
  expect_open_refused({folder_.file("s2"), "tensor a", folder_.file("s1")});
  folder_.write("s2", "");
  expect_open_refused({folder_.file("s2"), "0 bytes"});
}

TEST_F(HfFolderTest, LoadsATensorThatTheIndexForgot_B07) {
  write_shards("s1", "s2");
  folder_.write("s2", one("b", 2).add("c", "F32", "[]", bytes_of(3.0f)).bytes());
  EXPECT_EQ(open()->read_f32("c"), Floats{3});
}

TEST_F(HfFolderTest, RefusesBrokenIndexes_B07) {
  const std::pair<const char*, const char*> indexes[] = {{"{}", "is {}, expected"},
                                                         {"[5]", "is [5], expected"},
                                                         {"[", "ends too early"},
                                                         {R"({"weight_map":[6]})", "weight_map is [6], expected"},
                                                         {R"({"weight_map":{}})", "weight_map is empty"},
                                                         {R"({"weight_map":{"a":1}})", "tensor a is 1, expected"},
                                                         {R"({"weight_map":{"a":"s1","a":"s2"}})", "duplicate"}};
  for (const auto& [index, words] : indexes) {
    folder_.write("model.safetensors.index.json", index);
    expect_open_refused({folder_.file("model.safetensors.index.json"), words});
  }
}

TEST_F(HfFolderTest, RefusesShardsWithoutAnIndex_B07) {
  write_shards("m-1.safetensors", "m-2.safetensors");
  fs::remove(folder_.file("model.safetensors.index.json"));
  expect_open_refused({folder_.path(), "index.json", "2 other"});
}

TEST_F(HfFolderTest, RefusesNamesThatLeaveTheFolder_B08) {
  const TempFolder other;
  other.write("model.safetensors", one("a", 1).bytes());
  const std::string climb = "../" + fs::path(other.path()).filename().string() + "/model.safetensors";
  ASSERT_TRUE(fs::exists(folder_.file(climb)));
  for (const std::string& name : {climb, other.file("model.safetensors"), "sub/../" + climb, std::string("..\\\\\\\\x"),
                                  std::string(""), std::string("."), std::string(".."), std::string(5000, 'x'),
                                  std::string("a\\u0000b.safetensors"), std::string("a\\nb")}) {
    write_index(cat(R"({"tensor.of.index":")", name, "\"}"));
    SCOPED_TRACE(name);
    expect_open_refused({"index.json", "tensor.of.index", "expected the name of a file"});
  }
}

TEST_F(HfFolderTest, RefusesFifosAndDirectoriesAtOnce_B08) {
  write_shards("s1", "s2");
  fs::remove(folder_.file("s2"));
  ASSERT_EQ(mkfifo(folder_.file("s2").c_str(), 0600), 0);
  expect_open_refused({folder_.file("s2"), "FIFO"});
  fs::create_directory(folder_.file("model.safetensors"));
  expect_open_refused({folder_.file("model.safetensors"), "directory"});
}

TEST_F(HfFolderTest, FollowsSymlinksAsInTheHubsCache_B08) {
  const TempFolder cache;
  fs::create_directories(cache.file("blobs"));
  fs::create_directories(cache.file("snapshots/main"));
  cache.write("blobs/1", kConfig);
  cache.write("blobs/2", one("a", 4).bytes());
  fs::create_symlink("../../blobs/1", cache.file("snapshots/main/config.json"));
  fs::create_symlink("../../blobs/2", cache.file("snapshots/main/model.safetensors"));
  EXPECT_EQ(Checkpoint::open(cache.file("snapshots/main"))->read_f32("a"), Floats{4});
  fs::remove(cache.file("blobs/2"));  // a dangling link is a missing file
  expect_refused([&] { Checkpoint::open(cache.file("snapshots/main")); }, {"model.safetensors: cannot open"});
}

TEST_F(HfFolderTest, ReadsEveryTensorByItsOwnType_B10) {
  folder_.write("config.json", R"({"model_type":"llama","torch_dtype":"float16"})");
  write_model(SafetensorsBuilder()
                  .add("odd", "U8", "[1]", "x")  // what follows is unaligned
                  .add("f32", "F32", "[2]", bytes_of(Floats{-0.1f, 3e38f}))
                  .add("f16", "F16", "[2]", bytes_of(std::vector<uint16_t>{0x3c00, 0x8001}))
                  .add("bf16", "BF16", "[2]", bytes_of(std::vector<uint16_t>{0x3f80, 0xc040}))
                  .add("f64", "F64", "[3]", bytes_of(std::vector<double>{-0.5, 1e300, 1e-300}))
                  .add("i32", "I32", "[1]", "1234")
                  .add("q4", "Q4_0", "[32]", "1234"));
  const auto model = open();
  EXPECT_EQ(model->read_f32("f32"), (Floats{-0.1f, 3e38f}));
  EXPECT_EQ(model->read_f32("f16"), (Floats{1, -0x1p-24f}));
  EXPECT_EQ(model->read_f32("bf16"), (Floats{1, -3}));
  EXPECT_EQ(model->read_f32("f64"), (Floats{-0.5f, std::numeric_limits<float>::infinity(), 0}));
  expect_refused([&] { model->read_f32("i32"); }, {"tensor i32", "I32"});
  expect_refused([&] { model->read_f32("odd"); }, {"tensor odd", "U8"});
  expect_refused([&] { model->read_f32("q4"); }, {"tensor q4", "Q4_0"});
}

TEST_F(HfFolderTest, ReadsFp8OnlyWithItsScale_B10) {
  const std::string codes = "\x38\x40\xb8\x7e\x01\x80";  // 1, 2, -1, 448, 2^-9, -0
  const auto with_scale = [&](const char* type, const char* shape, const std::string& scale) {
    write_model(
        SafetensorsBuilder().add("x.weight", "F8_E4M3", "[2,3]", codes).add("x.weight_scale", type, shape, scale));
    return open()->read_f32("x.weight");
  };
  const Floats by_row = {0.5f, 1, -0.5f, 896, 0x1p-8f, 0};
  const std::string halves = bytes_of(std::vector<uint16_t>{0x3800, 0x4000});   // 0.5, 2
  const std::string bhalves = bytes_of(std::vector<uint16_t>{0x3f00, 0x4000});  // 0.5, 2
  EXPECT_EQ(with_scale("F32", "[2,1]", bytes_of(Floats{0.5f, 2})), by_row);
  EXPECT_EQ(with_scale("F16", "[2]", halves), by_row);
  EXPECT_EQ(with_scale("BF16", "[2,1]", bhalves), by_row);
  EXPECT_EQ(with_scale("F32", "[]", bytes_of(0.25f)), (Floats{0.25f, 0.5f, -0.25f, 112, 0x1p-11f, 0}));
  EXPECT_EQ(with_scale("F32", "[1]", bytes_of(0.25f))[3], 112);
  expect_refused([&] { with_scale("F32", "[3]", bytes_of(Floats{1, 2, 3})); }, {"x.weight", "3 scales"});
  expect_refused([&] { with_scale("F32", "[1,2]", bytes_of(Floats{1, 2})); }, {"x.weight", "2 scales"});
  expect_refused([&] { with_scale("U8", "[2]", "ab"); }, {"x.weight_scale", "U8"});
  write_model(SafetensorsBuilder().add("x.weight", "F8_E4M3", "[2,3]", codes));
  expect_refused([&] { open()->read_f32("x.weight"); }, {"x.weight", "F8_E4M3", "without x.weight_scale"});
  write_model(SafetensorsBuilder()
                  .add("x.weight", "F8_E4M3", "[6]", codes)
                  .add("x.weight_scale", "F32", "[]", "1234")
                  .add("x.weight_scale_inv", "F32", "[]", "1234"));
  expect_refused([&] { open()->read_f32("x.weight"); }, {"x.weight", "both"});
}

TEST_F(HfFolderTest, ReadsFp8InBlocks) {
  // Two rows of three: blocks of 1 x 2, the last of each row short.
  const std::string codes = "\x38\x40\xb8\x7e\x38\x38";  // 1, 2, -1; 448, 1, 1
  const auto with_blocks = [&](const std::string& config, const char* shape, const Floats& scales) {
    write_model(SafetensorsBuilder()
                    .add("x.weight", "F8_E4M3", "[2,3]", codes)
                    .add("x.weight_scale_inv", "F32", shape, bytes_of(scales)));
    folder_.write("config.json", config);
    return open()->read_f32("x.weight");
  };
  const auto config = [](const char* block) {
    return cat(R"({"quantization_config":{"quant_method":"fp8","weight_block_size":)", block, "}}");
  };
  EXPECT_EQ(with_blocks(config("[1,2]"), "[2,2]", {0.5f, 4, 2, 8}), (Floats{0.5f, 1, -4, 896, 2, 8}));
  EXPECT_EQ(with_blocks(config("[2,2]"), "[1,2]", {0.5f, 4}), (Floats{0.5f, 1, -4, 224, 0.5f, 4}));
  EXPECT_EQ(with_blocks("{}", "[1,1]", {2}), (Floats{2, 4, -2, 896, 2, 2}));
  expect_refused([&] { with_blocks(config("[2,2]"), "[2,2]", {1, 2, 3, 4}); }, {"x.weight", "4 scales", "2 x 2"});
  expect_refused([&] { with_blocks("{}", "[1,2]", {1, 2}); }, {"x.weight", "2 scales", "128 x 128"});
  for (const char* block : {"[0,2]", "[2]", "2", "[1,2,3]", "[1.5,2]", "[-1,2]", "[1,1048577]"}) {
    expect_refused([&] { with_blocks(config(block), "[2,2]", {1, 2, 3, 4}); }, {"config.json", "weight_block_size"});
  }
}

/// Two rows of `columns` codes q = (row + k) % 16, packed eight to a word with the lowest bits first.
std::string packed_codes(int64_t columns) {
  std::vector<uint32_t> words;
  for (int64_t row = 0; row < 2; ++row) {
    for (int64_t k = 0; k < columns; ++k) {
      if (k % 8 == 0) words.push_back(0);
      words.back() |= static_cast<uint32_t>((row + k) % 16) << 4 * (k % 8);
    }
  }
  return bytes_of(words);
}

/// One row after the other gives what the whole matrix gives, and rows that are not there are refused.
void expect_rows_of(const Checkpoint& model, const std::string& name) {
  const Floats all = model.read_f32(name);
  const int64_t rows = model.find(name)->shape.at(0);
  Floats joined;
  for (int64_t row = 0; row < rows; ++row) {
    const Floats one = model.read_rows(name, row, 1);
    joined.insert(joined.end(), one.begin(), one.end());
  }
  EXPECT_EQ(joined, all) << name;
  EXPECT_EQ(model.read_rows(name, rows, 0), Floats{}) << name;
  expect_refused([&] { model.read_rows(name, rows - 1, 2); }, {name, cat("of ", rows)});
  expect_refused([&] { model.read_rows(name, -1, 1); }, {name});
  expect_refused([&] { model.read_rows(name, 1, std::numeric_limits<int64_t>::max()); }, {name});
}

TEST_F(HfFolderTest, ReadsRowsOfEveryType) {
  const std::vector<uint16_t> halves = {0x3c00, 0x4000, 0xbc00, 0x3800, 0x4200, 0x0001};
  const std::string codes = "\x38\x40\xb8\x7e\x31\x32";
  write_model(SafetensorsBuilder()
                  .add("f64", "F64", "[3,2]", bytes_of(std::vector<double>{1, 2, 3, 4, 5, 1e300}))
                  .add("f32", "F32", "[3,2]", bytes_of(Floats{1, 2, 3, 4, 5, 6}))
                  .add("f16", "F16", "[3,2]", bytes_of(halves))
                  .add("bf16", "BF16", "[3,2]", bytes_of(halves))
                  .add("one", "F8_E4M3", "[3,2]", codes)
                  .add("one_scale", "F32", "[]", bytes_of(0.5f))
                  .add("row", "F8_E4M3", "[3,2]", codes)
                  .add("row_scale", "F32", "[3]", bytes_of(Floats{1, 2, 3}))
                  .add("block", "F8_E4M3", "[3,2]", codes)
                  .add("block_scale_inv", "F32", "[2,1]", bytes_of(Floats{1, 2}))
                  .add("x.weight_packed", "I32", "[2,2]", packed_codes(16))
                  .add("x.weight_scale", "F32", "[2,2]", bytes_of(Floats{1, 2, 3, 4}))
                  .add("x.weight_zero_point", "I32", "[1,2]", bytes_of(std::vector<uint32_t>{0x73, 0x1f}))
                  .add("x.weight_shape", "I64", "[2]", bytes_of(std::vector<int64_t>{2, 16})));
  folder_.write("config.json", R"({"quantization_config":{"weight_block_size":[2,2]}})");
  const auto model = open();
  for (const char* name : {"f64", "f32", "f16", "bf16", "one", "row", "block", "x.weight"})
    expect_rows_of(*model, name);
  model->drop_pages();  // they come again
  for (const char* name : {"f64", "block", "x.weight"}) expect_rows_of(*model, name);
}

TEST_F(HfFolderTest, ReadsPackQuantized_D02) {
  const std::vector<uint16_t> scales = {0x3c00, 0x4000, 0xbc00, 0x3800};  // 1, 2, -1, 0.5
  write_model(SafetensorsBuilder()
                  .add("x.weight_packed", "I32", "[2,8]", packed_codes(64))
                  .add("x.weight_scale", "F16", "[2,2]", bytes_of(scales))
                  .add("x.weight_shape", "I64", "[2]", bytes_of(std::vector<int64_t>{2, 64}))
                  .add("y.weight_packed", "I32", "[2,2]", packed_codes(12))
                  .add("y.weight_scale", "F32", "[2,1]", bytes_of(Floats{1, 3}))
                  .add("y.weight_shape", "I32", "[2]", bytes_of(std::vector<int32_t>{2, 12})));
  const auto model = open();
  EXPECT_EQ(model->tensors().size(), 8u);
  EXPECT_EQ(model->find("x.weight")->type, "pack-quantized");
  EXPECT_EQ(model->find("x.weight")->shape, (std::vector<int64_t>{2, 64}));
  EXPECT_EQ(model->find("x.weight_packed")->type, "I32");
  const Floats x = model->read_f32("x.weight"), y = model->read_f32("y.weight");
  ASSERT_EQ(x.size(), 128u);
  ASSERT_EQ(y.size(), 24u);
  const float group_scale[2][2] = {{1, 2}, {-1, 0.5f}};
  for (int row = 0; row < 2; ++row) {
    for (int k = 0; k < 64; ++k) {
      EXPECT_EQ(x[row * 64 + k], group_scale[row][k / 32] * static_cast<float>((row + k) % 16 - 8)) << row << " " << k;
    }
    for (int k = 0; k < 12; ++k)
      EXPECT_EQ(y[row * 12 + k], (row ? 3.0f : 1.0f) * static_cast<float>((row + k) % 16 - 8));
  }
  EXPECT_EQ(model->read_f32("x.weight_scale"), (Floats{1, 2, -1, 0.5f}));
  EXPECT_EQ(model->int4_group("x.weight"), 32);
  EXPECT_EQ(model->int4_group("y.weight"), 128);  // one group, whatever its size
  int64_t size = 0;
  model->raw("x.weight_packed", &size);
  EXPECT_EQ(size, 64);
  expect_refused([&] { model->raw("x.weight", &size); }, {"x.weight", "pack-quantized"});
}

TEST_F(HfFolderTest, ReadsPackQuantizedInAnOrderOfItsOwn_D02) {
  std::vector<int32_t> group_of(64);
  for (int k = 0; k < 64; ++k) group_of[k] = k % 2;
  SafetensorsBuilder tensors;
  tensors.add("x.weight_packed", "I32", "[2,8]", packed_codes(64))
      .add("x.weight_scale", "F32", "[2,2]", bytes_of(Floats{1, 2, -1, 0.5f}))
      .add("x.weight_shape", "I64", "[2]", bytes_of(std::vector<int64_t>{2, 64}))
      .add("x.weight_g_idx", "I32", "[64]", bytes_of(group_of));
  write_model(tensors);
  const auto model = open();
  const Floats x = model->read_f32("x.weight");
  const float scale[2][2] = {{1, 2}, {-1, 0.5f}};
  for (int i = 0; i < 128; ++i)
    EXPECT_EQ(x[i], scale[i / 64][i % 2] * static_cast<float>((i / 64 + i % 64) % 16 - 8)) << i;
  std::string why;
  EXPECT_EQ(model->int4_group("x.weight", &why), 0);
  EXPECT_NE(why.find("activation order"), std::string::npos) << why;
}

TEST_F(HfFolderTest, RefusesPackQuantizedThatDoesNotFit_D02_D05) {
  struct Parts {
    const char* packed_type = "I32";
    const char* packed_shape = "[2,8]";
    const char* scale_shape = "[2,2]";
    size_t scales = 4;
    std::vector<int64_t> shape = {2, 64};
    const char* extra = nullptr;
  };
  const auto expect = [&](const Parts& parts, const std::vector<std::string>& words) {
    SafetensorsBuilder tensors;
    tensors.add("x.weight_packed", parts.packed_type, parts.packed_shape, packed_codes(64))
        .add("x.weight_scale", "F32", parts.scale_shape, bytes_of(Floats(parts.scales, 1.0f)))
        .add("x.weight_shape", "I64", "[2]", bytes_of(parts.shape));
    if (parts.extra) tensors.add(parts.extra, "I32", "[0]", "");
    write_model(tensors);
    expect_open_refused(words);
  };
  expect({.packed_type = "F32"}, {"x.weight_packed", "I32 (2, 8)"});
  expect({.packed_shape = "[4,4]"}, {"x.weight_packed", "I32 (2, 8)"});
  expect({.shape = {2, 32}}, {"I32 (2, 4)"});  // 8-bit codes
  expect({.shape = {2, -64}}, {"[2, -64]"});
  expect({.shape = {int64_t{1} << 62, int64_t{1} << 62}}, {"x.weight_packed"});
  expect({.scale_shape = "[4]"}, {"x.weight_scale", "2 rows"});
  expect({.scale_shape = "[4,1]"}, {"x.weight_scale", "2 rows"});
  expect({.scale_shape = "[2,0]", .scales = 0}, {"x.weight_scale"});
  expect({.scale_shape = "[2,3]", .scales = 6}, {"x.weight_scale", "64 columns"});
  expect({.extra = "x.weight_zero_point"}, {"x.weight_zero_point", "I32 [1,2]"});
  expect({.extra = "x.weight_g_idx"}, {"x.weight_g_idx", "expected I32 [64]"});
  expect({.extra = "x.weight"}, {"x.weight is there as well"});
  write_model(SafetensorsBuilder()  // 24 columns in two groups: of 12, or of 16 and 8?
                  .add("x.weight_packed", "I32", "[2,3]", packed_codes(24))
                  .add("x.weight_scale", "F32", "[2,2]", bytes_of(Floats(4, 1.0f)))
                  .add("x.weight_shape", "I64", "[2]", bytes_of(std::vector<int64_t>{2, 24})));
  expect_open_refused({"x.weight_packed", "groups of 12"});
  write_model(SafetensorsBuilder().add("x.weight_packed", "I32", "[1]", "1234"));
  expect_open_refused({"x.weight_packed", "expected x.weight_scale beside it"});
}

std::string from_hex(const std::string& digits) {
  std::string bytes;
  for (size_t i = 0; i < digits.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

/// scripts/judges/compressed_tensors.py wrote the vectors.
TEST_F(HfFolderTest, ReadsWhatThePackageCompressedTensorsWrites_D05) {
  const auto vectors = nlohmann::json::parse(test::read_file(FUT_SOURCE_DIR "/tests/compressed_tensors_vectors.json"));
  EXPECT_EQ(vectors.size(), 7u);
  for (const auto& vector : vectors) {
    SafetensorsBuilder file;
    for (const auto& [name, tensor] : vector["tensors"].items()) {
      file.add("x." + name, tensor["type"].get<std::string>(), tensor["shape"].dump(), from_hex(tensor["bytes"]));
    }
    write_model(file);
    EXPECT_EQ(bytes_of(open()->read_f32("x.weight")), from_hex(vector["weight"])) << vector["layout"];
  }
}

/// Only with folders from outside: see scripts/judges/quantised_folders.py.
TEST(HfFolderJudge, ValuesAreThoseOfThePackage) {
  const char *folder = std::getenv("FUT_FOLDER"), *values = std::getenv("FUT_VALUES");
  if (!folder || !values) GTEST_SKIP() << "FUT_FOLDER and FUT_VALUES name no folders";
  const auto ours = Checkpoint::open(folder), theirs = Checkpoint::open(values);
  for (const TensorInfo& tensor : theirs->tensors()) {
    ASSERT_NE(ours->find(tensor.name), nullptr) << tensor.name;
    EXPECT_EQ(ours->find(tensor.name)->shape, tensor.shape) << tensor.name;
    EXPECT_TRUE(bytes_of(ours->read_f32(tensor.name)) == bytes_of(theirs->read_f32(tensor.name))) << tensor.name;
  }
}

TEST_F(HfFolderTest, FindsTheChatTemplate) {
  write_model(one("a", 1));
  const auto with_config = [&](const char* config) {
    folder_.write("tokenizer_config.json", config);
    return open()->chat_template();
  };
  EXPECT_EQ(with_config("{}"), "");
  EXPECT_EQ(with_config(R"({"chat_template":null})"), "");
  EXPECT_EQ(with_config(R"({"chat_template":"T\n"})"), "T\n");
  EXPECT_EQ(with_config(R"({"chat_template":[{"name":"tool_use","template":"U"},{"name":"default","template":"D"}]})"),
            "D");
  for (const char* bad : {R"({"chat_template":7})", R"({"chat_template":[7]})", R"({"chat_template":[]})", "[]",
                          R"({"chat_template":[{"name":"default","template":7}]})"}) {
    SCOPED_TRACE(bad);
    expect_refused([&] { with_config(bad); }, {"tokenizer_config.json"});
  }
  folder_.write("chat_template.jinja", "J");
  EXPECT_EQ(open()->chat_template(), "J");
}

TEST(HfFolder, OpensAModelWithoutTokenizer) {
  const std::string path = FUT_SOURCE_DIR "/../shared/data/models/stories260K-hf";
  if (!fs::exists(path)) GTEST_SKIP() << "no " << path;
  const auto model = Checkpoint::open(path);
  EXPECT_EQ(parse_json(model->config_json(), "config").at("num_hidden_layers"), 5);
  EXPECT_EQ(model->find("model.embed_tokens.weight")->shape, (std::vector<int64_t>{512, 64}));
  EXPECT_EQ(model->read_f32("model.embed_tokens.weight").size(), 512u * 64);
  expect_refused([&] { model->tokenizer(); }, {path, "tokenizer.json"});
}

/// Opens the folder and reads every tensor; the number of those that could be read, -1 if the folder was refused.
int tensors_read(const std::string& path) {
  int count = 0;
  try {
    const auto model = Checkpoint::open(path);
    for (const TensorInfo& tensor : model->tensors()) {
      try {
        model->read_f32(tensor.name);
        ++count;
      } catch (const Error&) {
      }
    }
  } catch (const Error&) {
    return -1;
  }
  return count;
}

TEST_F(HfFolderTest, SurvivesFlippedBytes) {
  const std::string codes = packed_codes(64);
  const std::string whole = SafetensorsBuilder()
                                .add("x.weight_packed", "I32", "[2,8]", codes)
                                .add("x.weight_scale", "F16", "[2,2]", "12345678")
                                .add("x.weight_shape", "I64", "[2]", bytes_of(std::vector<int64_t>{2, 64}))
                                .add("y", "F8_E4M3", "[2,3]", "123456")
                                .add("y_scale", "BF16", "[2,1]", "1234")
                                .bytes();
  folder_.write("model.safetensors", whole);
  ASSERT_EQ(tensors_read(folder_.path()), 4);  // x.weight and its scale, y and its scale
  std::mt19937 random(2);
  int refused = 0, read_in_part = 0, read = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    std::string flipped = whole;
    for (int flips = 1 + static_cast<int>(random() % 3); flips > 0; --flips) {
      flipped[random() % flipped.size()] ^= static_cast<char>(1 + random() % 255);
    }
    folder_.write("model.safetensors", flipped);
    const int count = tensors_read(folder_.path());
    ++(count < 0 ? refused : count < 4 ? read_in_part : read);
  }
  EXPECT_GT(refused, 1000);
  EXPECT_GT(read_in_part, 50);
  EXPECT_GT(read, 100);
}

}  // namespace
}  // namespace fut
