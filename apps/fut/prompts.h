// Files of prompts: JSON lines, each a string or an object with the prompt and how to answer it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "futransformer/engine.h"

namespace fut::app {

/// The requests of a prompts file in their order, each `standard` with what its line says. `path` names the file in
/// messages. Blank lines are passed over; a file without any prompt is refused.
std::vector<Request> parse_prompts(std::string_view text, const std::string& path, const Request& standard);

}  // namespace fut::app
