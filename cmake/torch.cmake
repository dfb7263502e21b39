# _C: the core plus every op's torch.cpp, against the installed torch's headers and stable ABI (2.10), so that one binary
# serves every later torch. Torch is found beside the interpreter; it is never installed from here.
set(LIGER_PYTHON "${Python_EXECUTABLE}" CACHE FILEPATH "Interpreter whose torch is built against")
if(NOT LIGER_PYTHON)
  find_program(LIGER_PYTHON NAMES python3 python REQUIRED)
endif()
# pip's isolated builds hide site-packages from sys.path; the folder is there all the same.
execute_process(
  COMMAND ${LIGER_PYTHON} -c "
import importlib.util, pathlib, sysconfig
spec = importlib.util.find_spec('torch')
roots = [pathlib.Path(spec.origin).parent] if spec and spec.origin else []
roots += [pathlib.Path(sysconfig.get_path(k)) / 'torch' for k in ('platlib', 'purelib')]
print(next((str(r) for r in roots if (r / 'include/torch/csrc/stable').is_dir()), ''))"
  OUTPUT_VARIABLE torch_root OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
if(NOT torch_root)
  message(FATAL_ERROR "liger_kernel is built against the PyTorch that you use, and ${LIGER_PYTHON} has none with the stable ABI: "
                      "install torch >= 2.10 first, then run pip install --no-build-isolation .")
endif()

file(GLOB torch_sources CONFIGURE_DEPENDS src/liger_kernel/ops/*/torch.cpp src/liger_kernel/core/torch/*.cpp)
get_property(objects GLOBAL PROPERTY LIGER_OBJECTS)
add_library(_C SHARED ${torch_sources})
target_link_libraries(_C PRIVATE ${objects})
target_include_directories(_C SYSTEM PRIVATE ${torch_root}/include)
target_compile_definitions(_C PRIVATE TORCH_TARGET_VERSION=0x020a000000000000)
target_compile_options(_C PRIVATE ${LIGER_WARNINGS} $<$<CONFIG:Release>:-O2>)
# torch loads its libraries locally, so symbols must be bound to libtorch_cpu by name.
target_link_libraries(_C PRIVATE ${torch_root}/lib/libtorch_cpu.so ${CMAKE_DL_LIBS})
# No rpath into the build machine's torch, no symbols of ours for others.
set_target_properties(_C PROPERTIES PREFIX "" SUFFIX ".abi3.so" SKIP_BUILD_RPATH ON INSTALL_RPATH "" LINK_FLAGS "-Wl,--exclude-libs,ALL -Wl,--as-needed -Wl,-z,defs")
if(LIGER_HAS_CUDA)
  target_link_libraries(_C PRIVATE CUDA::cudart_static)
endif()
install(TARGETS _C LIBRARY DESTINATION liger_kernel COMPONENT python)
