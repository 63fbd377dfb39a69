// A CUDA runtime, driver and NVML of nothing but arithmetic: memory is counted, nothing is touched. Addresses only grow,
// or only fall, as those of a driver for Linux do, where MEMFIT_FALLING is 1.
// With it PyTorch's own CUDA allocator (libc10_cuda.so) runs on a machine without a card.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

namespace {
constexpr size_t kPage = 2 << 20;
size_t used = 0, next_address = 0x7F0000000000, next_handle = 0;
std::map<size_t, size_t> sizes;  // of segments by address, and of physical pages by handle

size_t setting(const char* name, size_t otherwise) {
  const char* text = getenv(name);
  return text ? strtoull(text, nullptr, 10) : otherwise;
}
size_t capacity() { static size_t value = setting("MEMFIT_CAPACITY", size_t{1} << 50); return value; }
size_t total() { static size_t value = setting("MEMFIT_TOTAL", size_t{1} << 40); return value; }
size_t addresses(size_t nbytes) {
  static bool falls = setting("MEMFIT_FALLING", 0);
  size_t pages = (nbytes + kPage - 1) / kPage * kPage;
  size_t first = falls ? next_address - pages : next_address;
  next_address = falls ? first : first + pages;
  return first;
}
bool take(size_t key, size_t nbytes) {
  used += nbytes;
  sizes[key] = nbytes;
  return true;
}
void give(size_t key) {
  used -= sizes.at(key);
  sizes.erase(key);
}

CUresult reserve(CUdeviceptr* address, size_t nbytes, size_t, CUdeviceptr, unsigned long long) {
  *address = addresses(nbytes);
  return CUDA_SUCCESS;
}
CUresult create(CUmemGenericAllocationHandle* handle, size_t nbytes, const CUmemAllocationProp*, unsigned long long) {
  if (used + nbytes > capacity()) return CUDA_ERROR_OUT_OF_MEMORY;
  take(*handle = ++next_handle, nbytes);
  return CUDA_SUCCESS;
}
CUresult release(CUmemGenericAllocationHandle handle) { give(handle); return CUDA_SUCCESS; }
CUresult granularity(size_t* nbytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) { *nbytes = kPage; return CUDA_SUCCESS; }
CUresult error_string(CUresult, const char** text) { *text = "no device"; return CUDA_SUCCESS; }
CUresult attribute(int* value, CUdevice_attribute, CUdevice) { *value = 0; return CUDA_SUCCESS; }
CUresult device(CUdevice* index, int) { *index = 0; return CUDA_SUCCESS; }
CUresult done() { return CUDA_SUCCESS; }
}  // namespace

extern "C" {
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  static const std::map<std::string, void*> entries = {
      {"cuMemAddressReserve", (void*)reserve}, {"cuMemCreate", (void*)create}, {"cuMemRelease", (void*)release},
      {"cuMemGetAllocationGranularity", (void*)granularity}, {"cuGetErrorString", (void*)error_string},
      {"cuDeviceGetAttribute", (void*)attribute}, {"cuDeviceGet", (void*)device}};
  auto found = entries.find(name);
  *entry = found == entries.end() ? (void*)done : found->second;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** address, size_t nbytes) {
  if (used + nbytes > capacity()) return cudaErrorMemoryAllocation;
  size_t first = addresses(nbytes);
  take(first, nbytes);
  *address = (void*)first;
  return cudaSuccess;
}
cudaError_t cudaFree(void* address) { give((size_t)address); return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* all) { *free = capacity() - used; *all = total(); return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  memset(properties, 0, sizeof *properties);
  properties->totalGlobalMem = total();
  properties->major = 8;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* index) { *index = 0; return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { *count = 1; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) { *status = cudaStreamCaptureStatusNone; return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "no device"; }
const char* cudaGetErrorName(cudaError_t) { return "no device"; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { *count = 0; return 0; }
int cuda_succeeds() { return 0; }
}

#define SUCCEEDS(name) asm(".globl " #name "\n.set " #name ", cuda_succeeds");
SUCCEEDS(cudaDeviceCanAccessPeer) SUCCEEDS(cudaDeviceEnablePeerAccess) SUCCEEDS(cudaDeviceGetDefaultMemPool)
SUCCEEDS(cudaDeviceGetStreamPriorityRange) SUCCEEDS(cudaDeviceSynchronize) SUCCEEDS(cudaEventCreateWithFlags)
SUCCEEDS(cudaEventDestroy) SUCCEEDS(cudaEventElapsedTime) SUCCEEDS(cudaEventQuery) SUCCEEDS(cudaEventRecord)
SUCCEEDS(cudaEventSynchronize) SUCCEEDS(cudaFreeAsync) SUCCEEDS(cudaGetLastError) SUCCEEDS(cudaGraphNodeGetDependencies)
SUCCEEDS(cudaIpcCloseMemHandle) SUCCEEDS(cudaIpcGetMemHandle) SUCCEEDS(cudaIpcOpenMemHandle) SUCCEEDS(cudaMallocAsync)
SUCCEEDS(cudaMemPoolGetAttribute) SUCCEEDS(cudaMemPoolSetAccess) SUCCEEDS(cudaMemPoolSetAttribute)
SUCCEEDS(cudaMemPoolTrimTo) SUCCEEDS(cudaMemcpy) SUCCEEDS(cudaMemcpyAsync) SUCCEEDS(cudaMemcpyPeerAsync)
SUCCEEDS(cudaSetDevice) SUCCEEDS(cudaStreamCreateWithPriority) SUCCEEDS(cudaStreamGetCaptureInfo) SUCCEEDS(cudaStreamQuery)
SUCCEEDS(cudaStreamSynchronize) SUCCEEDS(cudaStreamWaitEvent) SUCCEEDS(cudaThreadExchangeStreamCaptureMode)
SUCCEEDS(nvmlInit_v2) SUCCEEDS(nvmlDeviceGetHandleByPciBusId_v2) SUCCEEDS(nvmlDeviceGetNvLinkRemoteDeviceType)
SUCCEEDS(nvmlDeviceGetNvLinkRemotePciInfo_v2) SUCCEEDS(nvmlSystemGetCudaDriverVersion_v2)
