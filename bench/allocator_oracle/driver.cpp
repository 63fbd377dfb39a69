// Drives PyTorch's CUDA allocator from lines "m ID BYTES STREAM", "f ID" and "e" (empty the cache). After each line it
// prints the address (0: out of memory, or no allocation), and allocated, reserved, requested bytes and retries.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/PeerToPeerAccess.h>

#include <cstdio>
#include <cstdlib>
#include <unordered_map>

int main() {
  c10::cuda::detail::init_p2p_access_cache(1);
  auto* allocator = c10::cuda::CUDACachingAllocator::get();
  allocator->init(1);
  if (const char* fraction = getenv("MEMFIT_FRACTION")) allocator->setMemoryFraction(atof(fraction), 0);
  std::unordered_map<long, void*> live;
  char op;
  while (scanf(" %c", &op) == 1) {
    void* address = nullptr;
    long id, nbytes, stream;
    if (op == 'm') {
      if (scanf("%ld %ld %ld", &id, &nbytes, &stream) != 3) return 1;
      try {
        address = live[id] = allocator->raw_alloc_with_stream(nbytes, reinterpret_cast<cudaStream_t>(stream));
      } catch (const c10::OutOfMemoryError&) {
      }
    } else if (op == 'f') {
      if (scanf("%ld", &id) != 1) return 1;
      allocator->raw_delete(live.at(id));
    } else {
      allocator->emptyCache();
    }
    auto stats = allocator->getDeviceStats(0);
    printf("%zu %ld %ld %ld %ld\n", reinterpret_cast<size_t>(address), stats.allocated_bytes[0].current,
           stats.reserved_bytes[0].current, stats.requested_bytes[0].current, stats.num_alloc_retries);
  }
}
