// GGUF: counts, types, lengths and offsets that are wrong, and whole models that are right but for one key. What opens
// is used as the engine uses it: configuration, tensors, tokenizer, chat template.
#include <cstring>

#include "model/config.h"
#include "mutate.h"
#include "use_tensor.h"
#include "use_tokenizer.h"

namespace fut::fuzz {
namespace {

constexpr char kFile[] = "model.gguf";
constexpr uint32_t kText = 8, kArray = 9, kTypes = 13;
constexpr uint64_t kWidths[kTypes] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
constexpr size_t kMostData = 1 << 14;

const std::vector<std::string> kWords = {"general.architecture",
                                         "llama",
                                         "general.alignment",
                                         "split.count",
                                         "llama.embedding_length",
                                         "llama.expert_count",
                                         "llama.attention.head_count",
                                         "llama.attention.head_count_kv",
                                         "llama.attention.key_length",
                                         "llama.attention.value_length",
                                         "llama.attention.layer_norm_rms_epsilon",
                                         "llama.rope.dimension_count",
                                         "llama.rope.freq_base",
                                         "llama.rope.scaling.type",
                                         "llama.rope.scaling.factor",
                                         "llama.rope.scale_linear",
                                         "llama.feed_forward_length",
                                         "llama.block_count",
                                         "llama.context_length",
                                         "tokenizer.ggml.model",
                                         "tokenizer.ggml.pre",
                                         "tokenizer.ggml.tokens",
                                         "tokenizer.ggml.merges",
                                         "tokenizer.ggml.scores",
                                         "tokenizer.ggml.token_type",
                                         "tokenizer.ggml.bos_token_id",
                                         "tokenizer.ggml.eos_token_id",
                                         "tokenizer.ggml.eot_token_id",
                                         "tokenizer.ggml.unknown_token_id",
                                         "tokenizer.ggml.add_bos_token",
                                         "tokenizer.ggml.add_space_prefix",
                                         "tokenizer.ggml.remove_extra_whitespaces",
                                         "tokenizer.chat_template",
                                         "gpt2",
                                         "llama-bpe",
                                         "smollm",
                                         "qwen2",
                                         "qwen3",
                                         "qwen2.block_count",
                                         "qwen3.rope.dimension_count",
                                         "llama.attention.sliding_window",
                                         "linear",
                                         "none",
                                         "yarn",
                                         "token_embd.weight",
                                         "output.weight",
                                         "output_norm.weight",
                                         "rope_freqs.weight",
                                         "blk.0.attn_q.weight",
                                         "blk.0.attn_k.weight",
                                         "blk.0.attn_q.bias",
                                         "blk.0.attn_k_norm.weight",
                                         "blk.0.attn_norm.weight",
                                         "blk.99999999999999999999.ffn_up.weight",
                                         "blk.-1.ffn_up.weight"};

template <class T>
std::string bytes_of(T value) {
  std::string bytes(sizeof(T), '\0');
  memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}
std::string text_bytes(std::string_view text) { return bytes_of(uint64_t{text.size()}) + std::string(text); }

struct Entry {
  std::string key, value;  // `value`: all bytes behind the type
  uint32_t type;
};
struct TensorEntry {
  std::string name;
  std::vector<uint64_t> extents;
  uint32_t type;
  uint64_t offset;
};

/// A file in parts. Only seeds are read, which are right.
struct Gguf {
  uint32_t version = 3;
  uint64_t alignment = 32;
  std::vector<Entry> entries;
  std::vector<TensorEntry> tensors;
  std::string data;
};

class SeedReader {
 public:
  explicit SeedReader(const std::string& file) : file_(file) {}

  Gguf read() {
    Gguf gguf;
    at_ = 4;
    gguf.version = number<uint32_t>();
    const auto tensors = number<uint64_t>(), entries = number<uint64_t>();
    for (uint64_t i = 0; i < entries; ++i) {
      Entry entry;
      entry.key = text();
      entry.type = number<uint32_t>();
      const size_t begin = at_;
      skip_value(entry.type);
      entry.value = file_.substr(begin, at_ - begin);
      gguf.entries.push_back(std::move(entry));
    }
    for (uint64_t i = 0; i < tensors; ++i) {
      TensorEntry tensor;
      tensor.name = text();
      tensor.extents.resize(number<uint32_t>());
      for (uint64_t& extent : tensor.extents) extent = number<uint64_t>();
      tensor.type = number<uint32_t>();
      tensor.offset = number<uint64_t>();
      gguf.tensors.push_back(std::move(tensor));
    }
    at_ = (at_ + gguf.alignment - 1) / gguf.alignment * gguf.alignment;
    gguf.data = file_.substr(at_);
    return gguf;
  }

 private:
  template <class T>
  T number() {
    T value;
    memcpy(&value, file_.substr(at_, sizeof(T)).data(), sizeof(T));
    at_ += sizeof(T);
    return value;
  }
  std::string text() {
    const auto length = number<uint64_t>();
    at_ += length;
    return file_.substr(at_ - length, length);
  }
  void skip_value(uint32_t type) {
    uint64_t count = 1;
    if (type == kArray) {
      type = number<uint32_t>();
      count = number<uint64_t>();
    }
    if (type != kText) at_ += count * kWidths[type];
    for (uint64_t i = 0; type == kText && i < count; ++i) text();
  }

  const std::string& file_;
  size_t at_ = 0;
};

std::string bytes_of(const Gguf& gguf, Random& random) {
  const auto counted = [&](uint64_t count) { return random.chance(2) ? odd_number(random) : count; };
  const auto text = [&](const std::string& s) { return bytes_of(counted(s.size())) + s; };
  std::string file =
      "GGUF" + bytes_of(gguf.version) + bytes_of(counted(gguf.tensors.size())) + bytes_of(counted(gguf.entries.size()));
  for (const Entry& entry : gguf.entries) file += text(entry.key) + bytes_of(entry.type) + entry.value;
  for (const TensorEntry& tensor : gguf.tensors) {
    file += text(tensor.name) + bytes_of(static_cast<uint32_t>(counted(tensor.extents.size())));
    for (const uint64_t extent : tensor.extents) file += bytes_of(extent);
    file += bytes_of(tensor.type) + bytes_of(tensor.offset);
  }
  file.resize((file.size() + gguf.alignment - 1) / gguf.alignment * gguf.alignment);
  return file + gguf.data;
}

constexpr size_t kArrayHead = 12;  // element type and count

void change_array(std::string& value, Random& random) {
  if (random.chance(20)) {
    value.replace(4, 8, bytes_of(odd_number(random)));  // the count alone
  } else if (random.chance(20)) {
    value.replace(0, 4, bytes_of(static_cast<uint32_t>(random.below(kTypes + 1))));
  } else {
    const size_t at = kArrayHead + random.below(value.size() - kArrayHead + 1);
    const size_t width = std::min(value.size() - at, size_t{1} << random.below(4));
    value.replace(at, width, bytes_of(odd_number(random)).substr(0, width));
  }
}

/// Another value of the same type, or of another.
void change_value(Entry& entry, Random& random) {
  const size_t what = random.below(6);
  if (what == 0) {
    entry.type = static_cast<uint32_t>(random.chance(80) ? random.below(kTypes + 1) : odd_number(random));
  } else if (entry.type == kText && what < 5) {
    entry.value = text_bytes(odd_text(random, kWords));
  } else if (entry.type == kArray && what < 5 && entry.value.size() >= kArrayHead) {
    change_array(entry.value, random);
  } else if (entry.type < kTypes && kWidths[entry.type] > 0) {
    entry.value = bytes_of(odd_number(random)).substr(0, kWidths[entry.type]);
  } else {
    mutate_bytes(entry.value, random);
  }
}

/// The texts of an array; none if it is no array of texts, or was broken before.
std::vector<std::string> texts_of(const Entry& entry) {
  std::vector<std::string> texts;
  if (entry.type != kArray || !entry.value.starts_with(bytes_of(kText))) return texts;
  for (size_t at = kArrayHead; at + 8 <= entry.value.size();) {
    uint64_t length = 0;
    memcpy(&length, entry.value.data() + at, 8);
    at += 8;
    if (length > entry.value.size() - at) return {};
    texts.push_back(entry.value.substr(at, length));
    at += length;
  }
  return texts;
}

/// An array of texts with one added, changed or taken away, its count right.
void change_texts(Entry& entry, Random& random) {
  std::vector<std::string> texts = texts_of(entry);
  if (texts.empty()) return;
  const auto place = texts.begin() + static_cast<std::ptrdiff_t>(random.below(texts.size()));
  switch (random.below(4)) {
    case 0: texts.insert(place, odd_text(random, kWords)); break;
    case 1: texts.erase(place); break;
    case 2: *place = odd_text(random, texts); break;
    default: mutate_bytes(*place, random);
  }
  entry.value = bytes_of(kText) + bytes_of(uint64_t{texts.size()});
  for (const std::string& text : texts) entry.value += text_bytes(text);
}

void change_tensor(TensorEntry& tensor, Random& random) {
  switch (random.below(5)) {
    case 0: tensor.name = odd_text(random, kWords); break;
    case 1:
      if (!tensor.extents.empty()) {
        tensor.extents[random.below(tensor.extents.size())] = random.chance(50) ? random.below(70) : odd_number(random);
      }
      break;
    case 2: tensor.extents.resize(random.below(6), random.chance(50) ? 1 : odd_number(random)); break;
    case 3: tensor.type = static_cast<uint32_t>(random.chance(90) ? random.below(41) : odd_number(random)); break;
    default: tensor.offset = random.chance(50) ? random.below(8) * 32 : odd_number(random);
  }
}

template <class List>
void change_list(List& list, Random& random) {
  if (list.empty()) return;
  const auto at = list.begin() + static_cast<std::ptrdiff_t>(random.below(list.size()));
  switch (random.below(3)) {
    case 0: list.erase(at); break;
    case 1: list.push_back(typename List::value_type(*at)); break;
    default: std::swap(*at, list[random.below(list.size())]);
  }
}

class GgufTarget final : public Target {
 public:
  std::vector<std::string> files() const override { return {kFile}; }

  void mutate(Input& input, Random& random, const std::vector<Input>& seeds) const override {
    std::string& file = input.at(kFile);
    if (random.chance(10)) return mutate_bytes(file, random, random.pick(seeds).at(kFile));
    Gguf gguf = SeedReader(file).read();
    for (size_t count = 1 + random.below(random.chance(70) ? 2 : 6); count > 0; --count) {
      const size_t what = random.below(20);
      if (what < 8 && !gguf.entries.empty()) {
        Entry& entry = gguf.entries[random.below(gguf.entries.size())];
        what < 3 ? change_texts(entry, random) : change_value(entry, random);
      } else if (what < 10 && !gguf.entries.empty()) {
        gguf.entries[random.below(gguf.entries.size())].key = odd_text(random, kWords);
      } else if (what < 12) {
        change_list(gguf.entries, random);
      } else if (what < 13) {
        add_entry(gguf, random);
      } else if (what < 17 && !gguf.tensors.empty()) {
        change_tensor(gguf.tensors[random.below(gguf.tensors.size())], random);
      } else if (what < 18) {
        change_list(gguf.tensors, random);
      } else if (what < 19) {
        gguf.data.resize(random.below(2 * gguf.data.size() + 1));
      } else {
        random.chance(50) ? gguf.version = static_cast<uint32_t>(random.below(5))
                          : gguf.alignment = 1 + random.below(128);
      }
    }
    if (random.chance(40)) place_tensors(gguf);
    file = bytes_of(gguf, random);
  }

  void run(const Input& input, const std::string& folder) const override {
    const std::string path = folder + "/" + kFile;
    const auto checkpoint = Checkpoint::open(path);
    may_refuse(path, [&] { parse_config(checkpoint->config_json(), checkpoint->generation_config_json(), path); });
    for (const TensorInfo& tensor : checkpoint->tensors()) {
      may_refuse(path, [&] {
        int64_t size = -1;
        const uint8_t* const bytes = checkpoint->raw(tensor.name, &size);
        require(size > 0 && static_cast<size_t>(size) <= input.at(kFile).size(), "a tensor larger than the file");
        require(bytes[0] + bytes[size - 1] >= 0, "raw bytes that cannot be read");
        use_tensor(*checkpoint, tensor);
      });
    }
    may_refuse(path,
               [&] { use_tokenizer(*checkpoint->tokenizer(), "Once upon  a time\n<s>\xff\xe2\x96\x81 1234 \u00e9"); });
    may_refuse(path, [&] { checkpoint->tokenizer_files(); });
    may_refuse(path, [&] { checkpoint->chat_template(); });
  }

 private:
  static void add_entry(Gguf& gguf, Random& random) {
    const std::string& key = random.pick(kWords);
    const size_t what = random.below(4);
    constexpr uint32_t kNumbers[] = {4, 5, 6, 7, 10, 12};
    const uint32_t type = what == 0 ? kText : random.pick(kNumbers);
    const std::string number = bytes_of(odd_number(random)).substr(0, kWidths[type]);
    gguf.entries.push_back({key, type == kText ? text_bytes(odd_text(random, kWords)) : number, type});
  }

  /// Offsets that follow from types and extents, one tensor after the other, and as much data.
  static void place_tensors(Gguf& gguf) {
    uint64_t at = 0;
    for (TensorEntry& tensor : gguf.tensors) {
      tensor.offset = at;
      uint64_t elements = 1;
      for (const uint64_t extent : tensor.extents) elements *= extent;
      at += (elements * 4 + 31) / 32 * 32;  // as if all were F32, which takes the most
    }
    gguf.data.resize(at <= kMostData ? at : kMostData, '\x3c');
  }
};

}  // namespace

std::unique_ptr<Target> gguf_target() { return std::make_unique<GgufTarget>(); }

}  // namespace fut::fuzz
