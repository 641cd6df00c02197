# The core's own test; cross-compiled builds and sanitizers run this one.
add_executable(halfbyte_selfcheck EXCLUDE_FROM_ALL native/tests/selfcheck.cpp)
target_link_libraries(halfbyte_selfcheck PRIVATE halfbyte_core)
target_compile_options(halfbyte_selfcheck PRIVATE ${HALFBYTE_FLAGS} -O1)

# Random cases of the core: under libFuzzer, or (the other sanitizers) with a driver of its own.
if(HALFBYTE_SANITIZE)
  add_executable(halfbyte_fuzz EXCLUDE_FROM_ALL native/tests/fuzz.cpp)
  target_link_libraries(halfbyte_fuzz PRIVATE halfbyte_core)
  target_compile_options(halfbyte_fuzz PRIVATE ${HALFBYTE_FLAGS})
  if(HALFBYTE_SANITIZE STREQUAL "fuzzer")
    target_link_options(halfbyte_fuzz PRIVATE -fsanitize=fuzzer -static-libstdc++)
  else()
    target_compile_definitions(halfbyte_fuzz PRIVATE HALFBYTE_FUZZ_ALONE)
  endif()
endif()
