// Benchmarks' timer on the card: replayed work leaves what work leaves, whether it can be recorded or not.
#include <algorithm>

#include "cuda/replay.h"
#include "support.h"

using namespace fut;
using namespace fut::test;

namespace {

enum class Rows { in_order, listed };
enum class Tokens { same, others_before };  ///< others take the place of these on the card: copied in every run

/// embed, then lm_head.
void check(Backend& gpu, Rows order, Tokens list) {
  const int64_t T = 5, D = 576, V = 1000;
  const PlacedWeight table = gpu.place(encode_weight(Dtype::bf16, 0, normals(V * D).data(), V, D, "table"));
  const PlacedWeight head = gpu.place(encode_weight(Dtype::int4, 64, normals(V * D).data(), V, D, "head"));
  std::vector<int32_t> tokens(T);
  for (int32_t& token : tokens) token = static_cast<int32_t>(below(V));
  const std::vector<int32_t> others(T, 7);
  const std::vector<int64_t> rows = {4, 2, 0, 3, 1};
  Twin<float> x(gpu, T * D, 0xff), squares(gpu, T, 0xff), logits(gpu, T * V, 0xff);
  Residual r;
  r.dtype = Dtype::f32;
  r.x = x.gpu();
  r.sum_squares = squares.gpu();
  const auto work = [&] {
    if (list == Tokens::others_before) gpu.embed({r, table.weight, others.data(), T, D});
    gpu.embed({r, table.weight, tokens.data(), T, D});
    gpu.lm_head({logits.gpu(), r, head.weight, order == Rows::listed ? rows.data() : nullptr, T});
  };
  work();
  const std::vector<float> expected = logits.fetch("logits");
  logits.send();  // poison
  const std::string name = cat(list == Tokens::same ? "replayed" : "launched anew", ", rows ",
                               order == Rows::listed ? "of a list" : "in order");
  const std::vector<double> seconds = time_on_card(gpu, work, 7, 1e-3);
  const std::vector<float> got = logits.fetch("logits");
  expect(memcmp(got.data(), expected.data(), got.size() * sizeof(float)) == 0, name + ": other logits than of one run");
  expect(seconds.size() == 7, cat(name, ": ", seconds.size(), " samples"));
  for (double s : seconds) expect(s > 1e-6 && s < 1e-1, cat(name, ": a run of ", s, " s"));
  printf("       %s: %.1f .. %.1f us a run\n", name.c_str(), *std::min_element(seconds.begin(), seconds.end()) * 1e6,
         *std::max_element(seconds.begin(), seconds.end()) * 1e6);
}

}  // namespace

int main() {
  return run_on_card([](Backend& gpu) {
    for (const Rows order : {Rows::in_order, Rows::listed}) {
      for (const Tokens list : {Tokens::same, Tokens::others_before, Tokens::same}) check(gpu, order, list);
    }
    printf("       clock %d MHz\n", card_clock_mhz());
  });
}
