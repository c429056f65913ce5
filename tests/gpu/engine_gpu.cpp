// The whole engine on the card against the engine on the CPU, on models/bard and the same packed bytes.
//
//   engine_gpu [--model models/bard] [--text tests/bard_text.txt] [--steps 200] [--seed 1] [--only int4-fp8]
//              [--backend cuda]
//
//   scores   A text token by token and as a whole, in every pair of formats: logits, loss and perplexity.
//   greedy   Prompts that end before, on and behind the edges of pages, continued greedily: the CPU's best token
//            wherever its lead exceeds the tolerance; the same bits however a prompt is cut.
//   company  --steps decode steps of a batch that sequences join and leave at random, in random order: the bits that
//            each of them gives alone.
//
// Tolerances. Two right programs differ: a sum in another order moves a few values over the edge between two codes, and
// every layer multiplies that, until it is as large as what rounding to those formats costs at all (a run on the CPU
// with other vector instructions shows the same). So that cost is the measure, found here on the CPU as the distance
// from F32: of the cache's format, and of the operands'. Two roundings that have nothing to do with one another are
// apart by the root of two times it, and the card may be that far from the CPU. Its loss may not lean to one side.
// --backend cpu tests this program where no card is.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>

#include "engine/engine_impl.h"
#include "scores.h"
#include "support.h"

using namespace fut;
using namespace fut::test;

namespace {

using Ids = std::vector<int32_t>;

constexpr double kPerplexity = 1e-3;  ///< below this a difference of perplexities needs no further thought
constexpr double kLean = 5.0;         ///< standard errors that a mean difference of losses may have

struct Arguments {
  std::string model = "models/bard", text = "tests/bard_text.txt", only, backend = "cuda";
  int64_t steps = 200, seed = 1;
};
Arguments arguments;

struct Formats {
  std::string prefill, decode, kv, scaling = "exact";

  bool wanted() const { return arguments.only.empty() || arguments.only == decode + "-" + kv; }
};

/// All pairs of decode weights and caches; prefill in FP8, or BF16 beside BF16.
std::vector<Formats> pairs() {
  std::vector<Formats> all;
  for (const char* decode : {"int4", "fp8", "bf16"}) {
    for (const char* kv : {"int4", "fp8", "bf16"}) {
      const Formats f{decode == std::string("bf16") ? "bf16" : "fp8", decode, kv};
      if (f.wanted()) all.push_back(f);
    }
  }
  return all;
}

std::unique_ptr<EngineImpl> load(const std::string& backend, const Formats& f, int max_batch = 16) {
  EngineOptions options;
  options.backend = backend;
  options.prefill = f.prefill;
  options.decode = f.decode;
  options.kv = f.kv;
  options.prefill_scaling = f.scaling;
  options.max_batch = max_batch;
  options.kv_tokens = max_batch * 640;
  auto engine = std::make_unique<EngineImpl>(arguments.model, options);
  FUT_CHECK(engine->info().backend.rfind(backend, 0) == 0, "the engine runs on ", engine->info().backend);
  return engine;
}

std::string read_text() {
  std::ifstream file(arguments.text, std::ios::binary);
  FUT_CHECK(file, arguments.text, ": cannot be read (run from the project's folder, or say --text)");
  return {std::istreambuf_iterator<char>(file), {}};
}

void failed(const std::string& line) {
  printf("FAILED %s\n", line.c_str());
  ++failures;
}

// ---- scores

struct Run {
  Formats formats;
  bool by_steps;  ///< through decode steps, or prefill

  std::string name() const {
    return by_steps ? cat("decode ", formats.decode, ", KV ", formats.kv)
                    : cat("prefill ", formats.prefill, " (", formats.scaling, "), KV ", formats.kv);
  }
};

/// Every pair through decode steps, and every prefill format with every cache.
std::vector<Run> runs() {
  std::map<std::string, Run> all;
  for (Formats f : pairs()) {
    for (const bool by_steps : {true, false}) all.try_emplace(Run{f, by_steps}.name(), Run{f, by_steps});
    if (f.decode != "int4") continue;
    f.scaling = "delayed";
    all.try_emplace(Run{f, false}.name(), Run{f, false});
  }
  std::vector<Run> list;
  for (const auto& [name, run] : all) list.push_back(run);
  return list;
}

Scores score(const std::string& backend, const Run& run, const std::string& text) {
  const std::unique_ptr<EngineImpl> engine = load(backend, run.formats);
  const Ids ids = engine->tokenize(text, false, false);
  const int64_t V = engine->info().vocabulary;
  Scores out;
  out.nll.resize(ids.size());
  out.logits.resize(ids.size() * V);
  ScoreOptions options;
  options.context = kWindow;
  options.decode = run.by_steps;
  engine->score(ids, options, [&](int64_t index, double nll, const float* logits) {
    out.nll[index] = nll;
    std::copy(logits, logits + V, out.logits.begin() + index * V);
  });
  return out;
}

/// What rounding costs on the CPU, in distances from F32.
class Cost {
 public:
  explicit Cost(const std::string& text) : text_(text) {}

  /// Root mean square and largest difference of logits that a run's operands and cache explain.
  Distance of(const Run& run) {
    const bool fp8 = !run.by_steps && run.formats.prefill == "fp8", bf16 = run.formats.prefill == "bf16";
    const Distance cache = from_f32({{"f32", "f32", run.formats.kv}, run.by_steps});
    const std::string operand = fp8 ? "fp8" : "bf16";
    const Distance gemm = from_f32({{operand, operand, "f32"}, run.by_steps});
    const double share = fp8 || bf16 ? 1.0 : 0x1p-3;  // operands of INT4 and FP8 weights in decode: FP16, 3 bits more
    Distance sum;
    sum.rms = std::sqrt(2 * (cache.rms * cache.rms + share * share * gemm.rms * gemm.rms));
    sum.largest = std::sqrt(2 * (cache.largest * cache.largest + share * share * gemm.largest * gemm.largest));
    return sum;
  }

 private:
  Distance from_f32(const Run& run) {
    const Run exact{{"f32", "f32", "f32"}, run.by_steps};
    if (!exact_.count(run.by_steps)) exact_[run.by_steps] = score("cpu", exact, text_);
    const auto [known, fresh] = known_.try_emplace(run.name());
    if (fresh) known->second = distance(exact_[run.by_steps], score("cpu", run, text_));
    return known->second;
  }

  const std::string& text_;
  std::map<bool, Scores> exact_;
  std::map<std::string, Distance> known_;
};

void check_scores(const Run& run, const std::string& text, const Distance& allowed) {
  const Scores cpu = score("cpu", run, text), card = score(arguments.backend, run, text);
  const Distance d = distance(cpu, card);
  const int64_t V = cpu.vocabulary(), token = d.at / V, row = token % (kWindow - 1);
  printf(
      "       %s: logits rms %.3g (allowed %.3g), largest %.3g (%.3g); perplexity %.6f - %.6f = %+.6f, lean %+.1f "
      "standard errors\n",
      run.name().c_str(), d.rms, allowed.rms, d.largest, allowed.largest, card.perplexity(), cpu.perplexity(),
      d.perplexity, d.lean);
  if (!(d.rms <= allowed.rms)) failed(cat(run.name(), ": logits differ by ", d.rms, " rms, allowed ", allowed.rms));
  if (!(d.largest <= allowed.largest)) {
    failed(cat(run.name(), ": token ", token, " (row ", row, " of window ", token / (kWindow - 1), "), logit of id ",
               d.at % V, ": ", card.logits[d.at], " on the card, ", cpu.logits[d.at],
               " on the CPU, allowed difference ", allowed.largest));
  }
  if (!(std::fabs(d.perplexity) <= kPerplexity || std::fabs(d.lean) <= kLean)) {
    failed(cat(run.name(), ": perplexity differs by ", d.perplexity, ", and the windows agree on the side (", d.lean,
               " standard errors)"));
  }
}

// ---- greedy

/// One sequence through a model, by hand: logits behind the prompt and behind each fed token. Without `fed`, `steps`
/// best tokens are fed. Prompts go in pieces of `chunk`.
struct Continuation {
  Ids ids;                    // fed
  std::vector<float> logits;  // (1 + fed, V)
};

int64_t best_of(const float* logits, int64_t V) { return std::max_element(logits, logits + V) - logits; }

/// How far the best logit is ahead of the second.
double lead_of(const float* logits, int64_t V) {
  const int64_t best = best_of(logits, V);
  float second = -INFINITY;
  for (int64_t i = 0; i < V; ++i) {
    if (i != best) second = std::max(second, logits[i]);
  }
  return double{logits[best]} - second;
}

void prefill(EngineImpl& engine, CachedSequence& sequence, const int32_t* ids, int64_t count) {
  engine.model().prefill(engine.pool().make_pass({&sequence}, {count}, Ids(ids, ids + count)));
  KvPool::advance(sequence, count);
}

Continuation continue_alone(EngineImpl& engine, const Ids& prompt, const Ids* fed, int64_t steps, int64_t chunk) {
  const int64_t V = engine.info().vocabulary, length = static_cast<int64_t>(prompt.size());
  Continuation out;
  CachedSequence sequence;
  FUT_CHECK(engine.pool().admit(sequence, length + steps), "no room in the cache for ", length + steps, " tokens");
  int64_t rows = 0;
  for (int64_t from = 0; from < length; from += rows) {
    rows = std::min(chunk, length - from);
    prefill(engine, sequence, prompt.data() + from, rows);
  }
  const auto take = [&](int64_t row) {
    out.logits.resize(out.logits.size() + V);
    engine.model().logits(std::vector<int64_t>{row}, out.logits.data() + out.logits.size() - V);
  };
  take(rows - 1);
  for (int64_t i = 0; i < steps; ++i) {
    const float* last = out.logits.data() + out.logits.size() - V;
    out.ids.push_back(fed ? (*fed)[i] : static_cast<int32_t>(best_of(last, V)));
    engine.model().decode_step(engine.pool().make_pass({&sequence}, {1}, {out.ids.back()}));
    KvPool::advance(sequence, 1);
    take(0);
  }
  return out;
}

/// "equal", or where two continuations part.
std::string first_difference(const std::vector<float>& a, const std::vector<float>& b, int64_t V) {
  if (a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0) return "equal";
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (memcmp(&a[i], &b[i], sizeof(float)) == 0) continue;
    const size_t row = i / V, end = std::min({(row + 1) * V, a.size(), b.size()});
    int64_t count = 0;
    for (size_t j = row * V; j < end; ++j) count += memcmp(&a[j], &b[j], sizeof(float)) != 0;
    return cat("output ", row, ", id ", i % V, ": ", a[i], " and ", b[i], ", ", count, " of ", V, " logits of the row");
  }
  return cat(a.size() / V, " and ", b.size() / V, " outputs");
}

/// Leads within six times what one logit may differ (root mean square) decide nothing.
void check_greedy(const Formats& f, const Ids& text, const Distance& allowed) {
  constexpr int64_t kLengths[] = {1, 2, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 191, 250, 320};
  constexpr int64_t kSteps = 70;  // more than a page
  const std::string name = cat("greedy, ", f.prefill, "-", f.decode, "-", f.kv);
  const auto cpu = load("cpu", f), card = load(arguments.backend, f);
  const int64_t V = cpu->info().vocabulary;
  const double tolerance = 6 * allowed.rms;
  int64_t compared = 0, close = 0, at = 0;
  std::vector<Request> requests;
  std::vector<Continuation> expected;
  for (int64_t length : kLengths) {
    Request request;
    request.ids.assign(text.begin() + at, text.begin() + at + length);
    at += 97;
    request.max_tokens = kSteps;
    request.sampling.temperature = 0;
    request.ignore_end_tokens = true;
    expected.push_back(continue_alone(*cpu, request.ids, nullptr, kSteps, length));
    const Continuation& want = expected.back();
    const Continuation got = continue_alone(*card, request.ids, &want.ids, kSteps, length);
    std::vector<double> rows;
    for (int64_t i = 0; i <= kSteps; ++i)
      rows.push_back(row_distance(want.logits.data() + i * V, got.logits.data() + i * V, V));
    std::nth_element(rows.begin(), rows.begin() + kSteps / 2, rows.end());
    if (const double middle = rows[kSteps / 2]; !(middle <= 2 * allowed.rms)) {  // one prompt is not the mean of all
      failed(cat(name, ": prompt of ", length, ": half of the rows differ by more than ", middle, " rms, allowed ",
                 2 * allowed.rms));
    }
    for (int64_t i = 0; i <= kSteps; ++i) {
      const float *a = want.logits.data() + i * V, *b = got.logits.data() + i * V;
      const int64_t best = best_of(a, V), on_card = best_of(b, V);
      const double lead = lead_of(a, V);
      ++compared;
      close += lead <= tolerance;
      if (best == on_card || lead <= tolerance) continue;
      failed(cat(name, ": prompt of ", length, ", behind ", i, " fed tokens: best id ", on_card, " (", b[on_card],
                 ", the CPU's ", b[best], ") on the card, ", best, " (", a[best], ", the card's ", a[on_card],
                 ") on the CPU, whose lead ", lead, " exceeds ", tolerance));
      break;
    }
    for (int64_t chunk : {int64_t{48}, int64_t{1}}) {
      const Continuation cut = continue_alone(*card, request.ids, &want.ids, kSteps, chunk);
      const std::string difference = first_difference(got.logits, cut.logits, V);
      if (difference != "equal")
        failed(cat(name, ": prompt of ", length, " as a whole and in pieces of ", chunk, ": ", difference));
    }
    requests.push_back(request);
  }
  // What users call: all prompts in one batch, each as far as its best tokens are beyond doubt.
  const std::vector<Completion> answers = card->generate(requests, {});
  for (size_t r = 0; r < answers.size(); ++r) {
    if (!answers[r].error.empty()) failed(cat(name, ": prompt of ", kLengths[r], ": ", answers[r].error));
    for (size_t i = 0; i < expected[r].ids.size(); ++i) {
      if (i < answers[r].ids.size() && answers[r].ids[i] == expected[r].ids[i]) continue;
      const double lead = lead_of(expected[r].logits.data() + i * V, V);
      if (lead > tolerance || i >= answers[r].ids.size()) {
        failed(cat(name, ", generate(): prompt of ", kLengths[r], ", answer's token ", i, " of ", answers[r].ids.size(),
                   ": ", i < answers[r].ids.size() ? answers[r].ids[i] : -1, ", on the CPU ", expected[r].ids[i],
                   " with a lead of ", lead, ", tolerance ", tolerance));
      }
      break;
    }
  }
  printf("       %s: %lld best tokens compared, %lld of them closer than %.3g\n", name.c_str(),
         static_cast<long long>(compared), static_cast<long long>(close), tolerance);
}

// ---- company

constexpr int kMostMembers = 40;

/// A sequence whose tokens are all known beforehand.
struct Member {
  int64_t number = 0, prompt = 0, cut = 0;  ///< cut: tokens of the prompt's first piece
  Ids tokens;
  CachedSequence cached;
  std::vector<float> logits;     // as Continuation's
  std::vector<int64_t> company;  ///< members of the pass of each of them

  int64_t fed() const { return cached.length; }
  bool done() const { return fed() == static_cast<int64_t>(tokens.size()); }
};

class Company {
 public:
  Company(const Formats& f, int64_t steps)
      : name_(cat("company, ", f.prefill, "-", f.decode, "-", f.kv)),
        steps_(steps),
        engine_(load(arguments.backend, f, kMostMembers + 1)),
        V_(engine_->info().vocabulary) {}

  void run() {
    const int before = failures;
    int64_t target = 1;
    for (int64_t step = 0; step < steps_ && failures < before + 3; ++step) {
      if (step % 20 == 0) target = 1 + below(kMostMembers);
      join(target);
      std::shuffle(members_.begin(), members_.end(), random_bits());
      decode();
      if (below(10) == 0) {
        Member& early = members_[below(size())];
        early.tokens.resize(early.fed());
      }
      leave(false);
    }
    leave(true);
    printf("       %s: %lld steps, %lld sequences, %lld rows of logits equal to the lone ones\n", name_.c_str(),
           static_cast<long long>(steps_), static_cast<long long>(checked_), static_cast<long long>(rows_checked_));
  }

 private:
  int64_t size() const { return static_cast<int64_t>(members_.size()); }

  Member make() {
    constexpr int64_t kEdges[] = {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 192};
    Member m;
    m.number = ++made_;
    m.prompt = below(2) ? kEdges[below(std::size(kEdges))] : 1 + below(300);
    m.cut = below(m.prompt + 1);
    const int64_t length = m.prompt + 1 + below(150);
    for (int64_t i = 0; i < length; ++i) m.tokens.push_back(static_cast<int32_t>(below(V_)));
    FUT_CHECK(engine_->pool().admit(m.cached, length), "no room in the cache for ", length, " tokens");
    return m;
  }

  /// One pass over the next `rows[i]` tokens of each; logits of those whose prompt is complete behind it.
  void pass(const std::vector<Member*>& members, const std::vector<int64_t>& rows, bool by_steps) {
    std::vector<CachedSequence*> sequences;
    Ids tokens;
    std::vector<int64_t> last;
    std::vector<Member*> complete;
    for (size_t i = 0; i < members.size(); ++i) {
      Member& m = *members[i];
      sequences.push_back(&m.cached);
      tokens.insert(tokens.end(), m.tokens.begin() + m.fed(), m.tokens.begin() + m.fed() + rows[i]);
      if (m.fed() + rows[i] < m.prompt) continue;
      complete.push_back(&m);
      last.push_back(static_cast<int64_t>(tokens.size()) - 1);
    }
    const ForwardPass forward = engine_->pool().make_pass(sequences, rows, tokens);
    by_steps ? engine_->model().decode_step(forward) : engine_->model().prefill(forward);
    for (size_t i = 0; i < members.size(); ++i) KvPool::advance(members[i]->cached, rows[i]);
    std::vector<float> logits(last.size() * V_);
    if (!last.empty()) engine_->model().logits(last, logits.data());
    for (size_t i = 0; i < complete.size(); ++i) {
      complete[i]->logits.insert(complete[i]->logits.end(), logits.begin() + i * V_, logits.begin() + (i + 1) * V_);
      complete[i]->company.push_back(static_cast<int64_t>(members.size()));
    }
  }

  /// Newcomers' prompts in two packed passes, cut where chance wants it.
  void join(int64_t target) {
    const int64_t old = size();
    while (size() < target) members_.push_back(make());
    for (const bool first : {true, false}) {
      std::vector<Member*> newcomers;
      std::vector<int64_t> rows;
      for (int64_t i = old; i < size(); ++i) {
        Member& m = members_[i];
        const int64_t count = first ? m.cut : m.prompt - m.cut;
        if (count == 0) continue;
        newcomers.push_back(&m);
        rows.push_back(count);
      }
      if (!newcomers.empty()) pass(newcomers, rows, false);
    }
  }

  void decode() {
    std::vector<Member*> all;
    for (Member& m : members_) all.push_back(&m);
    pass(all, std::vector<int64_t>(all.size(), 1), true);
  }

  /// Those who are done go, and are run again alone between the others' steps.
  void leave(bool all) {
    for (int64_t i = size(); i-- > 0;) {
      if (!all && !members_[i].done()) continue;
      check_alone(members_[i]);
      members_.erase(members_.begin() + i);
    }
  }

  void check_alone(Member& m) {
    const Ids prompt(m.tokens.begin(), m.tokens.begin() + m.prompt), fed(m.tokens.begin() + m.prompt, m.tokens.end());
    const int64_t steps = m.fed() - m.prompt;
    const Continuation alone = continue_alone(*engine_, prompt, &fed, steps, m.prompt);
    ++checked_;
    rows_checked_ += steps + 1;
    const std::string difference = first_difference(m.logits, alone.logits, V_);
    if (difference == "equal") return;
    std::string company;
    for (int64_t c : m.company) company += cat(company.empty() ? "" : " ", c);
    failed(cat(name_, ": sequence ", m.number, ", prompt ", m.prompt, " cut at ", m.cut, ", ", steps,
               " steps; in company and alone: ", difference, " (sequences in the pass of each output: ", company, ")"));
  }

  std::string name_;
  int64_t steps_;
  std::unique_ptr<EngineImpl> engine_;
  int64_t V_;
  std::vector<Member> members_;
  int64_t made_ = 0, checked_ = 0, rows_checked_ = 0;
};

// ---- refusals

void check_refusal(Formats f, int64_t kv_tokens, const std::string& expected) {
  try {
    EngineOptions options;
    options.backend = arguments.backend;
    options.prefill = f.prefill;
    options.decode = f.decode;
    options.kv = f.kv;
    options.kv_tokens = kv_tokens;
    EngineImpl engine(arguments.model, options);
    failed(
        cat("a model that cannot run was loaded: ", f.prefill, "-", f.decode, "-", f.kv, ", ", kv_tokens, " tokens"));
  } catch (const Error& error) {
    printf("       refused as it should be: %s\n", error.what());
    if (std::string(error.what()).find(expected) == std::string::npos) failed("the refusal does not say " + expected);
  }
}

int parse(int count, char** words) {
  for (int i = 1; i < count; i += 2) {
    const std::string flag = words[i], value = i + 1 < count ? words[i + 1] : "";
    if (value.empty()) return fprintf(stderr, "engine_gpu: %s needs a value\n", flag.c_str());
    if (flag == "--model") {
      arguments.model = value;
    } else if (flag == "--text") {
      arguments.text = value;
    } else if (flag == "--only") {
      arguments.only = value;
    } else if (flag == "--backend") {
      arguments.backend = value;
    } else if (flag == "--steps" || flag == "--seed") {
      (flag == "--steps" ? arguments.steps : arguments.seed) = std::stoll(value);
    } else {
      return fprintf(stderr, "engine_gpu: %s is unknown\n", flag.c_str());
    }
  }
  if (pairs().empty())
    return fprintf(stderr, "engine_gpu: --only %s names no pair, expected weights-cache such as int4-fp8\n",
                   arguments.only.c_str());
  return 0;
}

void check_all(const std::string& text) {
  Cost cost(text);
  for (const Run& run : runs()) check_scores(run, text, cost.of(run));
  const Ids ids = load("cpu", {"bf16", "bf16", "bf16"})->tokenize(text, false, false);
  for (const Formats& f : pairs()) {
    // Prompts go through prefill and answers through decode.
    const Distance prefill = cost.of({f, false}), decode = cost.of({f, true});
    check_greedy(f, ids, prefill.rms > decode.rms ? prefill : decode);
  }
  for (const Formats& f : pairs()) Company(f, arguments.steps).run();
  check_refusal({"bf16", "bf16", "bf16"}, int64_t{1} << 40, "free");
  if (arguments.backend == "cuda") check_refusal({"bf16", "bf16", "f32"}, 640, "f32");
}

}  // namespace

int main(int count, char** words) {
  if (parse(count, words) != 0) return 2;
  random_bits().seed(static_cast<uint32_t>(arguments.seed));
  setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    const std::string obstacle = arguments.backend == "cuda" ? cuda_obstacle() : "";
    if (!obstacle.empty()) {
      printf("skipped: %s\n", obstacle.c_str());
      return 77;
    }
    printf("       seed %lld\n", static_cast<long long>(arguments.seed));
    check_all(read_text());
  } catch (const std::exception& error) {
    failed(error.what());
  }
  printf(failures ? "%d checks failed\n" : "all passed\n", failures);
  return failures ? 1 : 0;
}
