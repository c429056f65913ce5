#include "engine/scheduler.h"

#include <algorithm>
#include <chrono>

#include "base/error.h"
#include "engine/sampler.h"

namespace fut {
namespace {

/// Adds the time until it is destroyed to a total.
class Stopwatch {
 public:
  explicit Stopwatch(double& total) : total_(total) {}
  ~Stopwatch() { total_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  double& total_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace

Scheduler::Scheduler(EngineImpl& engine, const std::vector<Request>& requests, const TextCallback& on_text)
    : engine_(engine), requests_(requests), on_text_(on_text), answers_(requests.size()) {
  engine_.start_timing();
  for (size_t i = 0; i < requests.size(); ++i) prepare(i);
}

void Scheduler::refuse(size_t index, const std::string& why) {
  answers_[index].finish_reason = "error";
  answers_[index].error = why;
}

/// Checks a request as a whole; one that cannot be answered is refused without touching the others.
void Scheduler::prepare(size_t index) {
  const Request& request = requests_[index];
  auto active = std::make_unique<Active>();
  active->index = index;
  try {
    active->prompt = engine_.prompt_of(request);
    answers_[index].prompt_tokens = static_cast<int64_t>(active->prompt.size());
    active->budget = engine_.budget_of(request, active->prompt);
  } catch (const Error& error) {
    return refuse(index, error.what());
  }
  if (active->budget == 0 && !request.prefill_only) {
    answers_[index].finish_reason = "length";
    return;
  }
  try {
    active->text = std::make_unique<TextStream>(engine_.tokenizer(), request.stop);
  } catch (const Error&) {  // ids in, ids out
  }
  waiting_.push_back(std::move(active));
}

void Scheduler::admit() {
  while (!waiting_.empty()) {
    Active& next = *waiting_.front();
    if (!engine_.pool().admit(next.sequence, static_cast<int64_t>(next.prompt.size()) + next.budget)) return;
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
}

/// Packs what is left of the prompts into passes of at most prefill_chunk rows.
void Scheduler::prefill_all() {
  for (;;) {
    std::vector<CachedSequence*> sequences;
    std::vector<Active*> members;
    std::vector<int64_t> rows, last_rows;
    std::vector<int32_t> tokens;
    int64_t room = engine_.options().prefill_chunk;
    for (const auto& active : running_) {
      const int64_t left = static_cast<int64_t>(active->prompt.size()) - active->fed;
      if (active->done || left == 0 || room == 0) continue;
      const int64_t take = std::min(left, room);
      room -= take;
      sequences.push_back(&active->sequence);
      members.push_back(active.get());
      rows.push_back(take);
      tokens.insert(tokens.end(), active->prompt.begin() + active->fed, active->prompt.begin() + active->fed + take);
      if (take == left) last_rows.push_back(static_cast<int64_t>(tokens.size()) - 1);
    }
    if (sequences.empty() || cancelled_) return;
    Timing& timing = engine_.timing();
    {
      const Stopwatch watch(timing.prefill_seconds);
      timing.prefill_tokens += static_cast<int64_t>(tokens.size());
      engine_.model().prefill(engine_.pool().make_pass(sequences, rows, tokens));
      logits_.resize(last_rows.size() * engine_.info().vocabulary);
      if (!last_rows.empty()) engine_.model().logits(last_rows, logits_.data());
    }
    if (on_text_ && !on_text_(members[0]->index, "")) cancelled_ = true;
    size_t finished = 0;
    for (size_t i = 0; i < members.size(); ++i) {
      KvPool::advance(members[i]->sequence, rows[i]);
      members[i]->fed += rows[i];
      if (members[i]->fed < static_cast<int64_t>(members[i]->prompt.size())) continue;
      take_token(*members[i], logits_.data() + finished++ * engine_.info().vocabulary);
    }
  }
}

void Scheduler::decode_once() {
  std::vector<CachedSequence*> sequences;
  std::vector<Active*> members;
  std::vector<int32_t> tokens;
  for (const auto& active : running_) {
    if (active->done) continue;
    sequences.push_back(&active->sequence);
    members.push_back(active.get());
    tokens.push_back(active->last);
  }
  if (members.empty() || cancelled_) return;
  const std::vector<int64_t> rows(members.size(), 1);
  std::vector<int64_t> row_ids(members.size());
  for (size_t i = 0; i < row_ids.size(); ++i) row_ids[i] = static_cast<int64_t>(i);
  Timing& timing = engine_.timing();
  {
    const Stopwatch watch(timing.decode_seconds);
    timing.decode_tokens += static_cast<int64_t>(members.size());
    engine_.model().decode_step(engine_.pool().make_pass(sequences, rows, tokens));
    logits_.resize(members.size() * engine_.info().vocabulary);
    engine_.model().logits(row_ids, logits_.data());
  }
  for (size_t i = 0; i < members.size(); ++i) {
    KvPool::advance(members[i]->sequence, 1);
    take_token(*members[i], logits_.data() + i * engine_.info().vocabulary);
  }
}

void Scheduler::take_token(Active& active, const float* logits) {
  if (requests_[active.index].prefill_only) return end(active, "length");
  int32_t token = -1;
  try {
    token = sample_token(logits, engine_.info().vocabulary, requests_[active.index].sampling, active.step);
  } catch (const Error& error) {
    answers_[active.index].error = cat(engine_.path(), ": ", error.what());
    return end(active, "error");
  }
  if (engine_.is_end(token) && !requests_[active.index].ignore_end_tokens) return end(active, "stop");
  ++active.step;
  --active.budget;
  active.last = token;
  answers_[active.index].ids.push_back(token);
  emit(active, active.text ? active.text->add(token) : "");
  if (active.text && active.text->stopped()) return end(active, "stop");
  if (active.budget == 0) end(active, "length");
}

void Scheduler::emit(Active& active, const std::string& piece) {
  answers_[active.index].text += piece;
  if (on_text_ && !on_text_(active.index, piece)) cancelled_ = true;
}

void Scheduler::end(Active& active, const std::string& reason) {
  if (active.done) return;
  active.done = true;
  answers_[active.index].finish_reason = reason;
  const std::string rest = active.text ? active.text->finish() : "";
  if (!rest.empty()) emit(active, rest);
  // The rest may complete a stop string that a shorter text only began.
  if (active.text && active.text->stopped()) answers_[active.index].finish_reason = "stop";
}

void Scheduler::retire() {
  for (const auto& active : running_) {
    if (active->done) engine_.pool().release(active->sequence);
  }
  std::erase_if(running_, [](const auto& active) { return active->done; });
}

std::vector<Completion> Scheduler::run() {
  while ((!waiting_.empty() || !running_.empty()) && !cancelled_) {
    admit();
    prefill_all();
    retire();
    decode_once();
    retire();
  }
  for (const auto& active : running_) {
    end(*active, "cancelled");
    engine_.pool().release(active->sequence);
  }
  for (const auto& active : waiting_) answers_[active->index].finish_reason = "cancelled";
  return std::move(answers_);
}

std::vector<Completion> EngineImpl::generate(const std::vector<Request>& requests, const TextCallback& on_text) {
  return Scheduler(*this, requests, on_text).run();
}

}  // namespace fut
