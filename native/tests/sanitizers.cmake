set(HALFBYTE_SANITIZE "" CACHE STRING "address: AddressSanitizer and UndefinedBehaviorSanitizer; thread: ThreadSanitizer (tools/sanitize.py); fuzzer: libFuzzer and the first two (Clang)")
if(HALFBYTE_SANITIZE STREQUAL "address")
  set(HALFBYTE_SANITIZER -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=undefined,float-cast-overflow)
elseif(HALFBYTE_SANITIZE STREQUAL "thread")
  set(HALFBYTE_SANITIZER -fsanitize=thread)
elseif(HALFBYTE_SANITIZE STREQUAL "fuzzer")
  # Memory is checked by calls, and what undefined behaviour GCC's build checks at every access is left out: Clang compiles the kernels in
  # a minute or two a set then, and for many minutes otherwise.
  set(HALFBYTE_SANITIZER -fsanitize=fuzzer-no-link,address,undefined,float-cast-overflow -fno-sanitize-recover=undefined,float-cast-overflow
    -fsanitize-address-outline-instrumentation -fno-sanitize=null,alignment,pointer-overflow,object-size)
elseif(HALFBYTE_SANITIZE)
  message(FATAL_ERROR "HALFBYTE_SANITIZE=${HALFBYTE_SANITIZE}; address, thread and fuzzer are allowed")
endif()
if(HALFBYTE_SANITIZE)
  list(APPEND HALFBYTE_FLAGS -O1 -g1 -DHALFBYTE_SMALL ${HALFBYTE_SANITIZER} -fno-omit-frame-pointer)
  add_link_options(${HALFBYTE_SANITIZER})
endif()
