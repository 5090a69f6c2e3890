// Products of a warpgroup on the tensor cores, which are computed when all its threads wait for them, and numbered
// barriers (bar.sync).
#pragma GCC optimize("O3")

#include <algorithm>
#include <deque>
#include <vector>

#include "asynchronous.h"
#include "scheduler.h"
#include "shared_memory.h"

namespace emulation {
namespace {

constexpr int kWarpgroup = 128, kRows = 64, kMostColumns = 128, kDepth = 32, kNumbers = 16;

// A thread's products that are not computed yet, the number of them at the end of each committed group, and its wait.
struct Asked {
  std::vector<Multiplication> multiplications;
  std::deque<size_t> groups;
  bool begun = false, waits = false;
  size_t count = 0;  // of products that it waits for
};

Asked asked[kMostFibers];
int arrived[kMostBlocks][kNumbers];

struct Descriptor {
  uint32_t start, stride, swizzle;
};

Descriptor descriptor_of(uint64_t bits) {
  return {static_cast<uint32_t>(bits & 0x3FFF) << 4, static_cast<uint32_t>(bits >> 32 & 0x3FFF) << 4,
          static_cast<uint32_t>(bits >> 62)};
}

// Reads rows of 32 elements from shared memory as floats.
void read_rows(uint64_t bits, Format format, int rows, float (*out)[kDepth]) {
  float table[256];
  for (uint32_t i = 0; i < 256; ++i) table[i] = decode(format, i);
  const Descriptor operand = descriptor_of(bits);
  if (operand.swizzle != 1 || operand.stride % 1024 != 0) fail("wgmma reads boxes of 128 bytes that are swizzled");
  for (int row = 0; row < rows; ++row) {
    for (uint32_t byte = 0; byte < kDepth; byte += 16) {
      uint32_t address = operand.start + row / 8 * operand.stride + row % 8 * 128 + byte;
      address ^= (address >> 7 & 7) << 4;
      const auto* found = static_cast<const uint8_t*>(pointer_in_shared(address, current_rank()));
      if (found == nullptr) fail("wgmma reads outside of shared memory");
      for (int i = 0; i < 16; ++i) out[row][byte + i] = table[found[i]];
    }
  }
}

// Calls function(a thread's sum, row, column) for all sums.
template <typename Function>
void for_sums(int first, size_t number, Function function) {
  for (int thread = 0; thread < kWarpgroup; ++thread) {
    const Multiplication& asked_for = asked[first + thread].multiplications[number];
    float* d = asked_for.d;
    for (int i = 0; i < kRows * asked_for.columns / kWarpgroup; ++i) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
      function(d[i], row, i / 4 * 8 + thread % 4 * 2 + i % 2);
    }
  }
}

void make(int first, size_t number) {
  static float a[kRows][kDepth], b[kMostColumns][kDepth], of_b[kDepth][kMostColumns], sums[kRows][kMostColumns];
  const Multiplication& wanted = asked[first].multiplications[number];
  const int columns = wanted.columns;
  read_rows(wanted.a, wanted.a_format, kRows, a);
  read_rows(wanted.b, wanted.b_format, columns, b);
  for (int k = 0; k < kDepth; ++k) {
    for (int column = 0; column < columns; ++column) of_b[k][column] = b[column][k];
  }
  for_sums(first, number, [&](float& sum, int row, int column) { sums[row][column] = wanted.adds ? sum : 0; });
  for (int row = 0; row < kRows; ++row) {
    for (int k = 0; k < kDepth; ++k) {
      const float factor = a[row][k];
      for (int column = 0; column < columns; ++column) sums[row][column] += factor * of_b[k][column];
    }
  }
  for_sums(first, number, [&](float& sum, int row, int column) { sum = sums[row][column]; });
}

bool are_one(const Multiplication& x, const Multiplication& y) {
  return x.a == y.a && x.b == y.b && x.columns == y.columns && x.adds == y.adds &&
         x.a_format.mantissa_bits == y.a_format.mantissa_bits &&
         x.b_format.mantissa_bits == y.b_format.mantissa_bits;
}

void make_all(int first, Place place) {
  const Asked& one = asked[first];
  for (int i = first; i < first + kWarpgroup; ++i) {
    if (asked[i].count != one.count || !std::equal(one.multiplications.begin(), one.multiplications.begin() + one.count,
                                                   asked[i].multiplications.begin(), are_one)) {
      fail("%s:%u: the threads of a warpgroup must ask for one product", place.file_name(), place.line());
    }
  }
  for (size_t i = 0; i < one.count; ++i) make(first, i);
}

int first_of_block() { return current / block_fibers * block_fibers; }

int first_of_warpgroup() {
  const int first = first_of_block();
  return first + (current - first) / kWarpgroup * kWarpgroup;
}

}  // namespace

void begin_products() { asked[current].begun = true; }

void multiply(const Multiplication& multiplication, Place place) {
  Asked& self = asked[current];
  if (!self.begun) fail("%s:%u: wgmma without a fence before", place.file_name(), place.line());
  if (first_of_warpgroup() + kWarpgroup > first_of_block() + block_fibers) {
    fail("wgmma in a warpgroup that is not whole");
  }
  if (!multiplication.adds) {  // until the thread has waited
    std::fill(multiplication.d, multiplication.d + multiplication.columns / 2, NAN);
  }
  self.multiplications.push_back(multiplication);
}

void commit_products() { asked[current].groups.push_back(asked[current].multiplications.size()); }

void wait_for_products(int left, Place place) {
  Asked& self = asked[current];
  const int done = static_cast<int>(self.groups.size()) - left;
  self.count = done > 0 ? self.groups[done - 1] : 0;
  self.waits = true;
  const int first = first_of_warpgroup();
  if (std::all_of(asked + first, asked + first + kWarpgroup, [](const Asked& thread) { return thread.waits; })) {
    make_all(first, place);
    for (int i = first; i < first + kWarpgroup; ++i) asked[i].waits = false;
    wake(asked + first);
  } else {
    wait_until_woken("wgmma.wait_group", asked + first, place);
  }
  if (done <= 0) return;
  self.begun = false;
  self.multiplications.erase(self.multiplications.begin(), self.multiplications.begin() + self.count);
  self.groups.erase(self.groups.begin(), self.groups.begin() + done);
  for (size_t& end : self.groups) end -= self.count;
}

void numbered_barrier(int number, int threads, Place place) {
  if (number < 0 || number >= kNumbers) fail("%s:%u: barrier %d", place.file_name(), place.line(), number);
  int& count = arrived[current_rank()][number];
  if (++count == threads) {
    count = 0;
    wake(&count);
  } else {
    wait_until_woken("bar.sync", &count, place);
  }
}

void check_products() {
  if (!asked[current].multiplications.empty()) fail("a thread ends before it has waited for its products");
}

void forget_products() {
  std::fill(asked, asked + kMostFibers, Asked());
  std::fill(&arrived[0][0], &arrived[0][0] + kMostBlocks * kNumbers, 0);
}

}  // namespace emulation
