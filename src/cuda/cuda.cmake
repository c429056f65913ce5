# The room src/cuda, where nvcc is found and FUT_CUDA is on; elsewhere the build is complete without it.
# CMake 3.25 knows no C++20 for nvcc 13 and is told. Contraction is off because codes must
# be those of the CPU; kernels say fmaf where they want it. The CUDA runtime is linked statically, and looks the driver up
# when it runs.
if(FUT_CUDA)
  include(CheckLanguage)
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  check_language(CUDA)
endif()
if(FUT_CUDA AND CMAKE_CUDA_COMPILER)
  enable_language(CUDA)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA_FLAGS_RELEASE "-O3")
  add_library(fut_cuda_flags INTERFACE)
  target_compile_options(fut_cuda_flags INTERFACE "SHELL:-gencode=arch=compute_90a,code=sm_90a" -fmad=false
    --expt-relaxed-constexpr "SHELL:-Xptxas -warn-spills,-warn-lmem-usage,-Werror")
  target_include_directories(fut_cuda_flags INTERFACE ${PROJECT_SOURCE_DIR}/src)
  file(GLOB cuda_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cuda/*.cu)
  add_library(fut_cuda STATIC ${cuda_sources})
  target_link_libraries(fut_cuda PRIVATE fut_cuda_flags)
  set_target_properties(fut_cuda PROPERTIES CUDA_COMPILER_LAUNCHER ${PROJECT_SOURCE_DIR}/scripts/nvcc_strict.sh)
  # By path: a project that only adds this one as a folder does not know CUDA as a language, and links with g++ alone.
  find_library(FUT_CUDA_RUNTIME cudart_static REQUIRED
    HINTS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}/../lib64)
  target_link_libraries(fut_cuda INTERFACE fut_ops ${FUT_CUDA_RUNTIME} Threads::Threads ${CMAKE_DL_LIBS} rt)
  target_link_libraries(fut_engine PRIVATE fut_cuda)
  target_compile_definitions(fut_engine PRIVATE FUT_HAS_CUDA)
  if(FUT_TESTS)
    enable_testing()
    add_subdirectory(tests/gpu)
  endif()
endif()
