// Calls handlers as XLA does, through frames of its C interface, and says what came of it.
//
// It reads calls from its input, one after the other, in words between spaces:
//
//     <target> <operands> {buffer} <results> {buffer} <attributes> {attribute}
//
//     buffer      <dtype> <rank> {dim} <bytes, -1: no address> <offset> <alias, -1: none> <content>
//                 `offset` bytes after an address divisible by 256; a result with an alias lies where that operand
//                 does; the content is -1 for any, 0 for zeros, a number that random bytes are made of, or x and bytes
//                 in hex
//     attribute   <name> <s: scalar, v: array, t: string, d: dict> <dtype> <count> <bytes in hex, after an x>
//                 behind a dict <attributes> {attribute}, those in it
//
// and writes a line for each: "ok", or "error <stage> <code> <message>"; or what no handler may do: "exception",
// "kernel" for a kernel of tests/emulation that did what no kernel may, "changed" for an operand that was written.
// Memory ends where a buffer does, so a sanitizer ends the process where a handler, a kernel or a product goes beyond.
#include <sanitizer/asan_interface.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "targets.h"

namespace emulation {
bool failed();
}
extern "C" {
void* emulation_map_stacks();
void emulation_begin(int64_t order, int64_t poison, void* stacks);
const char* emulation_failure();
}

struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  std::string message;
};

namespace {

using Bytes = std::vector<unsigned char>;

// ---- what XLA gives a handler ---------------------------------------------------------------------------------------

void* kept_state;  // of the call

XLA_FFI_Error* create_error(XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->errc, args->message}; }

void tell_error(XLA_FFI_Error_GetDetails_Args* args) {
  args->message = args->error->message.c_str();
  args->errc = args->error->code;
}

void destroy_error(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }

XLA_FFI_Error* get_stream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = nullptr;
  return nullptr;
}

XLA_FFI_Error* set_state(XLA_FFI_State_Set_Args* args) {
  kept_state = args->state;
  return nullptr;
}

XLA_FFI_Error* get_state(XLA_FFI_State_Get_Args* args) {
  args->state = kept_state;
  return nullptr;
}

XLA_FFI_Api make_api() {
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = create_error;
  api.XLA_FFI_Error_GetDetails = tell_error;
  api.XLA_FFI_Error_Destroy = destroy_error;
  api.XLA_FFI_Stream_Get = get_stream;
  api.XLA_FFI_State_Set = set_state;
  api.XLA_FFI_State_Get = get_state;
  return api;
}

// ---- reading --------------------------------------------------------------------------------------------------------

template <typename T>
T next() {
  T value;
  std::cin >> value;
  return value;
}

Bytes from_hex(const std::string& text) {  // after an x
  Bytes bytes;
  for (size_t i = 1; i + 1 < text.size(); i += 2) {
    bytes.push_back(static_cast<unsigned char>(std::stoi(text.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

constexpr size_t kAddressMultiple = 256;

struct Memory {
  unsigned char* base = nullptr;
  size_t offset = 0, bytes = 0;

  Memory(size_t offset, size_t bytes) : offset(offset), bytes(bytes) {
    if (posix_memalign(reinterpret_cast<void**>(&base), kAddressMultiple, offset + bytes) != 0) std::abort();
    ASAN_POISON_MEMORY_REGION(base, offset);
  }
  Memory(const Memory&) = delete;
  ~Memory() {
    ASAN_UNPOISON_MEMORY_REGION(base, offset);
    std::free(base);
  }
  unsigned char* data() const { return base + offset; }
};

void fill(const Memory& memory, const std::string& content) {
  if (content[0] == 'x') {
    const Bytes bytes = from_hex(content);
    if (!bytes.empty()) std::memcpy(memory.data(), bytes.data(), std::min(bytes.size(), memory.bytes));
    return;
  }
  if (content == "-1") return;
  if (content == "0") {
    std::memset(memory.data(), 0, memory.bytes);
    return;
  }
  std::minstd_rand random(static_cast<unsigned>(std::stoul(content)));
  for (size_t i = 0; i < memory.bytes; ++i) memory.data()[i] = static_cast<unsigned char>(random() >> 8);
}

struct Array {
  std::vector<int64_t> dims;
  std::unique_ptr<Memory> memory;  // null: no address, or that of another
  Bytes before;
  XLA_FFI_Buffer buffer{};
};

std::vector<std::unique_ptr<Array>> read_arrays(const std::vector<std::unique_ptr<Array>>& others, bool fills) {
  std::vector<std::unique_ptr<Array>> arrays(next<size_t>());
  for (auto& array : arrays) {
    array = std::make_unique<Array>();
    const int dtype = next<int>();
    array->dims.resize(next<size_t>());
    for (int64_t& dim : array->dims) dim = next<int64_t>();
    const int64_t bytes = next<int64_t>();
    const size_t offset = next<size_t>();
    const int alias = next<int>();
    const std::string content = next<std::string>();
    void* data = nullptr;
    if (alias >= 0 && static_cast<size_t>(alias) < others.size()) {
      data = others[alias]->buffer.data;
      others[alias]->before.clear();  // it may change
    } else if (bytes >= 0) {
      array->memory = std::make_unique<Memory>(offset, static_cast<size_t>(bytes));
      fill(*array->memory, content);
      data = array->memory->data();
      if (fills) array->before.assign(array->memory->data(), array->memory->data() + bytes);
    }
    array->buffer = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, static_cast<XLA_FFI_DataType>(dtype), data,
                     static_cast<int64_t>(array->dims.size()), array->dims.data()};
  }
  return arrays;
}

struct Attributes;

struct Attribute {
  std::string name;
  XLA_FFI_ByteSpan span;
  XLA_FFI_AttrType type;
  Bytes bytes;
  XLA_FFI_Scalar scalar;
  XLA_FFI_Array array;
  XLA_FFI_ByteSpan text;
  std::unique_ptr<Attributes> inside;

  void* value();
};

struct Attributes {
  std::vector<std::unique_ptr<Attribute>> all;
  std::vector<void*> values;
  std::vector<XLA_FFI_ByteSpan*> names;
  std::vector<XLA_FFI_AttrType> types;
  XLA_FFI_Attrs attrs;

  void add(std::unique_ptr<Attribute> attribute) {
    values.push_back(attribute->value());
    names.push_back(&attribute->span);
    types.push_back(attribute->type);
    all.push_back(std::move(attribute));
    attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, static_cast<int64_t>(all.size()), types.data(), names.data(),
             values.data()};
  }
};

void* Attribute::value() {
  if (type == XLA_FFI_AttrType_DICTIONARY) return &inside->attrs;
  if (type == XLA_FFI_AttrType_SCALAR) return &scalar;
  return type == XLA_FFI_AttrType_ARRAY ? static_cast<void*>(&array) : &text;
}

std::unique_ptr<Attributes> read_attributes() {
  auto attributes = std::make_unique<Attributes>();
  attributes->attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, 0, nullptr, nullptr, nullptr};
  for (size_t left = next<size_t>(); left > 0; --left) {
    auto attribute = std::make_unique<Attribute>();
    attribute->name = next<std::string>();
    attribute->span = {attribute->name.data(), attribute->name.size()};
    const char kind = next<char>();
    const auto dtype = static_cast<XLA_FFI_DataType>(next<int>());
    const size_t count = next<size_t>();
    attribute->bytes = from_hex(next<std::string>());
    Bytes& bytes = attribute->bytes;
    attribute->type = kind == 's'   ? XLA_FFI_AttrType_SCALAR
                      : kind == 'v' ? XLA_FFI_AttrType_ARRAY
                      : kind == 'd' ? XLA_FFI_AttrType_DICTIONARY
                                    : XLA_FFI_AttrType_STRING;
    attribute->scalar = {dtype, bytes.data()};
    attribute->array = {dtype, count, bytes.data()};
    attribute->text = {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
    if (kind == 'd') attribute->inside = read_attributes();
    attributes->add(std::move(attribute));
  }
  return attributes;
}

// ---- calling --------------------------------------------------------------------------------------------------------

struct Call {
  const Target* target;
  std::vector<std::unique_ptr<Array>> operands, results;
  std::unique_ptr<Attributes> attributes;
  std::string outcome = "ok";

  // Whether the next stage may follow.
  bool run(const char* stage_name, XLA_FFI_ExecutionStage stage, XLA_FFI_Handler* handler);
};

bool Call::run(const char* stage_name, XLA_FFI_ExecutionStage stage, XLA_FFI_Handler* handler) {
  if (handler == nullptr) return true;  // most targets have one stage
  static const XLA_FFI_Api api = make_api();
  const bool has_arrays = stage != XLA_FFI_ExecutionStage_INSTANTIATE;
  std::vector<void*> args, rets;
  if (has_arrays) {
    for (auto& operand : operands) args.push_back(&operand->buffer);
    for (auto& result : results) rets.push_back(&result->buffer);
  }
  std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.stage = stage;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args.size()), arg_types.data(), args.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets.size()), ret_types.data(), rets.data()};
  frame.attrs = attributes->attrs;
  std::unique_ptr<XLA_FFI_Error> error(handler(&frame));
  if (emulation::failed()) {
    outcome = std::string("kernel ") + emulation_failure();
  } else if (error) {
    outcome = "error " + std::string(stage_name) + " " + std::to_string(error->code) + " " + error->message;
  } else {
    return true;
  }
  return false;
}

void run(Call& call) {
  const Target& target = *call.target;
  kept_state = nullptr;
  try {
    const bool goes_on =
        call.run("instantiate", XLA_FFI_ExecutionStage_INSTANTIATE, target.instantiate) &&
        call.run("initialize", XLA_FFI_ExecutionStage_INITIALIZE, target.initialize);
    if (goes_on) call.run("execute", XLA_FFI_ExecutionStage_EXECUTE, target.execute);
  } catch (const std::exception& thrown) {
    call.outcome = std::string("exception ") + thrown.what();
  } catch (...) {
    call.outcome = "exception of no known type";
  }
  if (kept_state != nullptr) target.state_info()->deleter(kept_state);
  for (size_t i = 0; i < call.operands.size(); ++i) {
    const Array& operand = *call.operands[i];
    if (operand.before.empty() || std::memcmp(operand.before.data(), operand.buffer.data, operand.before.size()) == 0) {
      continue;
    }
    call.outcome = "changed operand " + std::to_string(i);
  }
}

}  // namespace

int main() {
  void* const stacks = emulation_map_stacks();
  int64_t types = 0;
  for (const Target& target : kTargets) {
    if (target.state_id != nullptr) target.state_id()->type_id = ++types;
  }
  for (std::string name; std::cin >> name;) {
    Call call{};
    call.outcome = "ok";
    for (const Target& target : kTargets) {
      if (name == target.name) call.target = &target;
    }
    call.operands = read_arrays({}, true);
    call.results = read_arrays(call.operands, false);
    call.attributes = read_attributes();
    if (call.target == nullptr) {
      std::cerr << "no such target: " << name << "\n";
      return 1;
    }
    emulation_begin(0, 0xA5, stacks);
    run(call);
    for (char& letter : call.outcome) letter = letter == '\n' ? '\v' : letter;
    std::cout << call.outcome << std::endl;
  }
}
