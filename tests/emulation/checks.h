// The handlers that the compiler's sanitizer checks call: for an address that is null, not aligned or overflows, for an
// index outside of an array, a shift by too much, and a number that its type cannot hold.
//
// They have the names of those in the sanitizer library of GCC and Clang, which would print a message and end the
// process.
#pragma once

#include <sys/types.h>

#include "fibers.h"

extern "C" {

struct SourceLocation {
  const char* file;
  uint32_t line, column;
};

void __ubsan_handle_type_mismatch_v1_abort(SourceLocation* where, void* address) {
  emulation::fail("%s:%u: the address %p is null, or not aligned as its type needs", where->file, where->line, address);
}

void __ubsan_handle_out_of_bounds_abort(SourceLocation* where, void* index) {
  emulation::fail("%s:%u: the index %zd is outside the array", where->file, where->line,
                  reinterpret_cast<ssize_t>(index));
}

void __ubsan_handle_shift_out_of_bounds_abort(SourceLocation* where, void*, void* by) {
  emulation::fail("%s:%u: a shift by %zd", where->file, where->line, reinterpret_cast<ssize_t>(by));
}

void __ubsan_handle_pointer_overflow_abort(SourceLocation* where, void* base, void* result) {
  emulation::fail("%s:%u: from the address %p to %p, which is in no array", where->file, where->line, base, result);
}

void __ubsan_handle_float_cast_overflow_abort(SourceLocation* where, void*) {
  emulation::fail("%s:%u: a float that the integer cannot hold", where->file, where->line);
}

void __ubsan_handle_add_overflow_abort(SourceLocation* where, void*, void*) {
  emulation::fail("%s:%u: a sum overflows", where->file, where->line);
}

void __ubsan_handle_sub_overflow_abort(SourceLocation* where, void*, void*) {
  emulation::fail("%s:%u: a difference overflows", where->file, where->line);
}

void __ubsan_handle_mul_overflow_abort(SourceLocation* where, void*, void*) {
  emulation::fail("%s:%u: a product overflows", where->file, where->line);
}

void __ubsan_handle_negate_overflow_abort(SourceLocation* where, void*) {
  emulation::fail("%s:%u: a negation overflows", where->file, where->line);
}

void __ubsan_handle_divrem_overflow_abort(SourceLocation* where, void*, void*) {
  emulation::fail("%s:%u: a quotient overflows", where->file, where->line);
}
}
