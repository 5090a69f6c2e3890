// What the checks call that the compiler adds: for an address that is not aligned, an index beyond an array,
// a shift by too much.
//
// The names are those of GCC's and Clang's own library, which prints and ends the process.
#pragma once

#include <sys/types.h>

#include "fibers.h"

extern "C" {

struct SourceLocation {
  const char* file;
  uint32_t line, column;
};

void __ubsan_handle_type_mismatch_v1_abort(SourceLocation* where, void* address) {
  emulation::fail("%s:%u: the address %p is not aligned as its type needs", where->file, where->line, address);
}

void __ubsan_handle_out_of_bounds_abort(SourceLocation* where, void* index) {
  emulation::fail("%s:%u: the index %zd is outside the array", where->file, where->line,
                  reinterpret_cast<ssize_t>(index));
}

void __ubsan_handle_shift_out_of_bounds_abort(SourceLocation* where, void*, void* by) {
  emulation::fail("%s:%u: a shift by %zd", where->file, where->line, reinterpret_cast<ssize_t>(by));
}
}
