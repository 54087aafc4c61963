// How fast this machine reads memory: GB/s of one sequential read of a buffer, all threads together.
//   bandwidth THREADS MIB REPEATS huge|small        prints one figure a line, one line a repeat
// With pages of 2 MiB the address translation costs nothing: the machine's ceiling. With pages of 4 KiB: the ceiling of a
// mapped file, and of memory for which nobody asked huge pages.
// The ceiling that a kernel for one row is compared with. Compiled by tests/bench/machine.py with -O3 -march=native.
// Each thread reads its own part through eight independent sums, so neither latency nor one adder is the limit.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <omp.h>
#include <sys/mman.h>

static constexpr std::size_t SUMS = 8, LANES = 8, STEP = SUMS * LANES;
typedef std::uint64_t Lanes __attribute__((vector_size(64)));

static std::uint64_t read_all(const std::uint64_t* data, std::size_t words) {
    Lanes sums[SUMS] = {};
    for (std::size_t i = 0; i + STEP <= words; i += STEP) {
        __builtin_prefetch(data + i + 512);
        __builtin_prefetch(data + i + 512 + 8);
        for (std::size_t s = 0; s < SUMS; s++) sums[s] += *reinterpret_cast<const Lanes*>(data + i + s * LANES);
    }
    Lanes total = {};
    for (const Lanes& sum : sums) total += sum;
    std::uint64_t result = 0;
    for (std::size_t lane = 0; lane < LANES; lane++) result += total[lane];
    return result;
}

int main(int argc, char** argv) {
    if (argc != 5) return std::fputs("usage: bandwidth THREADS MIB REPEATS huge|small\n", stderr), 2;
    const int threads = std::atoi(argv[1]), repeats = std::atoi(argv[3]);
    const std::size_t bytes = static_cast<std::size_t>(std::atoi(argv[2])) << 20;
    void* memory = std::aligned_alloc(std::size_t{1} << 21, bytes);
    if (!memory) return std::fputs("bandwidth: no memory\n", stderr), 1;
    madvise(memory, bytes, std::strcmp(argv[4], "huge") ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
    std::memset(memory, 1, bytes);
    const auto* data = static_cast<const std::uint64_t*>(memory);
    const std::size_t part = bytes / sizeof *data / threads / STEP * STEP;
    for (int repeat = 0; repeat < repeats; repeat++) {
        std::uint64_t sum = 0;
        const auto began = std::chrono::steady_clock::now();
#pragma omp parallel num_threads(threads) reduction(+ : sum)
        sum += read_all(data + omp_get_thread_num() * part, part);
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
        std::printf("%.3f\n", static_cast<double>(part * sizeof *data) * threads / seconds / 1e9);
        if (sum == 42) std::puts("");  // the sum is used, so the reads stay
    }
}
