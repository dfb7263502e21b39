# The C++ library and its CMake package: find_package(liger_kernel), target liger_kernel::liger_kernel. The core and every op
# in one archive (or, with BUILD_SHARED_LIBS, one shared library), with the standalone host that the torch extension leaves out.
# The installed target links the archive whole: ops register themselves, and a linker drops objects that nobody names.

# --- BLAS of the standalone host: an optimised one is worth having, the reference one is 20x slower than our own loop ---
set(LIGER_BLAS "AUTO" CACHE STRING "CPU GEMM of the standalone host: AUTO (OpenBLAS, MKL or BLIS when found), ON (any BLAS) or OFF (our own loop)")
set_property(CACHE LIGER_BLAS PROPERTY STRINGS AUTO ON OFF)
if(LIGER_BLAS STREQUAL "AUTO" AND NOT DEFINED BLA_VENDOR)
  foreach(BLA_VENDOR OpenBLAS Intel10_64lp FLAME)
    find_package(BLAS QUIET)
    if(BLAS_FOUND)
      break()
    endif()
  endforeach()
  set(blas_vendor ${BLA_VENDOR})
  unset(BLA_VENDOR)
elseif(NOT LIGER_BLAS STREQUAL "OFF")
  find_package(BLAS QUIET)
  set(blas_vendor ${BLA_VENDOR})
endif()
if(BLAS_FOUND)
  find_path(LIGER_CBLAS_INCLUDE cblas.h PATH_SUFFIXES openblas openblas-pthread mkl blis)
  include(CheckCXXSourceCompiles)
  set(CMAKE_REQUIRED_LIBRARIES BLAS::BLAS)
  set(CMAKE_REQUIRED_INCLUDES ${LIGER_CBLAS_INCLUDE})
  check_cxx_source_compiles("#include <cblas.h>
int main() { cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 0, 0, 0, 1, nullptr, 1, nullptr, 1, 0, nullptr, 1); }" LIGER_HAS_BLAS)
  unset(CMAKE_REQUIRED_LIBRARIES)
  unset(CMAKE_REQUIRED_INCLUDES)
endif()
if(LIGER_BLAS STREQUAL "ON" AND NOT LIGER_HAS_BLAS)
  message(FATAL_ERROR "LIGER_BLAS=ON, but no BLAS with cblas.h was found: install one (libopenblas-dev), or configure with LIGER_BLAS=OFF")
endif()

# --- the library ---
file(GLOB standalone_sources CONFIGURE_DEPENDS src/liger_kernel/core/*_standalone.cpp)
liger_object_library(liger_standalone SOURCES ${standalone_sources} OPTIONS ${LIGER_WARNINGS} ${LIGER_MATH} $<$<CONFIG:Release>:-O3>)
find_package(Threads REQUIRED)
get_property(objects GLOBAL PROPERTY LIGER_OBJECTS)
list(TRANSFORM objects REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>")
add_library(liger_kernel ${objects})
set_target_properties(liger_kernel PROPERTIES EXPORT_NAME library VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR} LINKER_LANGUAGE CXX)
target_compile_features(liger_kernel INTERFACE cxx_std_20)
target_include_directories(liger_kernel INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src> $<INSTALL_INTERFACE:include>)
target_link_libraries(liger_kernel PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
if(LIGER_HAS_BLAS)
  target_compile_definitions(liger_standalone PRIVATE LIGER_HAS_BLAS)
  target_include_directories(liger_standalone SYSTEM PRIVATE ${LIGER_CBLAS_INCLUDE})
  target_link_libraries(liger_kernel PRIVATE BLAS::BLAS)
endif()
if(LIGER_HAS_CUDA)
  target_link_libraries(liger_standalone PRIVATE CUDA::cudart_static)
  target_link_libraries(liger_kernel PRIVATE CUDA::cudart_static)
  target_compile_definitions(liger_kernel INTERFACE LIGER_HAS_CUDA)
endif()
if(LIGER_SANITIZE)
  target_link_options(liger_kernel PUBLIC -fsanitize=address,undefined)
endif()

# --- install: component cpp ---
# The generated file tests these, so they must not be empty.
foreach(flag LIGER_HAS_CUDA LIGER_HAS_BLAS BUILD_SHARED_LIBS)
  if(${flag})
    set(config_${flag} ON)
  else()
    set(config_${flag} OFF)
  endif()
endforeach()
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/liger_kernel)
install(TARGETS liger_kernel EXPORT liger_kernel_targets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp)
install(DIRECTORY src/liger_kernel DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT cpp
        FILES_MATCHING PATTERN "*.h" PATTERN "*.inc" PATTERN "*.inl" PATTERN "*.cuh"
        PATTERN torch EXCLUDE PATTERN "test*.h" EXCLUDE PATTERN __pycache__ EXCLUDE)
install(EXPORT liger_kernel_targets NAMESPACE liger_kernel:: DESTINATION ${package_folder} COMPONENT cpp)
configure_package_config_file(cmake/liger_kernelConfig.cmake.in liger_kernelConfig.cmake INSTALL_DESTINATION ${package_folder})
write_basic_package_version_file(liger_kernelConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/liger_kernelConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/liger_kernelConfigVersion.cmake
        DESTINATION ${package_folder} COMPONENT cpp)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/liger_kernel COMPONENT cpp)
