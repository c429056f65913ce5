// fut bench op | block | step.
#pragma once

namespace fut::app {

/// argv[0] is what to measure: "op", "block" or "step".
int bench_parts(int argc, const char* const* argv);

}  // namespace fut::app
