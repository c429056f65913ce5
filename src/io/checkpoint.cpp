#include "io/checkpoint.h"

#include <filesystem>

#include "base/error.h"
#include "io/gguf.h"
#include "io/hf_folder.h"

namespace fut {

std::unique_ptr<Checkpoint> Checkpoint::open(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  FUT_CHECK(std::filesystem::exists(status), path,
            ": cannot open: ", error ? error.message() : std::string("No such file or directory"));
  if (std::filesystem::is_directory(status)) return open_hf_folder(path);
  FUT_CHECK(!path.ends_with(".safetensors"), path, ": give the folder that holds config.json, not the file in it");
  return open_gguf(path);
}

}  // namespace fut
