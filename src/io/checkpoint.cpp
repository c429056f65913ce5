#include "io/checkpoint.h"

#include <filesystem>

#include "base/error.h"
#include "io/gguf.h"
#include "io/hf_folder.h"
#include "io/mapped_file.h"

namespace fut {

std::unique_ptr<Checkpoint> Checkpoint::open(const std::string& path) {
  FUT_CHECK(!path.empty(), "the name of the model is empty");
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  FUT_CHECK(std::filesystem::exists(status), path,
            ": cannot open: ", error ? error.message() : std::string("No such file or directory"));
  if (std::filesystem::is_directory(status)) return open_hf_folder(path);
  FUT_CHECK(!path.ends_with(".safetensors"), path, ": give the folder that holds config.json, not the file in it");
  return open_gguf(path);
}

std::vector<float> Checkpoint::read_f32(const std::string& name) const {
  const TensorInfo* const info = find(name);
  return read_rows(name, 0, info ? rows_of(*info) : 1);
}

int Checkpoint::int4_group(const std::string&, std::string*) const { return 0; }

HostWeight Checkpoint::int4_codes(const std::string& name) const {
  fail(path_, ": tensor ", printable(name), " has no 4-bit codes of the engine's own");
}

bool Checkpoint::check_rows(const TensorInfo& tensor, int64_t first, int64_t count) {
  const int64_t rows = rows_of(tensor);
  FUT_CHECK(first >= 0 && count >= 0 && first <= rows && count <= rows - first, tensor.file, ": tensor ",
            printable(tensor.name), ": ", count, " rows from ", first, " on, of ", rows);
  return count == rows;
}

}  // namespace fut
