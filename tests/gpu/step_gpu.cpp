// decode_step() on the card: the logits and the cache of a step made by one kernel, bit for bit what the same backend's
// operations leave one by one, and the same from run to run. Random models, 1 to 32 rows of ragged lengths,
// several steps in a row across the edges of pages, NaN in everything that was not written. And what it refuses,
// untouched.
//
//   step_gpu [--quick]     --quick: few cases, for compute-sanitizer
#include <cstdlib>

#include "cuda/replay.h"
#include "step_world.h"

using namespace fut;
using namespace fut::test;

namespace {

constexpr Shape kShapes[] = {
    {576, 1536, 9, 3, 64, 1021, 64, 3},
    {4096, 1536, 32, 8, 128, 1003, 128},
    {128, 192, 2, 2, 64, 17, 64},     // fewer tiles than multiprocessors
    {576, 1536, 9, 3, 64, 997, 128},  // a short last group
    {576, 4096, 9, 9, 64, 131, 32, 3},
    {1536, 4096, 12, 12, 128, 509, 64},
    {4096, 576, 32, 8, 128, 2111, 32},
    {512, 4096, 8, 1, 64, 333, 32},
    {1024, 576, 16, 2, 128, 515, 64},
    {512, 14336, 4, 1, 128, 129, 64},
    {1536, 576, 12, 4, 64, 301, 64, 2, Dtype::bf16},
    {576, 1536, 9, 3, 64, 77, 32, 2, Dtype::e4m3},
};
const std::vector<int64_t> kLengths = {0, 14, 15, 16, 62, 63, 64, 65, 127, 1023, 2015};

int64_t clamped = 0;  ///< values, in all cases: that counter must have been seen at work

/// `steps` steps by operations, then three times the same by decode_step().
void check_world(World& w, int64_t steps) {
  const int before = failures;
  std::vector<std::vector<int32_t>> tokens;
  std::vector<Outcome> want;
  for (int64_t i = 0; i < steps; ++i) {
    tokens.push_back(w.random_tokens());
    want.push_back(w.by_operations(tokens[i]));
    w.cache.advance();
    const auto& logits = want[i].logits;
    expect(std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); }),
           w.name() + ": logits that are no numbers");
    clamped += want[i].saturated;
  }
  for (int turn = 0; turn < 3; ++turn) {
    w.cache.restart();
    for (int64_t i = 0; i < steps; ++i) {
      Outcome got;
      const std::string name = cat(w.name(), ", step ", i, ", run ", turn);
      expect(w.whole(tokens[i], got), name + ": refused");
      same_outcome(name, want[i], got);
      w.cache.advance();
    }
  }
  if (failures == before) printf("ok     %s: %lld steps\n", w.name().c_str(), static_cast<long long>(steps));
  fflush(stdout);
}

void check(Backend& gpu, const Shape& s, const std::vector<int64_t>& past, int64_t steps) {
  World w(gpu, s, past, steps);
  check_world(w, steps);
}

std::unique_ptr<Backend> backend_of(const char* rows) {
  struct Setting {
    ~Setting() { unsetenv("FUT_STEP_ROWS"); }
  } setting;
  setenv("FUT_STEP_ROWS", rows, 1);
  return make_cuda_backend();
}

/// decode_step() returns false and leaves logits and cache alone.
void refuses(World& w, const std::string& what, const World::Change& change = {}) {
  w.cache.restart();
  Outcome got;
  const bool taken = w.whole(w.random_tokens(), got, change);
  expect(!taken, what + " was not refused");
  const Outcome untouched{w.logits.host, w.cache.pages->host, w.cache.tails->host, w.cache.sinks->host};
  same_outcome("refused: " + what, untouched, got);
  printf("ok     refused: %s\n", what.c_str());
}

template <class Run>
void throws(const std::string& what, const std::vector<std::string>& words, Run run) {
  try {
    run();
  } catch (const Error& error) {
    const std::string said = error.what();
    for (const std::string& word : words)
      expect(said.find(word) != said.npos, cat(what, ": no word of ", word, " in: ", said));
    printf("ok     %s: %s\n", what.c_str(), said.c_str());
    return;
  }
  expect(false, what + " was no error");
}

void check_refusals(Backend& all) {
  const Shape plain{128, 192, 2, 2, 64, 17, 64};
  World w(all, plain, {20, 70}, 1);
  using Layers = std::vector<DecodeLayer>;
  const auto all_weights = [](Layers& layers, Dtype dtype, const float* scale) {
    for (DecodeLayer& l : layers) {
      for (Weight* x : {&l.qkv, &l.o, &l.gate_up, &l.down})
        x->dtype = dtype, x->group = 0, x->scale = scale, x->input_scale = nullptr;
    }
  };
  for (const Dtype kv : {Dtype::bf16, Dtype::e4m3}) {
    refuses(w, cat("a cache in ", name_of(kv)), [&](DecodeStepArgs&, Layers& layers) {
      for (DecodeLayer& l : layers) l.cache.layout.dtype = kv;
    });
    refuses(w, cat("weights in ", name_of(kv)), [&](DecodeStepArgs& args, Layers& layers) {
      all_weights(layers, kv, w.model.cos->gpu());
      args.head = layers[0].qkv;
      args.head.rows = plain.V;
    });
  }
  refuses(w, "one layer's cache in bf16",
          [](DecodeStepArgs&, Layers& layers) { layers[1].cache.layout.dtype = Dtype::bf16; });
  refuses(w, "one weight in bf16", [](DecodeStepArgs&, Layers& l) { l[1].o.dtype = Dtype::bf16, l[1].o.group = 0; });
  refuses(w, "one weight in groups of 32", [](DecodeStepArgs&, Layers& layers) { layers[1].down.group = 32; });
  refuses(w, "half the rotary width", [](DecodeStepArgs& args, Layers&) { args.rope.rotary_dim = 32; });
  refuses(w, "no layers", [](DecodeStepArgs& args, Layers&) { args.layer_count = 0; });
  const std::vector<int64_t> behind = {0, 0, 1}, none = {0, 0, 0};
  refuses(w, "a sequence without a row", [&](DecodeStepArgs& args, Layers&) {
    args.batch = {2, 1, behind.data(), w.cache.past.data()};
  });
  refuses(w, "no rows", [&](DecodeStepArgs& args, Layers&) { args.batch = {2, 0, none.data(), w.cache.past.data()}; });
  const std::vector<int64_t> other_slots = {1, 0};
  refuses(w, "layers with slots of their own",
          [&](DecodeStepArgs&, Layers& layers) { layers[1].cache.slot = other_slots.data(); });

  const auto shape = [](Backend& gpu, const Shape& s, int rows, const char* what) {
    World other(gpu, s, std::vector<int64_t>(rows, 5), 1);
    refuses(other, what);
  };
  shape(all, plain, 33, "33 rows");
  for (const int rows : {1, 2}) {
    shape(all, {128, 192, 9, 1, 64, 17, 64}, rows, "nine query heads a KV head");
    shape(all, {128, 192, 4, 2, 32, 17, 64}, rows, "heads of 32");
  }
  shape(all, {128, 192, 2, 2, 64, 17, 32}, 2, "two rows, groups of 32");
  shape(*backend_of("8"), plain, 9, "nine rows, where eight are allowed");
  shape(*backend_of("99"), plain, 33, "33 rows, where 99 are allowed");
  shape(*backend_of("0"), plain, 1, "one row, where none is allowed");

  Outcome out;
  const std::vector<int32_t> tokens = {3, 4}, outside = {3, 17};
  const std::vector<int64_t> far = {20, 700};
  throws("a token outside the vocabulary", {"token id 17", "17"}, [&] { w.whole(outside, out); });
  throws("a position beyond the rotary table", {"decode_step", "sequence 1 reaches 701"},
         [&] { w.whole(tokens, out, [&](DecodeStepArgs& args, Layers&) { args.batch.past = far.data(); }); });
  throws("a page that is not there", {"decode_step", "names page", "of 1"}, [&] {
    w.whole(tokens, out, [](DecodeStepArgs&, Layers& layers) {
      for (DecodeLayer& l : layers) l.cache.page_count = 1;
    });
  });
  throws("a weight of another shape", {"decode_step", "down"},
         [&] { w.whole(tokens, out, [](DecodeStepArgs&, Layers& layers) { layers[1].down = layers[1].o; }); });
  for (const char* rows : {"", "eight", "-1", "100"})
    throws(cat("FUT_STEP_ROWS=", rows), {"FUT_STEP_ROWS", "0 to 99"}, [&] { backend_of(rows); });
}

/// A step whose blocks wait for what never comes ends with an error that says for what, and the next one is right.
void check_hangs(Backend& one, const std::vector<int64_t>& past) {
  const Shape s = kShapes[0];
  check(one, kShapes[1], {5}, 1);  // tags that are no multiple of this model's
  World w(one, s, past, 2);
  const std::vector<int32_t> tokens = w.random_tokens();
  Outcome out;
  const std::pair<LostRow, std::vector<std::string>> cases[] = {
      {LostRow::qkv, {"decode step", "for y of layer 0"}},
      {LostRow::down, {"decode step", past.size() == 1 ? "for x_in of layer 1" : "for h of layer 0"}}};
  for (const auto& [row, words] : cases) {
    w.cache.restart();
    throws("a row that never arrives", words, [&] {
      lose_row(one, row);
      w.whole(tokens, out);
    });
    w.cache.restart();
    check_world(w, 2);
  }
}

/// What is released counts as free; what cannot be had is an error, and no more than that.
void check_memory(Backend& one) {
  const auto free_mib = [&] {
    one.download(std::vector<uint8_t>(1).data(), Buffer(one, 1).as<void>(), 1);  // waits for what was released
    return static_cast<int64_t>(one.free_bytes() >> 20);
  };
  constexpr int64_t kMib = 1024, kSlack = 64;  // the pool takes memory in pieces of 32 MiB
  const int64_t before = free_mib();
  Buffer large(one, size_t{kMib} << 20);
  const int64_t during = free_mib();
  large = Buffer();
  const int64_t after = free_mib();
  expect(std::abs(before - during - kMib) <= kSlack && std::abs(before - after) <= kSlack,
         cat("free: ", before, " MiB, with 1024 taken ", during, ", and given back ", after));
  World w(one, kShapes[2], {64}, 1);
  throws("an impossible buffer", {"out of memory", "MiB are free"}, [&] { Buffer(one, size_t{1} << 50); });
  check_world(w, 1);
}

/// A step that is traced: every kind of stage as often as there are layers, and the same bits.
void check_trace(Backend& one, const Shape& s, const std::vector<int64_t>& past) {
  World w(one, s, past, 1);
  const std::vector<int32_t> tokens = w.random_tokens();
  Outcome want, got;
  w.whole(tokens, want);
  const auto step = [&] {
    w.cache.restart();
    w.whole(tokens, got);
  };
  const std::vector<StageCycles> stages = trace_step(one, step);
  same_outcome("traced", want, got);
  const bool head = s.head == Dtype::int4;
  const std::vector<std::string> ops = {"qkv_rope_append", "attention_decode", "o_proj_residual",
                                        "gate_up_swiglu",  "down_residual",    "lm_head"};
  expect(stages.size() == ops.size() - !head, cat("a trace of ", stages.size(), " kinds of stage"));
  for (size_t i = 0; i < stages.size(); ++i) {
    const StageCycles& x = stages[i];
    expect(x.op == ops[i] && x.count == (i < 5 ? s.layers : 1),
           cat("stage ", i, " is ", x.op, ", ", x.count, " times"));
    const bool sane = x.cycles > 0 && x.cycles < 1e7 && x.longest >= x.cycles && x.input_cycles <= x.cycles &&
                      x.memory_cycles <= x.cycles;
    expect(sane, cat("stage ", x.op, ": ", x.cycles, " cycles, the longest ", x.longest, ", inputs ", x.input_cycles,
                     ", memory ", x.memory_cycles));
  }
  expect(trace_step(one, [] {}).empty(), "a trace of no step");
  w.whole(tokens, got);  // and none of one that comes later
  printf("ok     traced: %zu kinds of stage\n", stages.size());
}

/// `count` lengths out of kLengths, from `first` on, in turn.
std::vector<int64_t> lengths(int count, size_t first) {
  std::vector<int64_t> all;
  for (int i = 0; i < count; ++i) all.push_back(kLengths[(first + i) % kLengths.size()]);
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::string(argv[1]) == "--quick";
  return run_on_card([quick](Backend& one) {
    const std::unique_ptr<Backend> all = backend_of("32");
    if (quick) {
      check(one, kShapes[0], {63}, 2);
      check(*all, kShapes[2], {62, 130, 0}, 3);
      check(*all, kShapes[0], lengths(19, 2), 2);
      return;
    }
    for (const int64_t past : kLengths) {
      check(one, kShapes[0], {past}, 3);
      check(one, kShapes[1], {past}, 3);
    }
    size_t turn = 0;
    for (const Shape& s : kShapes) {
      check(one, s, {lengths(1, 4 + turn)[0]}, 2);  // 62 and on
      check(one, s, {1900 + below(200)}, 2);
      ++turn;
      if (s.group == 32) continue;  // batches as operations
      check(*all, s, lengths(8, turn), 3);
      check(*all, s, lengths(9 + static_cast<int>(below(24)), turn), 2);
    }
    for (const int rows : {2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 24, 31, 32}) {
      check(*all, kShapes[0], lengths(rows, 3 * static_cast<size_t>(rows)), 3);
      check(*all, kShapes[1], lengths(rows, 5 * static_cast<size_t>(rows)), 2);
    }
    for (const int rows : {2, 30}) check(*all, {8192, 64, 2, 1, 64, 33, 64}, lengths(rows, 3), 2);
    check(*all, {4096, 14336, 32, 8, 128, 1003, 64, 1}, lengths(32, 1), 1);
    expect(clamped > 0, "no value was ever clamped: the counter was not tested");
    check_refusals(*all);
    check_memory(one);
    check_trace(one, kShapes[0], {130});
    check_trace(one, kShapes[10], {130});  // its head is an operation of its own
    check_trace(*all, kShapes[0], {130, 5, 70});
    check_hangs(one, {63});
    check_hangs(*all, {63, 20});
  });
}
