// Unicode's normalisation form C, for tokenizers whose files ask for it.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace fut {

/// `text` in form C; nothing if it is that already. Bytes that are no UTF-8 stay, and nothing is composed across them.
std::optional<std::string> to_nfc(std::string_view text);

}  // namespace fut
