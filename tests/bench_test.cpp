// fut bench op, block and step: rows that make sense, the bytes they claim, and the files they write.
#include "engine/bench.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "engine/backends.h"
#include "support/temp_folder.h"

namespace fut {
namespace {

/// D 128, F 320, H 4, J 2, E 64, V 96.
BenchOptions tiny() {
  BenchOptions o;
  o.config.width = 128;
  o.config.feed_forward = 320;
  o.config.layers = 3;
  o.config.heads = 4;
  o.config.kv_heads = 2;
  o.config.head_dim = 64;
  o.config.vocabulary = 96;
  o.batch = 3;
  o.context = 130;
  o.tokens = 5;
  o.layers = 2;
  o.repeat = 3;
  o.sample_seconds = 1e-5;
  o.warm_up_seconds = 0;
  return o;
}

BenchResult measured(const std::string& what, const BenchOptions& options) {
  return run_benchmark(*make_backend("cpu", options.config, {options.weights, options.kv}), what, options);
}

void expect_sane(const BenchResult& result, const BenchOptions& options) {
  ASSERT_EQ(result.us.size(), static_cast<size_t>(options.repeat)) << result.what;
  EXPECT_GT(result.us.front(), 0) << result.what;
  EXPECT_TRUE(std::is_sorted(result.us.begin(), result.us.end())) << result.what;
  EXPECT_EQ(result.median_us(), result.us[1]) << result.what;
  EXPECT_GT(result.bytes, 0) << result.what;
  EXPECT_GT(result.gb_per_second(), 0) << result.what;
}

TEST(Bench, EveryOperationInEveryFormat) {
  for (const bool prefill : {false, true}) {
    for (const Dtype weights : {Dtype::int4, Dtype::e4m3, Dtype::bf16, Dtype::f32}) {
      if (prefill && weights == Dtype::int4) continue;
      for (const Dtype kv : {Dtype::int4, Dtype::e4m3, Dtype::bf16, Dtype::f32}) {
        BenchOptions options = tiny();
        options.prefill = prefill;
        options.weights = weights;
        options.kv = kv;
        int64_t sum = 0;
        for (const std::string& op : bench_op_names(prefill)) {
          const BenchResult result = measured(op, options);
          expect_sane(result, options);
          EXPECT_EQ(result.layers, 2);
          if (op != "embed" && op != "lm_head") sum += result.bytes;
        }
        EXPECT_EQ(measured("block", options).bytes, sum);
      }
    }
  }
}

TEST(Bench, AStepIsItsOperations) {
  const BenchOptions options = tiny();
  int64_t layer = 0, tables = 0;
  for (const std::string& op : bench_op_names(false)) {
    (op == "embed" || op == "lm_head" ? tables : layer) += measured(op, options).bytes;
  }
  const BenchResult step = measured("step", options);
  expect_sane(step, options);
  EXPECT_EQ(step.bytes, tables + 2 * layer);
  EXPECT_EQ(step.layer_bytes, layer);
  EXPECT_FALSE(step.one_call);  // the CPU has no such kernel
  EXPECT_LT(step.layer_us.value_or(0), step.median_us());
  BenchOptions all = options;
  all.layers = 0;
  EXPECT_EQ(measured("step", all).layers, 3);
  EXPECT_EQ(measured("step", all).bytes, tables + 3 * layer);
}

TEST(Bench, OperationsInARowMoveWhatEachMoves) {
  const BenchOptions options = tiny();
  const BenchResult both = measured("attention_decode+o_proj_residual", options);
  expect_sane(both, options);
  EXPECT_EQ(both.bytes, measured("attention_decode", options).bytes + measured("o_proj_residual", options).bytes);
}

TEST(Bench, BytesMoved) {
  const BenchOptions o = tiny();
  // o_proj (128 x 256, INT4): 8 x 4 tiles of 512 bytes of codes and 16 FP16 scales; three rows of 256 FP16 in, of 128
  // FP32 read and written.
  EXPECT_EQ(measured("o_proj_residual", o).bytes, 8 * 4 * (512 + 32) + 3 * 256 * 2 + 3 * 128 * 4 * 2);
  // The same in BF16.
  BenchOptions bf16 = o;
  bf16.weights = Dtype::bf16;
  EXPECT_EQ(measured("o_proj_residual", bf16).bytes, 128 * 256 * 2 + 3 * 256 * 2 + 3 * 128 * 4 * 2);
  // qkv (512 x 128): x in FP32, q, k and v in BF16, and one token a sequence and KV head in its BF16 tail.
  EXPECT_EQ(measured("qkv_rope_append", o).bytes,
            32 * 2 * (512 + 32) + 3 * 128 * 4 + 3 * 512 * 2 + 3 * 2 * (64 + 64) * 2);
  // 130 cached tokens: 16 sinks in BF16, 112 in INT4 (64 + 64 codes, 2 + 2 scales), then 2 and the step's own in BF16.
  const int64_t kv = 3 * 2 * (112 * (32 + 32 + 2 + 2) + (16 + 3) * (64 + 64) * 2);
  EXPECT_EQ(measured("attention_decode", o).bytes, kv + 3 * 256 * 2 * 2);
  // FP8: 131 tokens of 64 + 64 codes and two FP32 scales.
  BenchOptions fp8 = o;
  fp8.kv = Dtype::e4m3;
  EXPECT_EQ(measured("attention_decode", fp8).bytes, 3 * 2 * 131 * (64 + 64 + 8) + 3 * 256 * 2 * 2);
}

TEST(Bench, RaggedPromptsMoveWhatEachOfThemMoves) {
  for (const Dtype kv : {Dtype::int4, Dtype::bf16}) {
    BenchOptions ragged = tiny();
    ragged.prefill = true;
    ragged.weights = Dtype::e4m3;
    ragged.kv = kv;
    ragged.lengths = {70, 1, 129};
    BenchOptions one = ragged;
    one.batch = 1;
    int64_t bytes = 0, flops = 0;
    for (const int64_t length : ragged.lengths) {
      one.lengths.clear();
      one.tokens = length;
      const BenchResult alone = measured("attention_prefill", one);
      bytes += alone.bytes;
      flops += alone.flops;
      EXPECT_EQ(alone.flops, 4 * 4 * 64 * length * 130 + 2 * 4 * 64 * length * length);
    }
    const BenchResult together = measured("attention_prefill", ragged);
    expect_sane(together, ragged);
    EXPECT_EQ(together.bytes, bytes);
    EXPECT_EQ(together.flops, flops);
    EXPECT_EQ(measured("down_residual", ragged).flops, 2 * 200 * 128 * 320);
    EXPECT_EQ(measured("lm_head", ragged).flops, 2 * 3 * 128 * 96);
  }
}

TEST(Bench, EveryScalingOfPrefill) {
  for (const Fp8Scaling scaling : {Fp8Scaling::exact, Fp8Scaling::frozen, Fp8Scaling::delayed}) {
    BenchOptions options = tiny();
    options.prefill = true;
    options.weights = Dtype::e4m3;
    options.scaling = scaling;
    expect_sane(measured("block", options), options);
  }
}

TEST(Bench, EnoughSetsToLeaveTheCache) {
  BenchOptions options = tiny();
  options.layers = 0;
  options.repeat = 1;
  EXPECT_GT(measured("o_proj_residual", options).layers, 100);
}

TEST(Bench, RefusesWhatItCannotRun) {
  BenchOptions options = tiny();
  test::expect_refused([&] { measured("softmax", options); }, {"softmax", "decode"});
  test::expect_refused([&] { measured("qkv_rope_cache", options); }, {"qkv_rope_cache", "decode"});
  test::expect_refused([&] { measured("lm_head+embed", options); }, {"lm_head+embed", "order"});
  test::expect_refused([&] { measured("+", options); }, {"no operation"});
  options.config = bench_shapes().back().config;
  options.layers = 100000;
  test::expect_refused([&] { measured("step", options); }, {"100000 layers", "GiB free", "cpu"});
  options = tiny();
  options.prefill = true;
  test::expect_refused([&] { measured("block", options); }, {"INT4 weights are for decode"});
  options = tiny();
  options.trace = true;
  test::expect_refused([&] { measured("step", options); }, {"to trace", "operation by operation"});
}

struct Result {
  int code;
  std::string out, err;
};

Result fut(const std::string& arguments) {
  const test::TempFolder folder;
  const std::string program = (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "fut").string();
  const int status = std::system(("'" + program + "' bench " + arguments + " >'" + folder.file("out") + "' 2>'" +
                                  folder.file("err") + "' </dev/null")
                                     .c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, test::read_file(folder.file("out")),
          test::read_file(folder.file("err"))};
}

const std::string kQuick = " --backend cpu --layers 1 --repeat 2 --context 70 --model '" FUT_SOURCE_DIR "/models/bard'";

TEST(BenchCommand, CsvHasOneHeaderAndALineForEveryRow) {
  const test::TempFolder folder;
  const std::string csv = " --csv '" + folder.file("results.csv") + "'";
  EXPECT_EQ(fut("op" + kQuick + csv).code, 0);
  EXPECT_EQ(fut("block" + kQuick + csv).code, 0);
  std::istringstream file(test::read_file(folder.file("results.csv")));
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 1 + bench_op_names(false).size() + 1);
  EXPECT_TRUE(lines[0].starts_with("commit,card,date,clock_mhz,op,phase,shape,")) << lines[0];
  for (size_t i = 1; i < lines.size(); ++i) EXPECT_EQ(lines[i].find("us_median"), std::string::npos) << lines[i];
  EXPECT_NE(lines[1].find(",\"cpu ("), std::string::npos) << lines[1];  // the name holds a comma
  EXPECT_NE(lines.back().find(",block,decode,"), std::string::npos) << lines.back();
  // The record's own columns, which are fewer.
  folder.write("record.csv", "commit,op,bytes,share_of_4.5TB/s\n");
  const std::string record = kQuick + " --commit abc --csv '" + folder.file("record.csv") + "'";
  EXPECT_EQ(fut("op o_proj_residual+gate_up_swiglu" + record).code, 0);
  EXPECT_NE(test::read_file(folder.file("record.csv")).find("\nabc,o_proj_residual+gate_up_swiglu,"),
            std::string::npos);
  const std::string ragged = " --phase prefill --prefill-scaling frozen --lengths ";
  EXPECT_EQ(fut("block" + record + ragged + "17,3").code, 0);
  EXPECT_NE(test::read_file(folder.file("record.csv")).find("\nabc,prefill_block/frozen/ragged,"), std::string::npos);
  folder.write("lengths", "20\n3, 70\n");
  const Result json = fut("block --json" + kQuick + ragged + "'" + folder.file("lengths") + "'");
  EXPECT_EQ(nlohmann::json::parse(json.out).at("lengths"), (std::vector<int64_t>{20, 3, 70})) << json.err;
  folder.write("lengths", "20\n3, -1\n");
  const Result wrong = fut("block" + kQuick + ragged + "'" + folder.file("lengths") + "'");
  EXPECT_EQ(wrong.code, 1);
  EXPECT_NE(wrong.err.find("\"-1\" is no whole number"), std::string::npos) << wrong.err;
  EXPECT_NE(fut("block" + kQuick + ragged + "/no/such/list").err.find("/no/such/list"), std::string::npos);
  folder.write("op_less.csv", "commit,bytes\n");
  const Result prefill = fut("op --phase prefill" + kQuick + " --csv '" + folder.file("op_less.csv") + "'");
  EXPECT_EQ(prefill.code, 1);
  EXPECT_NE(prefill.err.find("op_less.csv: line 1 has no column op"), std::string::npos) << prefill.err;
  folder.write("other.csv", "commit,colour\n");
  EXPECT_NE(fut("op" + kQuick + " --csv '" + folder.file("other.csv") + "'").err.find("colour"), std::string::npos);
  EXPECT_NE(fut("op" + kQuick + " --csv /no/such/folder/x.csv").err.find("/no/such/folder/x.csv"), std::string::npos);
}

TEST(BenchCommand, JsonAndText) {
  const Result result = fut("op lm_head --json --head int4" + kQuick);
  EXPECT_EQ(result.code, 0) << result.err;
  const auto json = nlohmann::json::parse(result.out);
  ASSERT_EQ(json.at("rows").size(), 1u);
  const auto& row = json.at("rows")[0];
  EXPECT_EQ(row.at("op"), "lm_head");
  // bard: V 1024, D 256
  EXPECT_EQ(row.at("bytes"), 64 * 4 * (512 + 32) + 256 * 4 + 1024 * 4);
  EXPECT_LE(row.at("us_min").get<double>(), row.at("us").get<double>());
  EXPECT_LE(row.at("us").get<double>(), row.at("us_max").get<double>());
  const auto step = nlohmann::json::parse(fut("step --json" + kQuick).out);  // one layer, so no difference of two
  ASSERT_EQ(step.at("rows").size(), 1u);
  EXPECT_EQ(step.at("rows")[0].at("one_call"), false);
  EXPECT_NE(fut("step" + kQuick).out.find("operation by operation"), std::string::npos);
  EXPECT_NE(fut("step --trace" + kQuick).err.find("to trace"), std::string::npos);
  const Result prefill = fut("step --phase prefill --tokens 20" + kQuick);
  EXPECT_EQ(prefill.code, 0) << prefill.err;
  EXPECT_NE(prefill.out.find("weights fp8"), std::string::npos) << prefill.out;
}

TEST(BenchCommand, WrongNamesAreUsageErrorsThatTellTheKnownOnes) {
  const std::vector<std::pair<std::string, std::vector<std::string>>> wrong = {
      {"op softmax", {"softmax", "attention_decode", "down_residual", "all"}},
      {"op attention_decode --phase prefill", {"attention_decode", "attention_prefill"}},
      {"op --shape gpt-2", {"gpt-2", "smollm2-135m", "llama-3.1-70b"}},
      {"block --phase prefill --weights int4", {"int4", "decode"}},
      {"block --lengths 3", {"--lengths", "prefill"}},
      {"block --phase prefill --lengths 3 --tokens 3", {"--lengths", "--tokens"}},
      {"layer", {"layer", "op", "block", "step", "model"}}};
  for (const auto& [arguments, words] : wrong) {
    const Result result = fut(arguments);
    EXPECT_EQ(result.code, 2) << arguments;
    EXPECT_EQ(result.out, "") << arguments;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    for (const std::string& word : words) EXPECT_NE(result.err.find(word), std::string::npos) << result.err;
  }
}

}  // namespace
}  // namespace fut
