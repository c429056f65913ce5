// Loads a model and prints how a prompt goes on, piece by piece, as it is written.
//
//   generate_example models/bard "To be, or not"
//
// A program of your own needs two lines of CMake, and this one header:
//
//   add_subdirectory(futransformer)
//   target_link_libraries(my_program PRIVATE futransformer::futransformer)
//
// This folder is such a project: cmake -S examples -B build-example && cmake --build build-example
#include <futransformer/engine.h>

#include <iostream>

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: " << argv[0] << " MODEL PROMPT\n";
    return 2;
  }
  try {
    const auto engine = fut::Engine::load(argv[1]);
    fut::Request request;
    request.prompt = argv[2];
    request.max_tokens = 64;
    request.sampling.temperature = 0;  // the likeliest token each time
    const auto answers = engine->generate({request}, [](size_t, std::string_view piece) {
      std::cout << piece << std::flush;
      return true;  // false would end it here
    });
    std::cout << "\n";
    if (answers[0].finish_reason != "error") return 0;
    std::cerr << answers[0].error << "\n";
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
  }
  return 1;
}
