# Op folders become object libraries; what a file is built with follows from its suffix, and nothing is listed by hand:
#   cpu.isa.cpp       three times on x86-64: baseline, AVX2+FMA, AVX-512 with BF16
#   *.cu              SM 8.0 and 9.0, PTX for later cards
#   *_sm90.cu         SM 9.0a alone (wgmma, clusters, bulk copies)
#   *_cublaslt.cpp    where CUDA is, by the C++ compiler (nvcc 13.0 with GCC 12 crashes on cuBLASLt host code in C++20)
#   torch.cpp         the PyTorch extension only
#   test*.cpp bench*.cpp   tests and benchmarks only
#   other *.cpp       the core library
# OBJECT, not STATIC: a static library silently drops objects that only register themselves.

# GCC 12 finds its own AVX-512 intrinsics uninitialised.
set(LIGER_WARNINGS -Wall -Wextra -Wno-unknown-pragmas $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized -Wno-uninitialized>)
# Without these three GCC keeps scalar semantics nobody needs here, and exp is 4x slower.
set(LIGER_MATH -fno-trapping-math -fno-math-errno -fno-signed-zeros)

function(liger_object_library name)
  cmake_parse_arguments(arg "" "" "SOURCES;OPTIONS" ${ARGN})
  add_library(${name} OBJECT ${arg_SOURCES})
  target_include_directories(${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>)
  target_compile_options(${name} PRIVATE ${arg_OPTIONS})
  if(LIGER_HAS_CUDA)
    target_compile_definitions(${name} PUBLIC LIGER_HAS_CUDA)
  endif()
  if(LIGER_SANITIZE)
    target_compile_options(${name} PUBLIC $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=address,undefined -fno-omit-frame-pointer -fno-sanitize-recover=undefined>)
    target_link_options(${name} PUBLIC -fsanitize=address,undefined)
  endif()
  set_property(GLOBAL APPEND PROPERTY LIGER_OBJECTS ${name})
endfunction()

# All sources of one folder, sorted into object libraries liger_<name>[_avx2|_avx512|_cuda|_sm90].
function(liger_add_folder name folder)
  file(GLOB isa CONFIGURE_DEPENDS ${folder}/*.isa.cpp)
  file(GLOB cxx CONFIGURE_DEPENDS ${folder}/*.cpp)
  file(GLOB sm90 CONFIGURE_DEPENDS ${folder}/*_sm90.cu)
  file(GLOB cuda CONFIGURE_DEPENDS ${folder}/*.cu)
  list(FILTER cxx EXCLUDE REGEX "/(torch|test[^/]*|bench[^/]*|[^/]*\\.isa|[^/]*_cublaslt|[^/]*_standalone)\\.cpp$")
  if(sm90)
    list(REMOVE_ITEM cuda ${sm90})
  endif()
  if(LIGER_HAS_CUDA)
    # Headers alone: the library is opened at run time.
    file(GLOB cublaslt CONFIGURE_DEPENDS ${folder}/*_cublaslt.cpp)
    set_source_files_properties(${cublaslt} PROPERTIES INCLUDE_DIRECTORIES "${CUDAToolkit_INCLUDE_DIRS}")
    list(APPEND cxx ${cublaslt})
  endif()
  set(cxx_options ${LIGER_WARNINGS} ${LIGER_MATH} $<$<CONFIG:Release>:-O3>)

  if(cxx OR isa)
    liger_object_library(liger_${name} SOURCES ${cxx} ${isa} OPTIONS ${cxx_options})
  endif()
  if(isa AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    liger_object_library(liger_${name}_avx2 SOURCES ${isa} OPTIONS ${cxx_options} -mavx2 -mfma -mf16c -mbmi2)
    liger_object_library(liger_${name}_avx512 SOURCES ${isa} OPTIONS ${cxx_options} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16
                         -mfma -mf16c -mbmi2)
  endif()
  if(LIGER_HAS_CUDA)
    set(common -Xcompiler=-Wall --expt-relaxed-constexpr -lineinfo -Xfatbin=-compress-all)
    if(cuda)
      liger_object_library(liger_${name}_cuda SOURCES ${cuda} OPTIONS ${common} -gencode=arch=compute_80,code=sm_80
                           "-gencode=arch=compute_90,code=[sm_90,compute_90]")
    endif()
    if(sm90)
      liger_object_library(liger_${name}_sm90 SOURCES ${sm90} OPTIONS ${common} -gencode=arch=compute_90a,code=sm_90a)
    endif()
  endif()
endfunction()
