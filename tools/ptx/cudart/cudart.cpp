// A libcudart without a GPU, for libraries that nvcc compiled: it knows their kernels by the host's name for each, and hands launches and
// copies on. Functions that are not here are missing when a library is loaded, or called.
//
// Owns what libraries register and the configuration of a launch. Knows neither PTX nor memory of the device.

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace {

struct Size3 {
  unsigned x, y, z;
};
struct Configuration {  // cudaLaunchConfig_t
  Size3 grid, block;
  std::size_t shared;
  void* stream;
  void* attributes;
  unsigned count;
};
struct Kernel {
  const void* image;  // of the fat binary
  std::string name;
  int most_shared = 48 << 10;
};

using Launch = int (*)(const void* image, const char* name, const unsigned* sizes, std::size_t shared, int most_shared, void** arguments);
using Copy = int (*)(std::uint64_t target, std::uint64_t source, std::size_t size, int kind);
using Set = int (*)(std::uint64_t target, int byte, std::size_t size);

constexpr int kSuccess = 0, kInvalidFunction = 98, kNotSupported = 801;
std::mutex mutex;
std::map<const void*, Kernel> kernels;
Launch on_launch;
Copy on_copy;
Set on_set;
thread_local Configuration pushed;
thread_local int last_error;

int result(int code) {
  if (code != kSuccess) last_error = code;
  return code;
}

int launch(const void* host, Size3 grid, Size3 block, void** arguments, std::size_t shared) {
  Kernel kernel;
  {
    std::lock_guard lock(mutex);
    auto found = kernels.find(host);
    if (found == kernels.end() || !on_launch) return result(kInvalidFunction);
    kernel = found->second;
  }
  const unsigned sizes[6] = {grid.x, grid.y, grid.z, block.x, block.y, block.z};
  return result(on_launch(kernel.image, kernel.name.c_str(), sizes, shared, kernel.most_shared, arguments));
}

}  // namespace

extern "C" {

void set_handlers(Launch launch, Copy copy, Set set) { on_launch = launch, on_copy = copy, on_set = set; }

// What nvcc's code registers as a library is loaded.
void** __cudaRegisterFatBinary(void* wrapper) {
  return new void*(static_cast<void**>(wrapper)[1]);  // magic and version, then the image
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void** handle) { delete handle; }
void __cudaRegisterFunction(void** handle, const char* host, char* name, const char*, int, void*, void*, void*, void*, int*) {
  std::lock_guard lock(mutex);
  kernels[host] = Kernel{*handle, name};
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}
void __cudaInitModule(void**) {}

unsigned __cudaPushCallConfiguration(Size3 grid, Size3 block, std::size_t shared, void* stream) {
  pushed = Configuration{grid, block, shared, stream, nullptr, 0};
  return 0;
}
int __cudaPopCallConfiguration(Size3* grid, Size3* block, std::size_t* shared, void** stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *stream = pushed.stream;
  return kSuccess;
}
int __cudaGetKernel(const void** kernel, const void* host) {
  *kernel = host;
  return kSuccess;
}
int __cudaLaunchKernel(const void* kernel, Size3 grid, Size3 block, void** arguments, std::size_t shared, void*) {
  return launch(kernel, grid, block, arguments, shared);
}
int cudaLaunchKernel(const void* kernel, Size3 grid, Size3 block, void** arguments, std::size_t shared, void*) {
  return launch(kernel, grid, block, arguments, shared);
}
int cudaLaunchKernelExC(const Configuration* given, const void* kernel, void** arguments) {
  return launch(kernel, given->grid, given->block, arguments, given->shared);
}

// Attributes, of an H200.
int cudaGetDevice(int* device) {
  *device = 0;
  return kSuccess;
}
int cudaSetDevice(int) { return kSuccess; }
int cudaGetDeviceCount(int* count) {
  *count = 1;
  return kSuccess;
}
int cudaDeviceGetAttribute(int* value, int attribute, int) {
  static const std::map<int, int> values = {{1, 1024},   {8, 48 << 10},    {10, 32},        {16, 132},      {38, 50 << 20},  {39, 2048},
                                            {75, 9},     {76, 0},          {81, 228 << 10}, {82, 65536},    {97, 227 << 10}, {106, 32},
                                            {111, 1024}};
  auto found = values.find(attribute);
  if (found == values.end()) return result(kNotSupported);
  *value = found->second;
  return kSuccess;
}
int cudaFuncSetAttribute(const void* kernel, int attribute, int value) {
  std::lock_guard lock(mutex);
  if (attribute == 8) kernels[kernel].most_shared = value;  // MaxDynamicSharedMemorySize
  return kSuccess;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int threads, std::size_t shared, unsigned) {
  const std::size_t by_shared = (228 << 10) / (shared + 1024), by_threads = 2048 / threads;
  *count = static_cast<int>(by_shared < by_threads ? by_shared : by_threads);
  return kSuccess;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void* kernel, int threads, std::size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(count, kernel, threads, shared, 0);
}

// Memory. Streams have one order, that in which things are given.
int cudaMemcpyAsync(void* target, const void* source, std::size_t size, int kind, void*) {
  return result(on_copy(reinterpret_cast<std::uint64_t>(target), reinterpret_cast<std::uint64_t>(source), size, kind));
}
int cudaMemsetAsync(void* target, int byte, std::size_t size, void*) {
  return result(on_set(reinterpret_cast<std::uint64_t>(target), byte, size));
}

int cudaGetLastError() {
  const int error = last_error;
  last_error = kSuccess;
  return error;
}
int cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorString(int) { return "what the device without a GPU refused"; }
const char* cudaGetErrorName(int) { return "cudaErrorUnknown"; }
}
